"""The port through which operators see turns: metrics and traces hang on it. Nothing here may raise or wait."""

from dataclasses import dataclass
from typing import Protocol

from server.conversation.call import CallEnd, CallStart
from server.conversation.conversation import Lease
from server.conversation.turn import ModelResponseTurn


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTimes:
    """Seconds on this process' clock since the request came in; None where a step was not reached."""

    accepted: float | None = None
    """The input was durable."""
    built: float | None = None
    """The payload was built."""
    first_event: float | None = None
    """Something of the answer was given out."""
    ended: float | None = None
    """The answer was durable."""


class TurnObserver(Protocol):
    """Told about everything that happens to the turns of this process."""

    def turn_began(self, lease: Lease) -> None:
        """The input is durable."""
        ...

    def call_ended(self, lease: Lease, start: CallStart, end: CallEnd, *, assistant_id: str | None) -> None:
        """A call to a provider is over, whichever way; a turn may have several. None: whose it was is not known."""
        ...

    def turn_ended(self, lease: Lease, turn: ModelResponseTurn, times: TurnTimes) -> None:
        """The answer is durable."""
        ...

    def turn_lost(self, lease: Lease, code: str) -> None:
        """The turn could not be written down: another process has taken it, or the database is away."""
        ...

    def turn_stalled(self, lease: Lease) -> None:
        """The provider had ended and the turn made no progress for too long, so that the server ends it."""
        ...

    def turn_recovered(self, lease: Lease) -> None:
        """A turn whose process died was ended by this one."""
        ...
