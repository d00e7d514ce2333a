"""Whether what was stored of an answer is what its bytes say.

What the bytes decide depends on how the turn ended:

| turn          | blocks, native, usage | stop reason    | error code                                          |
|---------------|-----------------------|----------------|-----------------------------------------------------|
| `complete`    | what the bytes say    | the bytes' own | none; the bytes have to be a whole answer           |
| `failed`      | what had arrived      | `error`        | the one that the bytes say, where they say one; the |
|               |                       |                | network's and our own are not among the bytes       |
| `cancelled`   | what had arrived      | `aborted`      | not among the bytes                                 |
| `interrupted` | what had arrived      | `aborted`      | not among the bytes                                 |

Of a call with `answer_unstorable` or `answer_unreadable` nothing but its bytes was stored. Of a status other than 200
the body is an error's, and nothing of it becomes an answer.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Final

from server.conversation.block import JsonValue, block_to_json
from server.conversation.call import Call, CallEnd
from server.conversation.errors import (
    AnswerUnreadable,
    AnswerUnstorable,
    ProviderCallMalformed,
    ProviderEmpty,
    ProviderEndedEarly,
    ProviderFailed,
    ProviderMalformed,
    TurnInterrupted,
)
from server.conversation.turn import StopReason, TurnState
from server.conversation.usage import Usage, add_usages
from server.inspection.value_difference import ValueDifference, find_byte_difference, find_value_difference, show_value
from server.providers.continuation import fold_earlier
from server.providers.provider import Fold, ProviderAnswer
from server.replay.verify.call_walk import PastAnswer, PastCall

_OK: Final = 200
_BYTES_SAY: Final = frozenset(
    {ProviderEmpty.code, ProviderEndedEarly.code, ProviderMalformed.code, ProviderCallMalformed.code}
)
"""Codes that come from nothing but the bytes."""
_NOT_TAKEN: Final = frozenset({AnswerUnstorable.code, AnswerUnreadable.code})
"""Codes of calls whose bytes are kept and of which nothing else was taken."""
_STOPS: Final = {
    TurnState.FAILED: StopReason.ERROR,
    TurnState.CANCELLED: StopReason.ABORTED,
    TurnState.INTERRUPTED: StopReason.ABORTED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """What bytes say."""

    answer: ProviderAnswer
    broken_by: str | None = None
    """The code of what the stream itself has said, and that ended it."""
    ended_by: str | None = None
    """The code of why it is not a whole answer; None where it is."""


def fold_raw(fold: Fold, raw: bytes) -> Folded:
    """Reads bytes from their beginning to their end, or to where they cannot be read on."""
    try:
        for _ in fold.feed(raw):
            pass
    except ProviderFailed as error:
        return Folded(answer=fold.answer, broken_by=error.code, ended_by=error.code)
    try:
        fold.finish()
    except ProviderFailed as error:
        return Folded(answer=fold.answer, ended_by=error.code)
    return Folded(answer=fold.answer)


def check_record(answer: PastAnswer, call: Call, end: CallEnd) -> ValueDifference | None:
    """The first difference between a turn and the call that gave it, whatever the bytes say: they may be gone."""
    start = call.start
    stored: dict[str, JsonValue] = {
        "provider": answer.provider,
        "model": answer.model,
        "account": answer.account,
        "dialect": answer.dialect,
        "error_code": answer.error_code,
    }
    is_interrupted = answer.state is TurnState.INTERRUPTED
    if is_interrupted and end.error_code is None:
        return _differ("call.error_code", None, TurnInterrupted.code)
    found: dict[str, JsonValue] = {
        "provider": start.provider,
        "model": start.model,
        "account": start.account,
        "dialect": start.provider,
        "error_code": end.error_code if not is_interrupted or end.error_code in _NOT_TAKEN else TurnInterrupted.code,
    }
    return find_value_difference(stored, found)


def is_answer(end: CallEnd) -> bool:
    """Whether the body is the model's, and not an error's."""
    return end.status in {None, _OK}


def check_answer(past: PastCall, end: CallEnd, open_fold: Callable[[], Fold]) -> ValueDifference | None:
    """The first difference between what is stored and what the raw bytes of a call say. They have to be there."""
    if end.error_code in _NOT_TAKEN:
        return None if past.answer is None else _check_content(past.answer, ProviderAnswer())
    folded = _read(end, open_fold())
    difference = _check_call(end, folded.answer) or _check_aside(past, end, folded)
    if difference is not None or past.answer is None or None in past.continued:
        return difference
    had_ended = _had_ended_before(past.answer, past.call)
    if past.continued:
        folded = _read_continued(past, end, open_fold(), with_last=not had_ended)
    elif had_ended:
        folded = Folded(answer=ProviderAnswer())
    return (
        _check_content(past.answer, folded.answer)
        or _check_version(past.answer, folded.answer)
        or _check_end(past.answer, folded)
        or _check_usage(past.answer, past)
    )


def _read(end: CallEnd, fold: Fold) -> Folded:
    if not end.raw_response or not is_answer(end):
        return Folded(answer=ProviderAnswer(), ended_by=ProviderEmpty.code)
    return fold_raw(fold, end.raw_response)


def _read_continued(past: PastCall, end: CallEnd, fold: Fold, *, with_last: bool) -> Folded:
    """The answer of a turn that took several calls: what their bytes say, one after the other."""
    fold_earlier(fold, [body or b"" for body in past.continued])
    raw = end.raw_response if with_last and is_answer(end) else None
    return fold_raw(fold, raw or b"")


def _had_ended_before(answer: PastAnswer, call: Call) -> bool:
    """A turn whose process died while it waited for its next attempt: of the one that had failed nothing was taken."""
    code = None if call.end is None else call.end.error_code
    return answer.state is TurnState.INTERRUPTED and code not in {None, TurnInterrupted.code}


def _check_call(end: CallEnd, answer: ProviderAnswer) -> ValueDifference | None:
    stored = {"usage_reported": end.usage_reported, "response_id": end.response_id}
    found: dict[str, JsonValue] = {"usage_reported": answer.usage_reported, "response_id": answer.response_id}
    return _compare_usages(end.usage, answer.usage, "call.usage") or find_value_difference(stored, found, "call")


def _check_aside(past: PastCall, end: CallEnd, folded: Folded) -> ValueDifference | None:
    """What only the call itself can say wrong."""
    if end.status is None and end.raw_response:
        return _differ("call.status", None, str(_OK))
    if past.answer is None and end.error_code is None and folded.ended_by is not None:
        return _differ("call.error_code", None, folded.ended_by)
    return None


def _check_content(stored: PastAnswer, found: ProviderAnswer) -> ValueDifference | None:
    native = b"" if found.native is None else found.native.data
    if stored.blocks == found.blocks and stored.native == native:
        return None
    said, read = ([block_to_json(block) for block in blocks] for blocks in (stored.blocks, found.blocks))
    return find_value_difference(said, read, "blocks") or find_byte_difference(stored.native, native, "native")


def _check_version(stored: PastAnswer, found: ProviderAnswer) -> ValueDifference | None:
    """Earlier releases did not keep it."""
    if stored.model_version in {None, found.model_version}:
        return None
    return _differ("model_version", stored.model_version, found.model_version)


def _check_end(stored: PastAnswer, folded: Folded) -> ValueDifference | None:
    stop_reason = _STOPS.get(stored.state, folded.answer.stop_reason)
    if stored.state is TurnState.COMPLETE and folded.ended_by is not None:
        return _differ("state", stored.state, folded.ended_by)
    if stored.stop_reason is not stop_reason:
        return _differ("stop_reason", stored.stop_reason, stop_reason)
    code = stored.error_code
    if stored.state is TurnState.COMPLETE and code is not None:
        return _differ("error_code", code, None)
    if stored.state is not TurnState.FAILED:
        return None
    said = folded.broken_by or (folded.ended_by if code in _BYTES_SAY else code)
    return None if code == said else _differ("error_code", code, said)


def _check_usage(stored: PastAnswer, past: PastCall) -> ValueDifference | None:
    if past.usages is None:
        return None
    return _compare_usages(stored.usage, add_usages(past.usages), "usage")


def _compare_usages(stored: Usage, found: Usage, path: str) -> ValueDifference | None:
    return None if stored == found else find_value_difference(asdict(stored), asdict(found), path)


def _differ(path: str, stored: str | None, found: str | None) -> ValueDifference:
    return ValueDifference(path=path, stored=show_value(stored), found=show_value(found))
