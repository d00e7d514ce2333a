"""The port through which operators see replays. Nothing here may raise or wait.

What replays ask of providers is told here and nowhere else: it is no part of what live conversations cost.
"""

from enum import StrEnum
from typing import Protocol

from server.conversation.call import CallEnd, CallStart
from server.replay.rerun.result import Outcome


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
