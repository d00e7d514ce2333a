"""What became of a call, in words: why it ended, why the cache missed, what was done to the history before it left."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from server.caching.expectation import MissReason
from server.conversation.block import JsonValue
from server.conversation.call import OUTCOME_UNKNOWN, Call
from server.conversation.errors import StrataError, every_error
from server.conversation.turn import ModelResponseTurn, TurnState
from server.payload.signatures import WithheldReason

PROVIDER_UNKNOWN: Final = "provider_unknown"
UNREADABLE: Final = "stored_unreadable"
NOT_RECORDED: Final = "request_not_recorded"


class CacheVerdict(StrEnum):
    """How what came from the cache compares with what should have."""

    AS_EXPECTED = "as expected"
    MORE = "more than expected"
    LESS = "less than possible"
    """For a reason that was known when it left."""
    MISS = "missed"
    """It should have come, and did not."""
    NOTHING = "nothing expected"
    UNKNOWN = "not known"


class OutcomeKind(StrEnum):
    """How a call ended."""

    ANSWERED = "answered"
    STOPPED = "stopped"
    """Somebody stopped it, or the process that made it; what had arrived is kept."""
    FAILED = "failed"
    RUNNING = "running"
    LOST = "lost"
    """The process that made it died before it could write down how it ended."""
    UNKNOWN = "asked, outcome unknown"
    """The process that made it died, and nothing of an answer was kept. It may be billed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a call ended, in words."""

    kind: OutcomeKind
    words: str
    advice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheExplanation:
    """The verdict, and a sentence for it."""

    verdict: CacheVerdict
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorExplanation:
    """What an error code means."""

    message: str
    advice: str


_MISSES: Final[Mapping[str, str]] = {
    MissReason.MODEL_CHANGED: "The call before went to another model, and models share no cache.",
    MissReason.ACCOUNT_CHANGED: "The call before was made with other credentials, and accounts share no cache.",
    MissReason.EPOCH_BEGAN: "A new epoch began: the static text, the tools or the signed summary changed on purpose.",
    MissReason.ORDER_CHANGED: "The layers stand in another order than in the call before.",
    MissReason.PREFIX_BREAK: "A block changed that should not have: see the first break in the difference below.",
    MissReason.TTL_EXPIRED: "Too much time passed since the call before; the provider had let go of it.",
    MissReason.BELOW_MINIMUM: "The request before was shorter than the provider caches at all.",
    MissReason.CACHE_GONE: "The explicit cache that stood for it was expired or deleted.",
    MissReason.UNKNOWN: "Nothing here explains it: the provider did not find what it should still have had.",
}
_KNOWN_BEFORE: Final = frozenset(MissReason) - {MissReason.PREFIX_BREAK, MissReason.CACHE_GONE, MissReason.UNKNOWN}
"""Reasons that are nobody's fault."""
_WITHHELD: Final[Mapping[str, str]] = {
    WithheldReason.PROVIDER: "another vendor made it",
    WithheldReason.FAMILY: "a model made it whose signatures this one does not read",
    WithheldReason.ACCOUNT: "it was made with other credentials",
    WithheldReason.PREFIX: "it was made behind another static text or other tools",
    WithheldReason.REJECTED: "the provider rejected signatures of this history, and they are not sent again",
    WithheldReason.UNSIGNED: "the first call of the answer came without the signature that the model insists on",
}
_REPAIRS: Final[Mapping[str, str]] = {
    "answer_left_out": "An answer had nothing that could be sent back, and was left out.",
    "task_joined": "A task stood behind results that nothing had answered, and went out together with them.",
    "task_supplied": "An answer stood behind nothing it could answer; a task was put before it.",
    "call_abandoned": "A new task came before the calls were answered; a result that says so was put in.",
    "result_supplied": "A call had no result; one that says so was put in.",
    "orphan_result_dropped": "A result answered no call, and was left out.",
    "repeated_result_dropped": "A call had several results; the first was sent.",
    "calls_as_text": "Calls and their results went out as text, since the provider rejected them as calls.",
    "call_renamed": "The id of a call was taken already; it went out under another.",
}
_WARNINGS: Final[Mapping[str, str]] = {
    "token_count_out_of_range": "The provider reported a token count that cannot be one; another one was counted.",
    "profile_assumed": "The model is not listed; it was called as the newest of its family would be.",
    "thinking_switched_off": "The open tool loop does not begin with thinking, so thinking was off for this request.",
    "prefix_break": "The request does not begin like the one before, where it should.",
    "signatures_rejected": "The attempt before was rejected for its signatures or unknown parts; this one has none.",
    "signatures_withheld": "Answers went back without their signatures: {reason}.",
    "summary": "A call of no turn: it sums up the oldest history.",
    "signed_compaction": "A call of no turn: it asks for a signed block in place of old turns.",
    "judge": "A call of no turn: it asks a judge about an answer.",
    "not_asked": "Nobody was asked: it stands in the place of a recorded call.",
}
_TEMPLATES: Final[Mapping[str, str]] = {
    "parse": "It does not parse; its own text was sent.",
    "render": "It could not be rendered; its own text was sent.",
    "too_long": "It took too long; its own text was sent.",
    "too_large": "It grew too large; its own text was sent.",
    "not_json": "What it gave is no JSON.",
}
_STOPS: Final[Mapping[str, str]] = {
    "end_turn": "The model finished.",
    "tool_use": "The model asks for tools.",
    "length": "The answer reached its length limit.",
    "refusal": "The model declined to answer.",
    "paused": "The model paused and would go on.",
    "error": "It ended with an error.",
    "aborted": "It was stopped.",
}
_PROOFS: Final[Mapping[str, str]] = {
    PROVIDER_UNKNOWN: "This release does not speak with the provider.",
    NOT_RECORDED: "The server died before it had recorded the request.",
    UNREADABLE: "What is stored for it cannot be read; the server's log says what of it.",
    "not_asked": "Nobody was asked: it stands in the place of a recorded call.",
    "call_lost": "The process that made it died before its answer could be read. It was asked once more.",
}
_STOPPED: Final[Mapping[TurnState, str]] = {
    TurnState.CANCELLED: "Somebody cancelled the turn. What had arrived is kept.",
    TurnState.INTERRUPTED: "The process that ran the turn ended. What had arrived is kept.",
}
_EXPECTED_SHARE: Final = 0.95
"""As `server.caching.expectation` has it: tokens of a part are estimated by its bytes."""


