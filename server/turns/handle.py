"""The port for listening to a turn, in whichever process it runs, and also after it has ended."""

from collections.abc import MutableMapping, Sequence
from typing import Final, Protocol

from server.conversation.event import TurnEnded, TurnEvent

MAX_BATCH: Final = 256
"""The maximum number of events that `EventReader.next` returns. It bounds the memory of a listener that does not
read."""


class EventReader(Protocol):
    """One listener's position in a turn. A slow listener delays neither the turn nor other listeners."""

    @property
    def encodings(self) -> MutableMapping[int, bytes]:
        """Encoded events by their numbers. The listeners of a turn in this process share and fill it, so that each
        event is encoded once.
        """
        ...

    async def next(self, limit_seconds: float) -> Sequence[tuple[int, TurnEvent]] | None:
        """Return the next events with their numbers, at most `MAX_BATCH`.

        Returns an empty sequence if none arrived within the limit, and None after the last one. Raises `StrataError` if
        this process cannot report the end of the turn; another process may, or this one later.
        """
        ...

    def close(self) -> None:
        """Stop listening. The turn continues."""
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
        """Whether the request repeats one that was accepted before."""
        ...

    def read(self, after: int = 0) -> EventReader:
        """Return a reader of the events after this number."""
        ...

    async def wait(self) -> TurnEnded:
        """Wait until the answer is durable. Raises `StrataError` as `EventReader.next` does."""
        ...
