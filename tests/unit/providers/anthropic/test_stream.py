"""The stream of Claude is interpreted as documented."""

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
from server.conversation.event import (
    ProviderEvent,
    TextDelta,
    ThinkingDelta,
    ToolCallBegin,
    ToolCallDelta,
    ToolCallEnd,
    UsageReported,
)
from server.conversation.exact_json import make_sendable
from server.conversation.turn import StopReason
from server.conversation.usage import add_usages
from server.providers.anthropic.stream import STOP_REASONS, AnthropicFold, fold_body, mark_signature, usage_from
from server.providers.provider import ProviderAnswer
from tests.recordings.catalogue import NUMBERS, load
from tests.unit.providers.wire.generated import anthropic_blocks, anthropic_events

TEXT = ({"type": "text", "text": ""}, [{"type": "text_delta", "text": "Hi."}])


def body_of(events: list[dict[str, Any]]) -> bytes:
    return b"".join(
        f"event: {event.get('type')}\ndata: ".encode() + json.dumps(event).encode() + b"\n\n" for event in events
    )


def call(id_: str, *pieces: str, **more: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    shell = {"type": "tool_use", "id": id_, "name": "f", "input": {}, **more}
    return shell, [{"type": "input_json_delta", "partial_json": piece} for piece in pieces]


def fold(body: bytes) -> tuple[list[ProviderEvent], AnthropicFold]:
    folded = AnthropicFold()
    return [*folded.feed(body)], folded


def content(answer: ProviderAnswer) -> list[dict[str, Any]]:
    assert answer.native is not None
    blocks: list[dict[str, Any]] = json.loads(answer.native.data)["content"]
    return blocks


@pytest.mark.parametrize(("reason", "stop_reason"), STOP_REASONS.items())
def test_every_stop_reason_has_its_meaning(reason: str, stop_reason: StopReason) -> None:
    answer = fold_body(body_of(anthropic_events([TEXT], reason)))
    assert answer.stop_reason is stop_reason
    assert answer.stop_details == {"reason": reason}


def test_the_documented_stop_reasons_are_all_there() -> None:
    documented = (
        """end_turn max_tokens stop_sequence tool_use pause_turn refusal model_context_window_exceeded compaction"""
    )
    assert set(STOP_REASONS) == set(documented.split())


def test_an_unknown_stop_reason_is_an_error_stop_with_its_name() -> None:
    answer = fold_body(body_of(anthropic_events([TEXT], "bored")))
    assert (answer.stop_reason, answer.stop_details) == (StopReason.ERROR, {"reason": "bored"})


@pytest.mark.parametrize("reason", ["end_turn", "stop_sequence", "tool_use"])
def test_a_tool_call_is_a_tool_stop(reason: str) -> None:
    answer = fold_body(body_of(anthropic_events([call("toolu_1", "{}")], reason)))
    assert answer.stop_reason is StopReason.TOOL_USE


def test_a_refusal_has_its_category() -> None:
    answer = fold_body(load("anthropic", "refusal"))
    assert answer.stop_details is not None
    assert answer.stop_details["reason"] == "refusal"
    assert {"type", "explanation"} <= set(answer.stop_details)


def test_a_paused_turn_is_sent_back_unchanged() -> None:
    answer = fold_body(load("anthropic", "server_tools"))
    assert answer.stop_reason is StopReason.PAUSED
    kinds = [block["type"] for block in content(answer)]
    assert kinds == ["thinking", "server_tool_use", "web_search_tool_result", "text"]
    assert [type(block) for block in answer.blocks] == [ThinkingBlock, UnknownBlock, UnknownBlock, TextBlock]
    assert answer.native is not None
    assert b'"input":{"query":"oslo","limit":1.0}' in answer.native.data
    assert b'"page_age":null,"score":0.50' in answer.native.data


def test_a_call_that_the_token_limit_cut_off_is_shown_and_not_sent_back() -> None:
    events, folded = fold(load("anthropic", "max_tokens_in_call"))
    folded.finish()
    answer = folded.answer
    # The call before it is whole and waits for its result, regardless of the stop reason.
    assert (answer.stop_reason, answer.stop_details) == (StopReason.TOOL_USE, {"reason": "max_tokens"})
    assert [type(block) for block in answer.blocks] == [ThinkingBlock, TextBlock, ToolCallBlock, UnknownBlock]
    assert [block["type"] for block in content(answer)] == ["thinking", "text", "tool_use"]
    assert len([event for event in events if isinstance(event, ToolCallBegin)]) == 2
    assert len([event for event in events if isinstance(event, ToolCallEnd)]) == 1
    cut = answer.blocks[-1]
    assert isinstance(cut, UnknownBlock)
    assert cut.data["_partial_json"]
    assert b"_partial_json" not in (answer.native.data if answer.native else b"")


def test_a_call_that_has_not_ended_is_not_a_call_yet() -> None:
    answer = fold_body(load("anthropic", "cut_in_call"))
    assert not any(isinstance(block, ToolCallBlock) for block in answer.blocks)
    assert [block["type"] for block in content(answer)] == ["thinking", "text"]


def test_a_call_whose_arguments_are_not_an_object_is_dropped() -> None:
    answer = fold_body(body_of(anthropic_events([TEXT, call("toolu_1", "[1]")], "tool_use")))
    assert [type(block) for block in answer.blocks] == [TextBlock, UnknownBlock]
    assert [block["type"] for block in content(answer)] == ["text"]


@pytest.mark.parametrize("arguments", ["[1]", '{"a": ', '{"a": 1}}'])
@pytest.mark.parametrize("reason", ["tool_use", "end_turn", "pause_turn"])
def test_arguments_that_cannot_be_parsed_are_a_separate_failure(arguments: str, reason: str) -> None:
    _, folded = fold(body_of(anthropic_events([TEXT, call("toolu_1", "{}"), call("toolu_2", arguments)], reason)))
    with pytest.raises(ProviderCallMalformed):
        folded.finish()
    assert [block["type"] for block in content(folded.answer)] == ["text", "tool_use"]


@pytest.mark.parametrize("kind", ["thinking", "redacted_thinking"])
def test_an_answer_of_thinking_alone_is_kept_and_not_sent_back(kind: str) -> None:
    shell = {"type": kind, "thinking": "", "signature": "", "data": "ZGF0YQ=="}
    thinking = shell, [{"type": "signature_delta", "signature": "c2ln"}] if kind == "thinking" else []
    blank = ({"type": "text", "text": ""}, [{"type": "text_delta", "text": " "}])
    answer = fold_body(body_of(anthropic_events([thinking, blank], "max_tokens")))
    assert answer.stop_reason is StopReason.LENGTH
    assert isinstance(answer.blocks[0], ThinkingBlock)
    assert answer.native is None


def test_the_partial_output_of_a_refusal_is_kept_and_not_sent_back() -> None:
    answer = fold_body(body_of(anthropic_events([TEXT, call("toolu_1", "{}")], "refusal")))
    assert answer.stop_reason is StopReason.REFUSAL
    assert answer.native is None
    text, refused = answer.blocks
    assert text == TextBlock(text="Hi.")
    # A client must not answer this call.
    assert isinstance(refused, UnknownBlock)
    assert refused.data["name"] == "f"


def test_blank_text_is_shown_and_not_sent_back() -> None:
    blank = ({"type": "text", "text": ""}, [{"type": "text_delta", "text": "\n\n"}])
    answer = fold_body(body_of(anthropic_events([blank, call("1", "{}")], "tool_use")))
    assert answer.blocks[0] == TextBlock(text="\n\n")
    assert [block["type"] for block in content(answer)] == ["tool_use"]


def test_redacted_thinking_is_kept_and_marked() -> None:
    answer = fold_body(load("anthropic", "redacted_thinking"))
    redacted, shown, _ = answer.blocks
    assert isinstance(redacted, ThinkingBlock)
    assert (redacted.redacted, redacted.text) == (True, "")
    assert isinstance(shown, ThinkingBlock)
    assert shown.signature == mark_signature("EqQBCg-_")
    assert content(answer)[0] == {"type": "redacted_thinking", "data": "EmwKAhgBEgy3"}
    assert content(answer)[1] == {"type": "thinking", "thinking": "Shown.", "signature": "EqQBCg-_"}


def test_citations_are_collected() -> None:
    (block,) = content(fold_body(load("anthropic", "citations")))
    assert block["text"] == "It is cold there."
    assert [citation["type"] for citation in block["citations"]] == ["char_location", "web_search_result_location"]


def test_a_compaction_keeps_its_signature_and_gets_its_text() -> None:
    (block,) = content(fold_body(load("anthropic", "compaction")))
    assert block == {"type": "compaction", "content": "All of it.", "signature": "c2ln"}


def test_a_compaction_in_pieces_keeps_all_its_members() -> None:
    begun: dict[str, Any] = {
        "type": "compaction",
        "content": None,
        "signature": "c2ln",
        "tool_changes": [],
        "future": {"n": 1.0},
    }
    pieces: list[dict[str, Any]] = [
        {"type": "compaction_delta", "content": "All ", "encrypted_content": None},
        {"type": "compaction_delta", "content": "of it.", "encrypted_content": "b3BhcXVl", "later": [2.0]},
    ]
    answer = fold_body(body_of(anthropic_events([(begun, pieces)], "compaction")))
    assert content(answer) == [begun | {"content": "All of it.", "encrypted_content": "b3BhcXVl", "later": [2.0]}]
    assert answer.native is not None
    assert b'"future":{"n":1.0}' in answer.native.data


def test_a_cache_miss_has_its_reason() -> None:
    assert fold_body(load("anthropic", "cache_missed")).cache_miss_reason == "tools_changed"


def test_unknown_members_are_kept_in_place() -> None:
    answer = fold_body(load("anthropic", "unknown_everywhere"))
    assert answer.native is not None
    assert content(answer) == [
        {"type": "text", "text": "Hi", "future": {"n": 1.0}, "mood": "calmer"},
        {"type": "future_block", "body": "newer", "list": [1.5], "extra": {"k": 2.0}},
        {"type": "tool_use", "id": "toolu_u1", "name": "compute", "input": {}, "toolset_name": "x", "future": []},
    ]
    assert b'"list":[1.50]' in answer.native.data


def test_an_unknown_delta_does_not_change_known_content() -> None:
    block = {"type": "future", "state": {"kept": True}}, [{"type": "future_delta", "state": "new"}]
    assert content(fold_body(body_of(anthropic_events([block], "end_turn")))) == [block[0]]


def test_lists_in_unknown_deltas_accumulate() -> None:
    begun = {"type": "future", "found": [1], "text": "a"}
    deltas = [{"type": "future_delta", "found": [2, {"n": 3}], "text": "b"}, {"type": "future_delta", "found": [4]}]
    (block,) = content(fold_body(body_of(anthropic_events([(begun, deltas)], "end_turn"))))
    assert block == {"type": "future", "found": [1, 2, {"n": 3}, 4], "text": "ab"}


@given(st.lists(st.lists(anthropic_blocks(), min_size=1, max_size=3), min_size=1, max_size=4), st.integers(1, 40))
def test_an_answer_over_several_calls_is_the_concatenation_of_their_answers(calls: list[list[Any]], piece: int) -> None:
    """This holds for blocks, native messages and events; the usage is the sum."""
    # An answer with a call of a client tool waits for its result, and is never paused.
    *paused, last = calls
    paused = [[block for block in blocks if block[0]["type"] != "tool_use"] for blocks in paused]
    bodies = [body_of(anthropic_events([*blocks, TEXT], "pause_turn")) for blocks in (*paused, last)]
    whole, events = AnthropicFold(), list[ProviderEvent]()
    for number, body in enumerate(bodies):
        if number:
            whole.continue_answer()
        for place in range(0, len(body), piece * 50):
            events += whole.feed(body[place : place + piece * 50])
    whole.finish()
    single = [fold(body) for body in bodies]
    answers = [folded.answer for _, folded in single]
    assert whole.answer.blocks == tuple(block for answer in answers for block in answer.blocks)
    assert content(whole.answer) == [block for answer in answers for block in content(answer)]
    assert whole.answer.usage == add_usages([answer.usage for answer in answers])
    has_call = any(isinstance(block, ToolCallBlock) for block in whole.answer.blocks)
    assert whole.answer.stop_reason is (StopReason.TOOL_USE if has_call else StopReason.PAUSED)
    expected = [event for received, _ in single for event in received if not isinstance(event, UsageReported)]
    assert [event for event in events if not isinstance(event, UsageReported)] == expected
    assert len(events) == sum(len(received) for received, _ in single)


def test_a_continuation_without_content_is_empty() -> None:
    _, folded = fold(body_of(anthropic_events([TEXT], "pause_turn")))
    folded.continue_answer()
    with pytest.raises(ProviderEmpty):
        folded.finish()
    assert [*folded.feed(body_of(anthropic_events([], "end_turn")))]
    with pytest.raises(ProviderEmpty):
        folded.finish()


def test_numbers_are_sent_back_unchanged() -> None:
    answer = fold_body(load("anthropic", "numbers"))
    assert answer.native is not None
    assert b'"input":' + NUMBERS in answer.native.data
    assert b'"caller":{"type":"direct","revision":1.0}' in answer.native.data


def test_usage_is_in_disjoint_buckets_that_add_up() -> None:
    answer = fold_body(load("anthropic", "citations"))
    usage = answer.usage
    assert (usage.fresh_input_tokens, usage.cache_read_tokens, usage.cache_write_tokens) == (10, 3, 5)
    assert (usage.output_tokens, usage.reasoning_tokens) == (12, 8)
    assert usage.input_tokens == 18
    assert answer.long_write_tokens == 4
    assert answer.usage_reported is not None
    assert usage.output_tokens + usage.reasoning_tokens == answer.usage_reported["output_tokens"]


def test_invalid_counts_are_zero() -> None:
    usage, long = usage_from({"input_tokens": True, "output_tokens": "7", "cache_creation": None})
    assert (usage.input_tokens, usage.output_tokens, long) == (0, 0, 0)


def test_events_follow_the_deltas() -> None:
    events, folded = fold(load("anthropic", "parallel_calls"))
    for kind, name in ((TextDelta, TextBlock), (ThinkingDelta, ThinkingBlock)):
        text = "".join(event.text for event in events if isinstance(event, kind))
        assert text == "".join(block.text for block in folded.answer.blocks if isinstance(block, name)) != ""
    for block in folded.answer.blocks:
        if isinstance(block, ToolCallBlock):
            deltas = [e.arguments_json for e in events if isinstance(e, ToolCallDelta) and e.call_id == block.id]
            assert json.loads("".join(deltas)) == block.arguments


def test_an_end_without_content_is_empty() -> None:
    thinking = (
        {"type": "thinking", "thinking": "", "signature": ""},
        [{"type": "signature_delta", "signature": "c2ln"}],
    )
    _, folded = fold(body_of(anthropic_events([thinking], "end_turn")))
    with pytest.raises(ProviderEmpty):
        folded.finish()


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", ProviderEmpty),
        (b'{"type":"error"}', ProviderEndedEarly),
        (body_of(anthropic_events([TEXT], "end_turn")[:-1]), ProviderEndedEarly),
        (b"data: {\n\n", ProviderMalformed),
        (b"data: " + b"[" * 200_000 + b"\n\n", ProviderMalformed),
        (body_of([{"type": "content_block_delta", "index": 0, "delta": {}}]), ProviderMalformed),
        (body_of([{"type": "content_block_stop", "index": 0}]), ProviderMalformed),
        (body_of([{"type": "content_block_start", "content_block": {}}]), ProviderMalformed),
        (body_of(anthropic_events([(TEXT[0], [{"type": "text_delta"}])], "end_turn")), ProviderMalformed),
        (body_of([{"type": "error", "error": {"type": "overloaded_error", "message": "No."}}]), ProviderOverloaded),
    ],
)
def test_an_invalid_stream_is_a_failure(body: bytes, error: type[ProviderFailed]) -> None:
    folded = AnthropicFold()

    def read() -> None:
        for _ in folded.feed(body):
            pass
        folded.finish()

    with pytest.raises(error):
        read()
    assert fold_body(body) == folded.answer


