"""Check that a stored answer is the one that its raw bytes give.

The expected values depend on how the turn ended:

| turn          | blocks, native, usage   | stop reason    | error code                                         |
|---------------|-------------------------|----------------|----------------------------------------------------|
| `complete`    | from the bytes          | from the bytes | none; the bytes must be a complete answer          |
| `failed`      | from the bytes received | `error`        | from the bytes if they contain one; errors of the  |
|               |                         |                | network and of the server are not in the bytes     |
| `cancelled`   | from the bytes received | `aborted`      | not in the bytes                                   |
| `interrupted` | from the bytes received | `aborted`      | not in the bytes                                   |

A call with `answer_unstorable` or `answer_unreadable` has raw bytes and nothing else. The body of a status other than
200 is an error, and no part of it becomes an answer.
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
from server.inspection.differences import ValueDifference, find_byte_difference, find_value_difference, show_value
from server.providers.continuation import fold_earlier
from server.providers.provider import Fold, ProviderAnswer
from server.replay.verify.recorded_calls import RecordedAnswer, RecordedCall

_OK: Final = 200
_CODES_IN_BYTES: Final = frozenset(
    {ProviderEmpty.code, ProviderEndedEarly.code, ProviderMalformed.code, ProviderCallMalformed.code}
)
"""Error codes that the bytes alone determine."""
_ONLY_BYTES_STORED: Final = frozenset({AnswerUnstorable.code, AnswerUnreadable.code})
"""Error codes of calls of which only the raw bytes were stored."""
_STOPS: Final = {
    TurnState.FAILED: StopReason.ERROR,
    TurnState.CANCELLED: StopReason.ABORTED,
    TurnState.INTERRUPTED: StopReason.ABORTED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """The result of parsing raw bytes."""

    answer: ProviderAnswer
    broken_by: str | None = None
    """The error code that the stream itself contained and that ended it."""
    ended_by: str | None = None
    """The error code of an incomplete answer; None if it is complete."""


def fold_raw(fold: Fold, raw: bytes) -> Folded:
    """Parse bytes to their end, or to the first error."""
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


def check_record(answer: RecordedAnswer, call: Call, end: CallEnd) -> ValueDifference | None:
    """Return the first difference between a turn and the call that produced it, without its bytes."""
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
        "error_code": end.error_code
        if not is_interrupted or end.error_code in _ONLY_BYTES_STORED
        else TurnInterrupted.code,
    }
    return find_value_difference(stored, found)


def is_answer(end: CallEnd) -> bool:
    """Return whether the body is an answer of the model and not an error."""
    return end.status in {None, _OK}


def check_answer(recorded: RecordedCall, end: CallEnd, open_fold: Callable[[], Fold]) -> ValueDifference | None:
    """Return the first difference between the stored answer and the raw bytes of a call, which must be there."""
    if end.error_code in _ONLY_BYTES_STORED:
        return None if recorded.answer is None else _check_content(recorded.answer, ProviderAnswer())
    folded = _read(end, open_fold())
    difference = _check_call(end, folded.answer) or _check_call_only(recorded, end, folded)
    if difference is not None or recorded.answer is None or None in recorded.continued:
        return difference
    had_ended = _had_ended_before(recorded.answer, recorded.call)
    if recorded.continued:
        folded = _read_continued(recorded, end, open_fold(), with_last=not had_ended)
    elif had_ended:
        folded = Folded(answer=ProviderAnswer())
    return (
        _check_content(recorded.answer, folded.answer)
        or _check_version(recorded.answer, folded.answer)
        or _check_end(recorded.answer, folded)
        or _check_usage(recorded.answer, recorded)
    )


def _read(end: CallEnd, fold: Fold) -> Folded:
    if not end.raw_response or not is_answer(end):
        return Folded(answer=ProviderAnswer(), ended_by=ProviderEmpty.code)
    return fold_raw(fold, end.raw_response)


def _read_continued(recorded: RecordedCall, end: CallEnd, fold: Fold, *, with_last: bool) -> Folded:
    """Parse the bytes of all calls of a turn that was continued, in order."""
    fold_earlier(fold, [body or b"" for body in recorded.continued])
    raw = end.raw_response if with_last and is_answer(end) else None
    return fold_raw(fold, raw or b"")


def _had_ended_before(answer: RecordedAnswer, call: Call) -> bool:
    """Return whether the process died while it waited for a retry: nothing of the failed attempt was stored."""
    code = None if call.end is None else call.end.error_code
    return answer.state is TurnState.INTERRUPTED and code not in {None, TurnInterrupted.code}


def _check_call(end: CallEnd, answer: ProviderAnswer) -> ValueDifference | None:
    stored = {"usage_reported": end.usage_reported, "response_id": end.response_id}
    found: dict[str, JsonValue] = {"usage_reported": answer.usage_reported, "response_id": answer.response_id}
    return _compare_usages(end.usage, answer.usage, "call.usage") or find_value_difference(stored, found, "call")


def _check_call_only(recorded: RecordedCall, end: CallEnd, folded: Folded) -> ValueDifference | None:
    """Check values that only the call has."""
    if end.status is None and end.raw_response:
        return _differ("call.status", None, str(_OK))
    if recorded.answer is None and end.error_code is None and folded.ended_by is not None:
        return _differ("call.error_code", None, folded.ended_by)
    return None


def _check_content(stored: RecordedAnswer, found: ProviderAnswer) -> ValueDifference | None:
    native = b"" if found.native is None else found.native.data
    if stored.blocks == found.blocks and stored.native == native:
        return None
    stored_blocks, found_blocks = (
        [block_to_json(block) for block in blocks] for blocks in (stored.blocks, found.blocks)
    )
    return find_value_difference(stored_blocks, found_blocks, "blocks") or find_byte_difference(
        stored.native, native, "native"
    )


def _check_version(stored: RecordedAnswer, found: ProviderAnswer) -> ValueDifference | None:
    """Compare the model version, which earlier releases did not store."""
    if stored.model_version in {None, found.model_version}:
        return None
    return _differ("model_version", stored.model_version, found.model_version)


def _check_end(stored: RecordedAnswer, folded: Folded) -> ValueDifference | None:
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
    expected = folded.broken_by or (folded.ended_by if code in _CODES_IN_BYTES else code)
    return None if code == expected else _differ("error_code", code, expected)


def _check_usage(stored: RecordedAnswer, recorded: RecordedCall) -> ValueDifference | None:
    if recorded.usages is None:
        return None
    return _compare_usages(stored.usage, add_usages(recorded.usages), "usage")


def _compare_usages(stored: Usage, found: Usage, path: str) -> ValueDifference | None:
    return None if stored == found else find_value_difference(asdict(stored), asdict(found), path)


def _differ(path: str, stored: str | None, found: str | None) -> ValueDifference:
    return ValueDifference(path=path, stored=show_value(stored), found=show_value(found))
