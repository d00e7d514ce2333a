"""Explanations of recorded codes for operators: outcomes, cache misses, errors, repairs, warnings and signatures."""

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
    """How the tokens read from the cache compare with the expectation."""

    AS_EXPECTED = "as expected"
    MORE = "more than expected"
    LESS = "less than possible"
    """For a reason that was known before the call."""
    MISS = "missed"
    """Tokens were expected from the cache and not read."""
    NOTHING = "nothing expected"
    UNKNOWN = "not known"


class OutcomeKind(StrEnum):
    """How a call ended."""

    ANSWERED = "answered"
    STOPPED = "stopped"
    """The turn was cancelled, or the process was stopped. The received part is stored."""
    FAILED = "failed"
    RUNNING = "running"
    LOST = "lost"
    """The process died before it recorded how the call ended."""
    UNKNOWN = "outcome unknown"
    """The process died, and no part of an answer was stored. The call may be billed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a call ended."""

    kind: OutcomeKind
    explanation: str
    advice: str = ""
    code: str | None = None
    """The error code, or the stop reason of the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheExplanation:
    """What was read from the cache, compared with the expectation."""

    verdict: CacheVerdict
    explanation: str
    expected_tokens: int | None
    read_tokens: int | None
    """None if the provider has reported no tokens."""
    miss_reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorExplanation:
    """What an error code means. Both members are empty for an unknown code."""

    message: str
    advice: str


_MISSES: Final[Mapping[str, str]] = {
    MissReason.MODEL_CHANGED: "The previous call went to another model. Models do not share a cache.",
    MissReason.ACCOUNT_CHANGED: "The previous call used other credentials. Accounts do not share a cache.",
    MissReason.EPOCH_BEGAN: "A new epoch began: the static text, the tools or the signed summary changed on purpose.",
    MissReason.ORDER_CHANGED: "The order of the layers differs from the previous call.",
    MissReason.PREFIX_BREAK: "A block changed that should not have changed. See the first break in the difference.",
    MissReason.TTL_EXPIRED: "The time since the previous call was longer than the provider keeps its cache.",
    MissReason.BELOW_MINIMUM: "The previous request was shorter than the minimum that the provider caches.",
    MissReason.CACHE_GONE: "The explicit cache had expired or was deleted.",
    MissReason.UNKNOWN: "No reason is known: the provider should still have had this prefix in its cache.",
}
_KNOWN_BEFORE: Final = frozenset(MissReason) - {MissReason.PREFIX_BREAK, MissReason.CACHE_GONE, MissReason.UNKNOWN}
"""Reasons that are known before the call and do not indicate a problem."""
_WITHHELD: Final[Mapping[str, str]] = {
    WithheldReason.PROVIDER: "another provider made it",
    WithheldReason.FAMILY: "a model made it whose signatures this model does not accept",
    WithheldReason.ACCOUNT: "it was made with other credentials",
    WithheldReason.PREFIX: "it was made with another static text or other tools",
    WithheldReason.REJECTED: "the provider rejected signatures of this history",
    WithheldReason.UNSIGNED: "the first tool call of the answer has no signature, which the model requires",
}
_REPAIRS: Final[Mapping[str, str]] = {
    "answer_left_out": "An answer had no content that can be sent back. It was left out.",
    "task_joined": "A user task followed tool results that had no answer. Both were sent as one message.",
    "task_supplied": "An answer had no input before it. A user task was inserted.",
    "call_abandoned": "A user task came before the results of tool calls. Results that say so were inserted.",
    "result_supplied": "A tool call had no result. A result that says so was inserted.",
    "orphan_result_dropped": "A tool result belonged to no tool call. It was left out.",
    "repeated_result_dropped": "A tool call had several results. The first one was sent.",
    "calls_as_text": "Tool calls and results were sent as text, because the provider rejected them as calls.",
    "call_renamed": "The id of a tool call was already in use. It was sent with another id.",
}
_WARNINGS: Final[Mapping[str, str]] = {
    "token_count_out_of_range": "The provider reported an impossible token count. It was replaced.",
    "profile_assumed": "The model has no profile. The profile of the newest model of its family was used.",
    "thinking_switched_off": "The open tool loop does not begin with thinking, so thinking was off for this request.",
    "prefix_break": "The request does not begin like the previous one, although it should.",
    "signatures_rejected": "The previous attempt was rejected for its signatures or unknown parts. This one has none.",
    "signatures_withheld": "Answers were sent without their signatures: {reason}.",
    "summary": "This call belongs to no turn. It summarizes the oldest history.",
    "signed_compaction": "This call belongs to no turn. It requests a signed summary of old turns.",
    "judge": "This call belongs to no turn. A judge compares two answers.",
    "not_asked": "No request was sent. The call represents a recorded one.",
}
_TEMPLATES: Final[Mapping[str, str]] = {
    "parse": "The template does not parse. Its source was sent instead.",
    "render": "The template could not be rendered. Its source was sent instead.",
    "too_long": "Rendering took too long. The source of the template was sent instead.",
    "too_large": "The result was too large. The source of the template was sent instead.",
    "not_json": "The result is not JSON.",
}
_STOPS: Final[Mapping[str, str]] = {
    "end_turn": "The model finished.",
    "tool_use": "The model called tools.",
    "length": "The answer reached its length limit.",
    "refusal": "The model declined to answer.",
    "paused": "The model paused and can continue.",
    "error": "The answer ended with an error.",
    "aborted": "The answer was stopped.",
}
_PROOFS: Final[Mapping[str, str]] = {
    PROVIDER_UNKNOWN: "This release does not support the provider.",
    NOT_RECORDED: "The server died before it had recorded the request.",
    UNREADABLE: "The stored data cannot be read. The server log has the reason.",
    "not_asked": "No request was sent. The call represents a recorded one.",
    "call_lost": "The process died before it could read the answer. The call was repeated.",
}
_STOPPED: Final[Mapping[TurnState, str]] = {
    TurnState.CANCELLED: "The turn was cancelled. The received part is stored.",
    TurnState.INTERRUPTED: "The process that ran the turn ended. The received part is stored.",
}
_EXPECTED_SHARE: Final = 0.95
"""Tolerance for estimates, as in `server.caching.expectation`."""


def explain_outcome(call: Call, turn: ModelResponseTurn | None, stop_reason: str | None) -> Outcome:
    """Explain how a call ended. `turn` is the stored answer, `stop_reason` that of the call's own answer."""
    if call.end is None:
        if turn is None:
            return Outcome(kind=OutcomeKind.RUNNING, explanation="The call has not ended. Reload to see more.")
        explanation = "The process died before it recorded how the call ended."
        return Outcome(kind=OutcomeKind.LOST, explanation=explanation, code=stop_reason)
    code = call.end.error_code or stop_reason
    unknown = next((note for note in call.start.warnings if note.get("kind") == OUTCOME_UNKNOWN), None)
    if unknown is not None:
        return Outcome(kind=OutcomeKind.UNKNOWN, explanation=explain_warning(unknown), code=code)
    if call.end.error_code is not None:
        error = explain_error(call.end.error_code)
        return Outcome(kind=OutcomeKind.FAILED, explanation=error.message, advice=error.advice, code=code)
    is_last = turn is not None and turn.attempt == call.start.attempt
    if is_last and turn is not None and turn.state in _STOPPED:
        return Outcome(kind=OutcomeKind.STOPPED, explanation=_STOPPED[turn.state], code=code)
    explanation = explain_stop(stop_reason) or "The call ended normally."
    return Outcome(kind=OutcomeKind.ANSWERED, explanation=explanation, code=code)


