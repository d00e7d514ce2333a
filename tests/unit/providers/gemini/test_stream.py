"""The stream of Gemini is interpreted as documented."""

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.conversation.block import TextBlock, ThinkingBlock, ToolCallBlock, UnknownBlock
from server.conversation.errors import (
    ProviderCallMalformed,
    ProviderEmpty,
    ProviderEndedEarly,
    ProviderFailed,
    ProviderMalformed,
    ProviderOverloaded,
)
from server.conversation.event import TextDelta, ToolCallBegin, ToolCallEnd
from server.conversation.exact_json import Number, make_sendable
from server.conversation.turn import StopReason
from server.conversation.usage import Usage
from server.providers.gemini.stream import (
    STOP_REASONS,
    GeminiFold,
    decode_signature,
    fold_body,
    mark_signature,
    usage_from,
)
from server.providers.provider import ProviderAnswer
from tests.recordings.catalogue import NUMBERS, load
from tests.unit.providers.wire.generated import gemini_chunk, gemini_chunks


def body_of(*documents: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(document).encode() + b"\r\n\r\n" for document in documents)


def chunk_of(*parts: dict[str, Any], finish: str | None = "STOP", **more: Any) -> dict[str, Any]:
    return gemini_chunk(list(parts), finish, more)


def native_parts(answer: ProviderAnswer) -> list[dict[str, Any]]:
    assert answer.native is not None
    parts: list[dict[str, Any]] = json.loads(answer.native.data)["parts"]
    return parts


def finish(*documents: Any) -> ProviderAnswer:
    fold = GeminiFold()
    for _ in fold.feed(body_of(*documents)):
        pass
    fold.finish()
    return fold.answer


@pytest.mark.parametrize(("reason", "stop_reason"), STOP_REASONS.items())
def test_every_finish_reason_has_its_meaning(reason: str, stop_reason: StopReason) -> None:
    fold = GeminiFold()
    for _ in fold.feed(body_of(chunk_of({"text": "Hi."}, finish=reason, finishMessage="Because."))):
        pass
    answer = fold.answer
    assert answer.stop_reason is stop_reason
    assert answer.stop_details == {"reason": reason, "finishMessage": "Because."}


def test_the_documented_finish_reasons_are_all_there() -> None:
    documented = """FINISH_REASON_UNSPECIFIED STOP MAX_TOKENS SAFETY RECITATION LANGUAGE OTHER BLOCKLIST
        PROHIBITED_CONTENT SPII MALFORMED_FUNCTION_CALL IMAGE_SAFETY UNEXPECTED_TOOL_CALL TOO_MANY_TOOL_CALLS
        IMAGE_PROHIBITED_CONTENT NO_IMAGE IMAGE_RECITATION IMAGE_OTHER CONTINUATION MALFORMED_RESPONSE"""
    assert set(STOP_REASONS) == set(documented.split())


def test_an_unknown_finish_reason_is_an_error_stop_with_its_name() -> None:
    answer = finish(chunk_of({"text": "Hi."}, finish="BORED"))
    assert answer.stop_reason is StopReason.ERROR
    assert answer.stop_details == {"reason": "BORED"}


def test_a_tool_call_is_a_tool_stop() -> None:
    assert finish(chunk_of({"functionCall": {"id": "1", "name": "f"}})).stop_reason is StopReason.TOOL_USE


@pytest.mark.parametrize("reason", ["SAFETY", "OTHER", "BLOCKLIST", "PROHIBITED_CONTENT", "IMAGE_SAFETY", "NEW"])
def test_a_blocked_prompt_is_a_refusal(reason: str) -> None:
    answer = finish({"promptFeedback": {"blockReason": reason, "safetyRatings": []}})
    assert answer.stop_reason is StopReason.REFUSAL
    assert answer.stop_details == {"reason": reason, "blockReason": reason, "safetyRatings": []}
    assert (answer.blocks, answer.native) == ((), None)


def test_a_stop_with_thoughts_alone_is_empty() -> None:
    with pytest.raises(ProviderEmpty):
        finish(chunk_of({"text": "Hm.", "thought": True}, {"text": "", "thoughtSignature": "c2ln"}))


def test_a_token_limit_with_thoughts_alone_is_no_failure() -> None:
    answer = finish(chunk_of({"text": "Hm.", "thought": True}, finish="MAX_TOKENS"))
    assert answer.stop_reason is StopReason.LENGTH


def test_an_answer_of_thoughts_alone_is_kept_and_not_sent_back() -> None:
    thoughts = {"text": "Hm.", "thought": True}, {"text": "", "thoughtSignature": "c2ln"}
    answer = finish(chunk_of(*thoughts, finish="MAX_TOKENS"))
    assert [type(block) for block in answer.blocks] == [ThinkingBlock, TextBlock]
    assert answer.native is None


