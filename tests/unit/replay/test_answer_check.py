"""What the bytes of a call determine about its turn, and what they do not."""

from dataclasses import replace
from typing import Any

import pytest

from server.conversation.call import Call, CallEnd
from server.conversation.turn import StopReason, TurnState
from server.conversation.usage import Usage
from server.providers.gemini.stream import GeminiFold
from server.providers.provider import ProviderAnswer
from server.replay.verify.answer_check import check_answer, check_record, fold_raw
from server.replay.verify.recorded_calls import RecordedAnswer, RecordedCall
from tests.support.builders import call_end, call_start

FIRST = b'data: {"candidates":[{"content":{"parts":[{"text":"It rains."}]}}],"responseId":"r"}\n\n'
USAGE = b'"usageMetadata":{"promptTokenCount":5,"candidatesTokenCount":2}'
WHOLE = FIRST + b'data: {"candidates":[{"finishReason":"STOP"}],' + USAGE + b"}\n\n"
CUT = FIRST + b"data: {"
BROKEN = FIRST + b'data: {"error":{"code":503,"message":"Busy","status":"UNAVAILABLE"}}\n\n'
ERROR = b'{"error":{"code":503,"message":"Busy","status":"UNAVAILABLE"}}'
FAILED: dict[str, Any] = {"state": TurnState.FAILED, "stop_reason": StopReason.ERROR}
ABORTED: dict[str, Any] = {"state": TurnState.INTERRUPTED, "stop_reason": StopReason.ABORTED}


def stored(
    raw: bytes, *, status: int | None = 200, code: str | None = None, **turn: Any
) -> tuple[RecordedCall, CallEnd]:
    """A call and its turn as they would have been stored for these bytes, with changes to the turn."""
    read = fold_raw(GeminiFold(), raw).answer if status in {None, 200} else ProviderAnswer()
    end = call_end(
        status=status,
        raw_response=raw,
        usage=read.usage,
        usage_reported=read.usage_reported,
        response_id=read.response_id,
        error_code=code,
    )
    answer = RecordedAnswer(
        blocks=read.blocks,
        native=b"" if read.native is None else read.native.data,
        state=TurnState.COMPLETE,
        stop_reason=read.stop_reason,
        error_code=code,
        usage=read.usage,
        dialect="gemini",
        provider="gemini",
        model="gemini-3.1-pro-preview",
        account="acct-1",
    )
    call = Call(turn_seq=2, start=call_start(), end=end)
    return RecordedCall(call=call, source=None, answer=replace(answer, **turn), usages=(read.usage,)), end


def differs_at(raw: bytes, **changes: Any) -> str | None:
    past, end = stored(raw, **changes)
    assert past.answer is not None
    difference = check_record(past.answer, past.call, end) or check_answer(past, end, GeminiFold)
    return None if difference is None else difference.path


@pytest.mark.parametrize(
    ("raw", "changes"),
    [
        (WHOLE, {}),
        (CUT, {"code": "provider_disconnected", **FAILED}),
        (CUT, {"code": "provider_ended_early", **FAILED}),
        (CUT, {"code": "lease_lost", **FAILED}),
        (BROKEN, {"code": "provider_overloaded", **FAILED}),
        (CUT, {"code": "turn_interrupted", **ABORTED}),
        (WHOLE, {"code": None, **ABORTED, "state": TurnState.CANCELLED}),
        (b"", {"code": "provider_timed_out", **FAILED}),
        (ERROR, {"status": 503, "code": "provider_overloaded", **FAILED}),
        # The process died while it waited for the next attempt; nothing of the failed one was used.
        (
            BROKEN,
            {"code": "provider_overloaded", **ABORTED, "error_code": "turn_interrupted", "blocks": (), "native": b""},
        ),
    ],
)
def test_what_was_stored_for_the_bytes_matches_them(raw: bytes, changes: dict[str, Any]) -> None:
    assert differs_at(raw, **changes) is None


@pytest.mark.parametrize(
    ("raw", "changes", "path"),
    [
        (CUT, {}, "state"),
        (ERROR, {"status": 503}, "state"),
        (WHOLE, {"stop_reason": StopReason.LENGTH}, "stop_reason"),
        (WHOLE, {"code": "provider_disconnected"}, "error_code"),
        (CUT, {"code": "provider_empty", **FAILED}, "error_code"),
        (BROKEN, {"code": "provider_disconnected", **FAILED}, "error_code"),
        (CUT, {"code": "provider_disconnected", **FAILED, "stop_reason": StopReason.END_TURN}, "stop_reason"),
        (CUT, {"code": "turn_interrupted", **ABORTED, "blocks": ()}, "blocks[0]"),
        (WHOLE, {"native": b"{}"}, "native at byte 1"),
        (WHOLE, {"dialect": "anthropic"}, "dialect at character 0"),
        (WHOLE, {"provider": None}, "provider"),
        (WHOLE, {"model": "gemini-3.1-pro"}, "model at character 14"),
        (WHOLE, {"account": "acct-2"}, "account at character 5"),
        (WHOLE, {"error_code": "provider_disconnected"}, "error_code"),
        (
            CUT,
            {"code": "provider_disconnected", **FAILED, "error_code": "provider_ended_early"},
            "error_code at character 9",
        ),
        (WHOLE, {**ABORTED, "state": TurnState.CANCELLED, "error_code": "turn_interrupted"}, "error_code"),
        (CUT, {**ABORTED, "error_code": "turn_interrupted"}, "call.error_code"),
        (WHOLE, {"status": None}, "call.status"),
        (WHOLE, {"usage": Usage(output_tokens=2)}, "usage.fresh_input_tokens"),
    ],
)
def test_a_difference_from_the_bytes_is_reported(raw: bytes, changes: dict[str, Any], path: str) -> None:
    assert differs_at(raw, **changes) == path


def test_an_earlier_attempt_is_compared_by_its_call_only() -> None:
    past, end = stored(CUT, code="provider_disconnected")
    retried = replace(past, answer=None)
    assert check_answer(retried, end, GeminiFold) is None
    other = replace(end, usage=Usage(output_tokens=1))
    difference = check_answer(retried, other, GeminiFold)
    assert difference is not None
    assert difference.path == "call.usage.output_tokens"
    # A call without any finding has a complete answer.
    past, end = stored(CUT)
    difference = check_answer(replace(past, answer=None), end, GeminiFold)
    assert difference is not None
    assert difference.path == "call.error_code"
