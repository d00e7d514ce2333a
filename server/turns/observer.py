"""The ports that are notified of turns: for metrics and spans, and for what follows a turn.

Implementations must neither raise nor wait.
"""

from dataclasses import dataclass
from typing import Protocol

from server.conversation.call import CallEnd, CallStart
from server.conversation.conversation import Lease
from server.conversation.store import PayloadSource
from server.conversation.turn import ModelResponseTurn


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTimes:
    """Seconds since the request arrived, by the clock of this process. None for a step that was not reached."""

    accepted: float | None = None
    """The input was durable."""
    built: float | None = None
    """The payload was built."""
    first_event: float | None = None
    """The first event of the answer was sent."""
    ended: float | None = None
    """The answer was durable."""


class TurnObserver(Protocol):
    """Notified of the turns of this process."""

    def turn_began(self, lease: Lease) -> None:
        """The input is durable."""
        ...

    def call_ended(self, lease: Lease, start: CallStart, end: CallEnd, *, assistant_id: str | None) -> None:
        """A call to a provider has ended, with any outcome. A turn can have several. None: the assistant is unknown."""
        ...

    def turn_ended(self, lease: Lease, turn: ModelResponseTurn, times: TurnTimes) -> None:
        """The answer is durable."""
        ...

    def turn_lost(self, lease: Lease, code: str) -> None:
        """The turn could not be stored: another process has taken its lease, or the database is unavailable."""
        ...

    def turn_stalled(self, lease: Lease) -> None:
        """The turn made no progress for too long after its provider had ended, and the server ends it."""
        ...

    def turn_recovered(self, lease: Lease) -> None:
        """This process has ended a turn whose process died."""
        ...


class TurnFollower(Protocol):
    """Notified when the answer of a turn is durable and its last event was sent."""

    def turn_followed(
        self, tenant_id: str, source: PayloadSource, static_length: int, turn: ModelResponseTurn, native_length: int
    ) -> None:
        """`source` is what the payload was built from, `static_length` the number of characters of its static text."""
        ...


class NoFollower:
    """For processes in which nothing follows a turn."""

    def turn_followed(
        self, tenant_id: str, source: PayloadSource, static_length: int, turn: ModelResponseTurn, native_length: int
    ) -> None:
        """Do nothing."""