def test_the_partial_output_of_a_refusal_is_kept_and_not_sent_back() -> None:
    answer = finish(chunk_of({"text": "Hi."}, {"functionCall": {"id": "1", "name": "f"}}, finish="SAFETY"))
    assert answer.stop_reason is StopReason.REFUSAL
    assert answer.native is None
    # A client must not answer this call.
    assert [type(block) for block in answer.blocks] == [TextBlock, UnknownBlock]


@pytest.mark.parametrize("parts", [[], [{"text": "Hi."}]], ids=["nothing", "text"])
def test_a_call_that_gemini_could_not_parse_is_a_separate_failure(parts: list[dict[str, Any]]) -> None:
    with pytest.raises(ProviderCallMalformed) as failed:
        finish(chunk_of(*parts, finish="MALFORMED_FUNCTION_CALL", finishMessage="print(get_weather("))
    assert failed.value.details["provider_message"] == "print(get_weather("
    assert failed.value.details["provider_status"] == "MALFORMED_FUNCTION_CALL"


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", ProviderEmpty),
        (body_of(chunk_of({"text": "Hi."}, finish=None)), ProviderEndedEarly),
        (body_of(chunk_of({"text": "Hi."}))[:-2], ProviderEndedEarly),
        (b"data: {\r\n\r\n", ProviderMalformed),
        (b"data: \xff\r\n\r\n", ProviderMalformed),
        (b"data: []\r\n\r\n", ProviderMalformed),
        (b"data: " + b"[" * 200_000 + b"\r\n\r\n", ProviderMalformed),
        (body_of({"candidates": [7]}), ProviderMalformed),
        (body_of(chunk_of("no part")), ProviderMalformed),  # type: ignore[arg-type]
        (body_of(chunk_of({"functionCall": {"id": {"a": 1}, "name": "f"}})), ProviderMalformed),
        (body_of(chunk_of({"functionCall": {"id": "1", "name": "f", "args": [1]}})), ProviderMalformed),
        (body_of(chunk_of({"inlineData": {"mimeType": "image/png", "data": "%%%"}})), ProviderMalformed),
        (body_of(chunk_of({"inlineData": {"mimeType": "image/png", "data": ["QQ=="]}})), ProviderMalformed),
        (body_of(chunk_of({"executableCode": "1"})), ProviderMalformed),
        (body_of({"error": {"code": 503, "message": "No.", "status": "UNAVAILABLE"}}), ProviderOverloaded),
    ],
)
def test_an_invalid_stream_is_a_failure(body: bytes, error: type[ProviderFailed]) -> None:
    fold = GeminiFold()

    def read() -> None:
        for _ in fold.feed(body):
            pass
        fold.finish()

    with pytest.raises(error):
        read()
    assert fold_body(body) == fold.answer


@pytest.mark.parametrize("data", ["QUI=", "QUI", "-_8", ""])
def test_inline_data_in_any_alphabet_of_base64_is_kept(data: str) -> None:
    answer = finish(chunk_of({"inlineData": {"mimeType": "image/png", "data": data}}))
    assert answer.native is not None
    assert f'"data":"{data}"'.encode() in answer.native.data


def test_usage_is_in_disjoint_buckets_that_add_up_to_the_total() -> None:
    answer = fold_body(load("gemini", "usage_with_tools"))
    usage = answer.usage
    assert (usage.fresh_input_tokens, usage.cache_read_tokens, usage.cache_write_tokens) == (51, 60, 0)
    assert (usage.output_tokens, usage.reasoning_tokens) == (7, 5)
    assert answer.usage_reported is not None
    total = usage.input_tokens + usage.output_tokens + usage.reasoning_tokens
    assert total == answer.usage_reported["totalTokenCount"]


def test_invalid_counts_are_zero() -> None:
    reported = {"promptTokenCount": True, "candidatesTokenCount": "7", "thoughtsTokenCount": Number("1.5")}
    assert usage_from(reported) == Usage()
    assert usage_from({"candidatesTokenCount": Number("7")}) == Usage(output_tokens=7)


def test_the_last_usage_counts() -> None:
    first, last = {"promptTokenCount": 5, "candidatesTokenCount": 1}, {"promptTokenCount": 5, "candidatesTokenCount": 9}
    answer = finish(
        chunk_of({"text": "a"}, finish=None) | {"usageMetadata": first},
        chunk_of({"text": "b"}) | {"usageMetadata": last},
    )
    assert answer.usage.output_tokens == 9
    assert answer.usage_reported == last


def test_parallel_calls_over_chunks_are_one_answer() -> None:
    fold = GeminiFold()
    events = [*fold.feed(load("gemini", "parallel_calls"))]
    calls = [block for block in fold.answer.blocks if isinstance(block, ToolCallBlock)]
    assert [call.name for call in calls] == ["get_weather", "get_time"]
    assert [call.signature is not None for call in calls] == [True, False]
    assert len([event for event in events if isinstance(event, ToolCallBegin)]) == 2
    assert [event.arguments for event in events if isinstance(event, ToolCallEnd)] == [call.arguments for call in calls]


