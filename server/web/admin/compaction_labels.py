"""What a compaction comes to, in words for operators."""

from collections.abc import Mapping
from typing import Final

from server.compaction.compactor import NOT_BEGUN, UNDONE
from server.compaction.plan import CompactionReason, HoldReason
from server.compaction.report import CompactionOutcome, CompactionReport

_DEEDS: Final[Mapping[CompactionOutcome, str]] = {
    CompactionOutcome.COMPACTED: "Turns become history of the static layer.",
    CompactionOutcome.SIGNED: "The provider is asked to sum turns up in a block that it signs.",
    CompactionOutcome.SUMMARISED: "The provider is asked to sum up the oldest history.",
    CompactionOutcome.OLDEST_LEFT_OUT: "No summary is to be had, and the oldest history is left out.",
    CompactionOutcome.UNDONE: "The latest compaction is taken back.",
    CompactionOutcome.UNCHANGED: "Nothing is moved.",
}
_REASONS: Final[Mapping[str, str]] = {
    CompactionReason.THRESHOLD_TURNS: "There are more turns in the buffer than the policy wants.",
    CompactionReason.THRESHOLD_TOKENS: "There are more tokens in the buffer than the policy wants.",
    CompactionReason.RENT: "It pays, and has been waited for long enough.",
    CompactionReason.COLD_CACHE: "The provider's cache is cold: the next call writes everything anyway.",
    CompactionReason.WINDOW: "The requests are near the model's window.",
    CompactionReason.REQUESTED: "Because somebody asks for it.",
    HoldReason.SWITCHED_OFF: "The assistant's policy is not to compact.",
    HoldReason.NOTHING_TO_MOVE: "All exchanges of the buffer are among those that have to stay.",
    HoldReason.BLOCKED_BY_OPEN_CALL: "A tool call has no result yet, and no cut goes through it.",
    HoldReason.EXCHANGE_UNFINISHED: "An answer is still to come.",
    HoldReason.BELOW_THRESHOLD: "The buffer is shorter than the policy's threshold.",
    HoldReason.SAVES_NOTHING: "Later calls would not be cheaper.",
    HoldReason.NOT_YET_WORTH_IT: "It would not pay yet.",
    HoldReason.WAITS_FOR_COLD_CACHE: "It waits until the provider's cache is cold: then it costs nothing.",
    NOT_BEGUN: "No request was ever sent.",
    UNDONE: "A compaction was undone here: from then on only force, or a short window, compacts.",
}


def describe_action(report: CompactionReport) -> str:
    """What is done."""
    return _DEEDS[report.outcome]


def tell_reason(report: CompactionReport) -> str:
    """Why it is done, or why not. One of a later release is named as it is."""
    return _REASONS.get(report.reason, report.reason)