def explain_outcome(call: Call, turn: ModelResponseTurn | None, stop_reason: str | None) -> Outcome:
    """How a call ended. `turn` is what the turn came to; `stop_reason` what the answer says of itself."""
    if call.end is None:
        if turn is None:
            return Outcome(kind=OutcomeKind.RUNNING, words="It has not ended. Load the page again to see more.")
        words = "The process that made the call died before it could write down how it ended."
        return Outcome(kind=OutcomeKind.LOST, words=words)
    unknown = next((note for note in call.start.warnings if note.get("kind") == OUTCOME_UNKNOWN), None)
    if unknown is not None:
        return Outcome(kind=OutcomeKind.UNKNOWN, words=explain_warning(unknown))
    if call.end.error_code is not None:
        found = explain_error(call.end.error_code)
        return Outcome(kind=OutcomeKind.FAILED, words=found.message, advice=found.advice)
    is_last = turn is not None and turn.attempt == call.start.attempt
    if is_last and turn is not None and turn.state in _STOPPED:
        return Outcome(kind=OutcomeKind.STOPPED, words=_STOPPED[turn.state])
    return Outcome(kind=OutcomeKind.ANSWERED, words=explain_stop(stop_reason) or "It ended as it should.")


def explain_cache(call: Call) -> CacheExplanation:
    """What came from the cache, against what should have."""
    expected, end = call.start.cache_expected_tokens, call.end
    if end is None:
        return CacheExplanation(verdict=CacheVerdict.UNKNOWN, words="The call has not said yet.")
    if not end.usage.input_tokens:
        return CacheExplanation(verdict=CacheVerdict.UNKNOWN, words="The provider reported no tokens.")
    read = end.usage.cache_read_tokens
    if end.cache_miss_reason is not None:
        is_known = end.cache_miss_reason in _KNOWN_BEFORE and read >= (expected or 0) * _EXPECTED_SHARE
        verdict = CacheVerdict.LESS if is_known else CacheVerdict.MISS
        return CacheExplanation(verdict=verdict, words=explain_miss(end.cache_miss_reason))
    if expected is None:
        words = "The call before was not answered, so nobody can say what should have come."
        return CacheExplanation(verdict=CacheVerdict.UNKNOWN, words=words)
    if read > expected:
        words = "Other conversations, or an earlier call, had kept the same text warm."
        return CacheExplanation(verdict=CacheVerdict.MORE, words=words)
    if expected == 0:
        words = "No call before it had left anything that it could read."
        return CacheExplanation(verdict=CacheVerdict.NOTHING, words=words)
    if read < expected * _EXPECTED_SHARE:
        return CacheExplanation(verdict=CacheVerdict.MISS, words=explain_miss(MissReason.UNKNOWN))
    return CacheExplanation(verdict=CacheVerdict.AS_EXPECTED, words="All that should have come from the cache did.")


def explain_miss(reason: str) -> str:
    """Why the cache missed. A provider's own reason stands in its own words."""
    return _MISSES.get(reason, f"The provider says: {reason}.")


def explain_error(code: str) -> ErrorExplanation:
    """What an error code means, and what to do about it; empty for one that this release does not have."""
    found: type[StrataError] | None = next((kind for kind in every_error() if kind.code == code), None)
    if found is None:
        return ErrorExplanation(message=_PROOFS.get(code, ""), advice="")
    return ErrorExplanation(message=" ".join((found.__doc__ or "").split()), advice=found.hint)


def explain_stop(reason: str | None) -> str:
    """Why the model stopped."""
    return _STOPS.get(reason or "", "")


def explain_withheld(reason: str) -> str:
    """Why signatures were not sent."""
    return _WITHHELD.get(reason, reason)


def explain_repair(note: Mapping[str, JsonValue]) -> str:
    """What was done to the history; empty for a repair that this release does not know."""
    return _REPAIRS.get(str(note.get("kind")), "")


def explain_warning(note: Mapping[str, JsonValue]) -> str:
    """What was assumed or done without; empty for a warning that this release does not know."""
    if note.get("kind") == OUTCOME_UNKNOWN:
        return _explain_unknown(note)
    reason = explain_withheld(str(note.get("reason")))
    return _WARNINGS.get(str(note.get("kind")), "").format(reason=reason)


def _explain_unknown(note: Mapping[str, JsonValue]) -> str:
    cost = note.get("estimated_cost_usd")
    least = f"about {note.get('estimated_input_tokens')} input tokens"
    least += "" if cost is None else f", {cost} USD"
    return (
        "The server died while the provider was asked, and nothing of an answer was kept. Whether it was billed is not "
        f"known; if it was, the input alone is {least} (estimated)."
    )


def explain_template(note: Mapping[str, JsonValue]) -> str:
    """What a template failed at."""
    return _TEMPLATES.get(str(note.get("kind")), "")