def test_calls_without_ids_get_the_same_ids_from_the_same_bytes() -> None:
    body = load("gemini", "calls_without_ids")
    answer = fold_body(body)
    ids = [block.id for block in answer.blocks if isinstance(block, ToolCallBlock)]
    assert len(set(ids)) == len(ids) == 2
    assert fold_body(body) == answer
    assert all(block.is_id_ours for block in answer.blocks if isinstance(block, ToolCallBlock))
    # Gemini has not sent these ids, so they are not sent back.
    assert ["id" in part["functionCall"] for part in native_parts(answer) if "functionCall" in part] == [False] * 2


@pytest.mark.parametrize("given_id", ["", None])
def test_an_empty_id_is_no_id(given_id: str | None) -> None:
    (block,) = finish(chunk_of({"functionCall": {"id": given_id, "name": "f", "args": {}}})).blocks
    assert isinstance(block, ToolCallBlock)
    assert block.id.startswith("call_")
    assert block.is_id_ours


def test_two_equal_calls_in_one_chunk_get_different_ids() -> None:
    call = {"functionCall": {"name": "f", "args": {}}}
    blocks = finish(chunk_of(call, call)).blocks
    assert len({block.id for block in blocks if isinstance(block, ToolCallBlock)}) == 2


def test_signed_parts_stay_alone_and_adjacent_plain_parts_are_joined() -> None:
    answer = fold_body(load("gemini", "signed_texts"))
    assert native_parts(answer) == [
        {"text": "One two."},
        {"text": " Three", "thoughtSignature": "c2lnLTE="},
        {"text": " four"},
        {"text": "", "thoughtSignature": "c2lnLTI"},
        {"text": ""},
        {"text": "", "thought": False},
        {"text": " five", "thoughtSignature": "-_8"},
    ]
    assert [isinstance(block, TextBlock) for block in answer.blocks] == [True] * 7


def test_parts_of_unknown_kinds_are_kept_in_place() -> None:
    answer = fold_body(load("gemini", "server_tools"))
    kinds = [next(iter(part)) for part in native_parts(answer)]
    assert kinds == ["text", "toolCall", "toolResponse", "executableCode", "codeExecutionResult", "text"]
    assert [type(block) for block in answer.blocks] == [ThinkingBlock, *[UnknownBlock] * 4, TextBlock]
    assert answer.native is not None
    assert b'"futureField":[1.0]' in answer.native.data


def test_numbers_are_sent_back_unchanged() -> None:
    answer = fold_body(load("gemini", "numbers"))
    assert answer.native is not None
    assert b'"args":' + NUMBERS in answer.native.data
    assert b'{"args":{"x":1e-7},"name":"compute","id":"n2"}' in answer.native.data


@given(gemini_chunks)
def test_every_part_is_sent_back_in_order_with_all_its_members(chunks: list[list[dict[str, Any]]]) -> None:
    # No provider accepts a lone surrogate, not even its own.
    sent = make_sendable([part for parts in chunks for part in parts])
    last = {"text": "Bye.", "futureField": 1}
    answer = fold_body(body_of(*(chunk_of(*parts, finish=None) for parts in chunks), chunk_of(last)))
    kept = native_parts(answer)
    assert unjoined(kept) == unjoined([*sent, last])
    assert [part for part in kept if "thoughtSignature" in part] == [
        part for part in sent if "thoughtSignature" in part
    ]


def unjoined(parts: list[dict[str, Any]]) -> list[Any]:
    """Plain texts as single letters, so that the places where they were joined make no difference."""
    letters: list[Any] = []
    for part in parts:
        plain = set(part) == {"text"} or (set(part) == {"text", "thought"})
        letters += [(letter, part.get("thought")) for letter in part["text"]] if plain else [part]
    return letters


@given(st.binary(min_size=1, max_size=80))
def test_a_signature_has_the_same_mark_in_both_alphabets(data: bytes) -> None:
    standard, urlsafe = base64.b64encode(data).decode(), base64.urlsafe_b64encode(data).decode()
    spellings = [standard, urlsafe, standard.rstrip("="), urlsafe.rstrip("=")]
    assert len({mark_signature(text) for text in spellings}) == 1
    for text in spellings:
        assert decode_signature(text) == data
        answer = finish(chunk_of({"text": "a", "thoughtSignature": text}))
        assert native_parts(answer) == [{"text": "a", "thoughtSignature": text}]


@pytest.mark.parametrize("text", ["no base64!", "ab cd", "\ud800", "ä", "a"])
def test_invalid_base64_has_a_mark_too(text: str) -> None:
    mark = mark_signature(text)
    assert mark is not None
    assert mark == mark_signature(text)
    assert mark != mark_signature(text + "x")
    assert mark_signature("") is None
    assert mark_signature(7) is None


def test_the_text_events_add_up_to_the_text() -> None:
    fold = GeminiFold()
    events = [*fold.feed(load("gemini", "text"))]
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    assert text == "".join(block.text for block in fold.answer.blocks if isinstance(block, TextBlock)) != ""
