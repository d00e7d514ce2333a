"""The port to whatever has to be there before the server can serve."""

from typing import Protocol


class Probe(Protocol):
    """One thing that the server depends on."""

    @property
    def name(self) -> str:
        """What `/readyz` calls it."""
        ...

    async def check(self) -> None:
        """Returns when the thing is usable now, else raises an `Unavailable` or `Setup` error that says why.

        Bounded in time: it never waits longer than one connection attempt.
        """
        ...
