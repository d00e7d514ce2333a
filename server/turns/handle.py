"""The port through which a turn is listened to, whoever runs it and whether or not it still runs."""

from collections.abc import MutableMapping, Sequence
from typing import Final, Protocol

from server.conversation.event import TurnEnded, TurnEvent

MAX_BATCH: Final = 256
"""How many events `EventReader.next` gives at once: what a listener that does not read holds for itself."""


class EventReader(Protocol):
    """One listener's place in a turn. It holds up nobody: not the turn, and not other listeners."""

    @property
    def encodings(self) -> MutableMapping[int, bytes]:
        """Events by their numbers as they go over the wire. Shared by the listeners of a turn in this process, who
        fill it: each event is encoded once, however many listen.
        """
        ...

    async def next(self, limit_seconds: float) -> Sequence[tuple[int, TurnEvent]] | None:
        """Events with their numbers that have come since the last call, `MAX_BATCH` at most.

        Empty where none came within the limit; None after the last one. Raises `StrataError` where the end of the turn
        cannot be heard here: listen again, it may be heard elsewhere or later.
        """
        ...

    def close(self) -> None:
        """Stops listening. The turn goes on."""
        ...


class TurnHandle(Protocol):
    """A turn that can be listened to."""

    @property
    def conversation_id(self) -> str: ...

    @property
    def input_seq(self) -> int: ...

    @property
    def seq(self) -> int:
        """The number of the answer."""
        ...

    @property
    def duplicate(self) -> bool:
        """Whether the request was recognised as one that had been accepted before."""
        ...

    def read(self, after: int = 0) -> EventReader:
        """From the event behind this number on."""
        ...

    async def wait(self) -> TurnEnded:
        """Until the answer is durable. Raises `StrataError` as `EventReader.next` does."""
        ...