def explain_cache(call: Call) -> CacheExplanation:
    """Compare what was read from the cache with the expectation."""
    verdict, explanation = _judge_cache(call)
    end = call.end
    return CacheExplanation(
        verdict=verdict,
        explanation=explanation,
        expected_tokens=call.start.cache_expected_tokens,
        read_tokens=end.usage.cache_read_tokens if end is not None and end.usage.input_tokens else None,
        miss_reason=None if end is None else end.cache_miss_reason,
    )


def _judge_cache(call: Call) -> tuple[CacheVerdict, str]:
    expected, end = call.start.cache_expected_tokens, call.end
    if end is None:
        return CacheVerdict.UNKNOWN, "The call has not ended."
    if not end.usage.input_tokens:
        return CacheVerdict.UNKNOWN, "The provider reported no tokens."
    read = end.usage.cache_read_tokens
    if end.cache_miss_reason is not None:
        is_known = end.cache_miss_reason in _KNOWN_BEFORE and read >= (expected or 0) * _EXPECTED_SHARE
        return CacheVerdict.LESS if is_known else CacheVerdict.MISS, explain_miss(end.cache_miss_reason)
    if expected is None:
        return CacheVerdict.UNKNOWN, "The previous call was not answered, so there is no expectation."
    if read > expected:
        return CacheVerdict.MORE, "Another conversation or an earlier call had put the same prefix into the cache."
    if expected == 0:
        return CacheVerdict.NOTHING, "No earlier call had put anything into the cache that this one could read."
    if read < expected * _EXPECTED_SHARE:
        return CacheVerdict.MISS, explain_miss(MissReason.UNKNOWN)
    return CacheVerdict.AS_EXPECTED, "Everything expected was read from the cache."


def explain_miss(reason: str) -> str:
    """Explain why the cache was missed. A provider's own reason is quoted."""
    return _MISSES.get(reason, f"The provider's reason: {reason}.")


def explain_error(code: str) -> ErrorExplanation:
    """Explain an error code. Both texts are empty for a code that this release does not have."""
    found: type[StrataError] | None = next((kind for kind in every_error() if kind.code == code), None)
    if found is None:
        return ErrorExplanation(message=_PROOFS.get(code, ""), advice="")
    return ErrorExplanation(message=" ".join((found.__doc__ or "").split()), advice=found.hint)


def explain_stop(reason: str | None) -> str:
    """Explain a stop reason; empty for an unknown one."""
    return _STOPS.get(reason or "", "")


def explain_withheld(reason: str) -> str:
    """Explain why signatures were not sent."""
    return _WITHHELD.get(reason, reason)


def explain_repair(note: Mapping[str, JsonValue]) -> str:
    """Explain a repair of the history; empty for an unknown one."""
    return _REPAIRS.get(str(note.get("kind")), "")


def explain_warning(note: Mapping[str, JsonValue]) -> str:
    """Explain a warning; empty for an unknown one."""
    if note.get("kind") == OUTCOME_UNKNOWN:
        cost = note.get("estimated_cost_usd")
        estimate = f"{note.get('estimated_input_tokens')} input tokens" + ("" if cost is None else f", {cost} USD")
        return (
            "The server died during the request, and no part of an answer was stored. It is not known whether the call "
            f"was billed. If it was, the input alone is about {estimate}."
        )
    reason = explain_withheld(str(note.get("reason")))
    return _WARNINGS.get(str(note.get("kind")), "").format(reason=reason)


def explain_template(note: Mapping[str, JsonValue]) -> str:
    """Explain a template failure; empty for an unknown one."""
    return _TEMPLATES.get(str(note.get("kind")), "")
