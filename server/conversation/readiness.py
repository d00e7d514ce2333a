"""The port to the dependencies of the server."""

from typing import Protocol


class Probe(Protocol):
    """One dependency of the server."""

    @property
    def name(self) -> str:
        """Its name in `/readyz`."""
        ...

    async def check(self) -> None:
        """Return if the dependency is usable; otherwise raise an `Unavailable` or `Setup` error with the cause.

        Never waits longer than one connection attempt.
        """
        ...