@given(st.lists(anthropic_blocks(), max_size=5))
def test_every_complete_block_is_sent_back_in_order_with_all_its_members(blocks: list[Any]) -> None:
    answer = fold_body(body_of(anthropic_events([*blocks, TEXT], "end_turn")))
    *kept, _ = content(answer)
    # No provider accepts a lone surrogate, not even its own.
    assert kept == make_sendable([block for block in map(grown, blocks) if may_go_back(block)])


def grown(block: tuple[dict[str, Any], list[dict[str, Any]]]) -> dict[str, Any]:
    whole, deltas = dict(block[0]), block[1]
    names = {"text": "text", "thinking": "thinking"}
    name = names.get(whole["type"], "body")
    pieces = [delta[name] for delta in deltas if name in delta]
    if name in whole:
        whole[name] = "".join(pieces)
    if whole["type"] == "thinking":
        whole["signature"] = "".join(delta.get("signature", "") for delta in deltas)
    if whole["type"] == "tool_use":
        whole["input"] = json.loads("".join(delta["partial_json"] for delta in deltas))
    return whole


def may_go_back(block: dict[str, Any]) -> bool:
    return bool(block.get("text", "-").strip()) and not (block["type"] == "thinking" and not block["signature"])


@given(st.text(min_size=1, max_size=40))
def test_a_signature_is_sent_back_unchanged_and_has_its_mark(text: str) -> None:
    thinking = (
        {"type": "thinking", "thinking": "", "signature": ""},
        [{"type": "signature_delta", "signature": text}],
    )
    answer = fold_body(body_of(anthropic_events([thinking, TEXT], "end_turn")))
    assert content(answer)[0]["signature"] == text
    assert answer.blocks[0] == ThinkingBlock(text="", signature=mark_signature(text))
    assert mark_signature(text) != mark_signature(text + "x")
