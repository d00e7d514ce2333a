"""The port for metrics and logs of replays. Its methods neither raise nor wait.

Calls of replays are reported here only: they are not part of the cost of live conversations.
"""

from enum import StrEnum
from typing import Protocol

from server.compaction.report import CompactionReport
from server.conversation.call import CallEnd, CallStart
from server.conversation.conversation import Lease
from server.conversation.turn import ModelResponseTurn
from server.replay.rerun.result import Outcome
from server.turns.observer import TurnTimes


class CallPurpose(StrEnum):
    """The purpose of a call of a replay."""

    ANSWER = "answer"
    """The candidate's answer."""
    JUDGE = "judge"
    COMPACTION = "compaction"
    """A summary for a compaction of the replay conversation."""


class Departure(StrEnum):
    """Why a process no longer runs an item."""

    DONE = "done"
    FAILED = "failed"
    GIVEN_BACK = "given_back"
    """The item was released unfinished: the replay is not running any more, or the process shuts down."""
    LOST = "lost"
    """Another process has claimed the item."""


class ReplayObserver(Protocol):
    """Receives the calls, results and items of this process. Implemented in `server.telemetry.replays`."""

    def call_ended(self, start: CallStart, end: CallEnd, purpose: CallPurpose) -> None:
        """A call to a provider has ended, successfully or not. An answer may take several calls."""
        ...

    def result_recorded(self, outcome: Outcome) -> None:
        """A result was stored."""
        ...

    def item_left(self, departure: Departure, *, error_code: str | None = None) -> None:
        """This process no longer runs an item. `error_code`: why the item failed."""
        ...


class CandidateTurns:
    """Implements `server.turns.observer.TurnObserver` for turns of replays: only their calls are counted."""

    def __init__(self, observer: ReplayObserver) -> None:
        self._observer = observer

    def turn_began(self, lease: Lease) -> None:
        """Do nothing."""

    def call_ended(self, lease: Lease, start: CallStart, end: CallEnd, *, assistant_id: str | None) -> None:  # noqa: ARG002  reason: the port's
        self._observer.call_ended(start, end, CallPurpose.ANSWER)

    def turn_ended(self, lease: Lease, turn: ModelResponseTurn, times: TurnTimes) -> None:
        """Do nothing: the result is counted."""

    def turn_lost(self, lease: Lease, code: str) -> None:
        """Do nothing: the item is counted."""

    def turn_stalled(self, lease: Lease) -> None:
        """Do nothing."""

    def turn_recovered(self, lease: Lease) -> None:
        """Do nothing."""


class CompactionCalls:
    """Implements `server.compaction.report.CompactionObserver`: counts calls as calls of replays.

    Compactions of replay conversations are not part of the metrics of live conversations.
    """

    def __init__(self, observer: ReplayObserver) -> None:
        self._observer = observer

    def compaction_ended(self, report: CompactionReport) -> None:
        """Do nothing: the replay conversation shows it."""

    def compaction_queued(self, conversation_id: str, reason: str) -> None:
        """Do nothing: no job is queued for replay conversations."""

    def compaction_blocked(self, conversation_id: str, reason: str, buffer_tokens: int) -> None:
        """Do nothing: the next call fails if it is too long."""

    def compaction_unblocked(self, conversation_id: str) -> None:
        """Do nothing."""

    def call_ended(self, start: CallStart, end: CallEnd, *, assistant_id: str) -> None:  # noqa: ARG002  reason: the port's
        self._observer.call_ended(start, end, CallPurpose.COMPACTION)
