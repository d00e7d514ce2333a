"""The port through which operators see replays. Its methods neither raise nor wait.

Calls of replays are counted here only: they are no part of the cost of live conversations.
"""

from enum import StrEnum
from typing import Protocol

from server.conversation.call import CallEnd, CallStart
from server.conversation.conversation import Lease
from server.conversation.turn import ModelResponseTurn
from server.replay.rerun.result import Outcome
from server.turns.observer import TurnTimes


class CallPurpose(StrEnum):
    """What a call of a replay is made for."""

    ANSWER = "answer"
    """The candidate's."""
    JUDGE = "judge"
    COMPACTION = "compaction"
    """A summary that the candidate's own history needs."""


class Departure(StrEnum):
    """How a process and an item part."""

    DONE = "done"
    FAILED = "failed"
    GIVEN_BACK = "given_back"
    """Unfinished: the replay does not run any more, or the process stops."""
    LOST = "lost"
    """Another process has taken it over."""


class ReplayObserver(Protocol):
    """Told about everything that this process does for replays."""

    def call_ended(self, start: CallStart, end: CallEnd, purpose: CallPurpose) -> None:
        """A call to a provider is over, whichever way; an answer may take several."""
        ...

    def result_recorded(self, outcome: Outcome) -> None:
        """What became of an answer is durable."""
        ...

    def item_left(self, departure: Departure, *, error_code: str | None = None) -> None:
        """This process runs an item no more. The code where it failed."""
        ...


class CandidateTurns:
    """Implements `server.turns.observer.TurnObserver` for turns of replays: only their calls are counted."""

    def __init__(self, observer: ReplayObserver) -> None:
        self._observer = observer

    def turn_began(self, lease: Lease) -> None:
        """Nothing."""

    def call_ended(self, lease: Lease, start: CallStart, end: CallEnd, *, assistant_id: str | None) -> None:  # noqa: ARG002  reason: the port's
        self._observer.call_ended(start, end, CallPurpose.ANSWER)

    def turn_ended(self, lease: Lease, turn: ModelResponseTurn, times: TurnTimes) -> None:
        """Nothing: the result is counted."""

    def turn_lost(self, lease: Lease, code: str) -> None:
        """Nothing: the item is counted."""

    def turn_stalled(self, lease: Lease) -> None:
        """Nothing."""

    def turn_recovered(self, lease: Lease) -> None:
        """Nothing."""
