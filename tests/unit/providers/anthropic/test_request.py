"""Payloads are translated into requests for Claude."""

import base64
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.conversation.block import Blob, Block, ImageBlock, TextBlock, ThinkingBlock, ToolCallBlock, ToolResultBlock
from server.conversation.errors import ValidationFailed
from server.conversation.payload import CallSettings, Layer, Payload, PayloadMessage
from server.providers.anthropic.request import (
    NOTHING_SAID,
    build_extra,
    build_headers,
    build_parameters,
    build_thinking,
    dynamic_message,
    encode_system,
    encode_tools,
    find_thoughtless,
    foreign_message,
    join_messages,
    name_call,
    signed_summary_text,
    tool_message,
    unsigned_message,
    user_message,
)
from server.providers.model_profile import find_profile
from tests.contracts.provider_harness import build_payload

MODEL = "claude-fable-5-2"
PROFILE = find_profile("anthropic", MODEL)
PIXEL = Blob(sha256=b"\x01" * 32, media_type="image/png", data=b"\x89PNG")
KINDS = ("text", "empty", "thinking", "redacted", "tool_use")


def thinking(model: str, **settings: Any) -> dict[str, Any]:
    return build_thinking(CallSettings(**settings), find_profile("anthropic", model))


def joined(payload: Payload) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = json.loads(b"[" + join_messages(payload, PROFILE) + b"]")
    return messages


def block(kind: str) -> dict[str, Any]:
    blocks: dict[str, dict[str, Any]] = {
        "text": {"type": "text", "text": "a"},
        "empty": {"type": "text", "text": ""},
        "thinking": {"type": "thinking", "thinking": "", "signature": "s"},
        "redacted": {"type": "redacted_thinking", "data": "d"},
        "tool_use": {"type": "tool_use", "id": "1", "name": "f", "input": {"n": 1}},
    }
    return blocks[kind]


def test_a_user_task_is_one_message_without_empty_text() -> None:
    image = ImageBlock(media_type="image/png", sha256=PIXEL.sha256.hex(), size_bytes=4)
    message = json.loads(user_message([TextBlock(text="Ü"), image, TextBlock(text="")], {image.sha256: PIXEL}))
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PIXEL.data).decode()}
    assert message == {
        "role": "user",
        "content": [{"type": "text", "text": "Ü"}, {"type": "image", "source": source}],
    }


@pytest.mark.parametrize("wrong", [ThinkingBlock(text="Hm."), ToolResultBlock(tool_call_id="1", output=1)])
def test_a_user_task_takes_no_other_blocks(wrong: Block) -> None:
    with pytest.raises(ValidationFailed, match=type(wrong).__name__):
        user_message([wrong], {})


def test_results_come_in_the_order_of_the_calls() -> None:
    calls = [ToolCallBlock(id="a", name="f", arguments={}), ToolCallBlock(id="b", name="g", arguments={})]
    results = [
        ToolResultBlock(tool_call_id="b", output="broken", is_error=True),
        ToolResultBlock(tool_call_id="a", output={"n": "ü"}),
        ToolResultBlock(tool_call_id="stranger", output=0),
    ]
    assert json.loads(tool_message(results, calls)) == {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": '{"n":"ü"}'},
            {"type": "tool_result", "tool_use_id": "b", "content": "broken", "is_error": True},
        ],
    }


def test_the_answer_of_another_vendor_is_text_and_calls() -> None:
    blocks: list[Block] = [
        ThinkingBlock(text="secret"),
        TextBlock(text=""),
        TextBlock(text="I look."),
        ToolCallBlock(id="a", name="f", arguments={"n": 1}),
    ]
    message = foreign_message(blocks)
    assert message is not None
    assert json.loads(message) == {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "a", "name": "f", "input": {"n": 1}},
        ],
    }
    assert foreign_message([ThinkingBlock(text="secret")]) is None


@pytest.mark.parametrize("texts", [[], [""], [" ", "\n"]])
def test_a_user_task_without_text_is_not_an_empty_message(texts: list[str]) -> None:
    message = json.loads(user_message([TextBlock(text=text) for text in texts], {}))
    assert message["content"] == [{"type": "text", "text": NOTHING_SAID}]


def test_the_dynamic_block_is_a_text_before_the_task_after_results_or_alone() -> None:
    dynamic = {"type": "text", "text": '{"todos":[]}'}
    task = json.loads(user_message([TextBlock(text="Go.")], {}, dynamic["text"]))
    assert task["content"] == [dynamic, {"type": "text", "text": "Go."}]
    call, result = ToolCallBlock(id="a", name="f", arguments={}), ToolResultBlock(tool_call_id="a", output="4")
    response = json.loads(tool_message([result], [call], dynamic["text"]))
    assert response["content"] == [{"type": "tool_result", "tool_use_id": "a", "content": "4"}, dynamic]
    assert json.loads(dynamic_message(dynamic["text"])) == {"role": "user", "content": [dynamic]}


def test_results_are_written_exactly_and_deterministically() -> None:
    call = ToolCallBlock(id="a", name="f", arguments={})
    result = ToolResultBlock(tool_call_id="a", output={"b": 1.0, "a": [2**70, None, "\ud800ü"]})
    content = json.loads(tool_message([result], [call]))["content"][0]["content"]
    assert content == '{"b":1.0,"a":[1180591620717411303424,null,"\\ud800ü"]}'


def test_a_lone_surrogate_is_replaced_in_what_is_sent() -> None:
    assert json.loads(user_message([TextBlock(text="a\ud83d")], {}))["content"][0]["text"] == "a\ufffd"


def test_an_id_that_claude_rejects_has_the_same_replacement_in_call_and_result() -> None:
    call = ToolCallBlock(id="call|1 ü", name="f", arguments={})
    message = foreign_message([call])
    assert message is not None
    used = json.loads(message)["content"][0]["id"]
    answered = json.loads(tool_message([ToolResultBlock(tool_call_id=call.id, output=1)], [call]))["content"][0]
    assert used == answered["tool_use_id"] == name_call(call.id) != name_call("call|2 ü")
    assert name_call("toolu_01-A") == "toolu_01-A"


def test_an_own_answer_without_its_thinking_is_otherwise_unchanged() -> None:
    kept = b'{"type":"text","text":"a","note":1.0},{"type":"tool_use","id":"1","name":"f","input":{"b":1E400,"a":1}}'
    thought = b'{"type":"thinking","thinking":"","signature":"s"},{"type":"redacted_thinking","data":"d"}'
    native = b'{"role":"assistant","content":[%s,%s],"extra":{"x":1.50}}'
    assert (
        unsigned_message(native % (thought, kept)) == b'{"role":"assistant","content":[%s],"extra":{"x":1.50}}' % kept
    )
    assert unsigned_message(b'{"role":"assistant","content":[%s]}' % thought) is None


def test_the_parameters_are_those_of_the_payload() -> None:
    settings = CallSettings(max_output_tokens=77, temperature=0.5, stop_sequences=("END",))
    payload = build_payload(MODEL, [], settings=settings, cache_seconds=3600)
    parameters = build_parameters(payload, PROFILE)
    assert parameters["model"] == MODEL
    assert parameters["max_tokens"] == 77
    assert parameters["stop_sequences"] == ["END"]
    assert "temperature" not in parameters
    marker = {"type": "ephemeral", "ttl": "1h"}
    assert json.loads(encode_system(payload, PROFILE)) == [
        {"type": "text", "text": "You help.", "cache_control": marker}
    ]
    tools = json.loads(encode_tools(payload, PROFILE))
    assert [list(tool) for tool in tools] == [["name", "description", "input_schema"]] * 2


def test_extra_parameters_do_not_replace_those_of_the_payload() -> None:
    extra = {"model": "x", "messages": [], "stream": False, "system": "You do harm.", "metadata": {"user_id": "1"}}
    payload = build_payload(MODEL, [], settings=CallSettings(extra=extra))
    assert build_extra(payload, build_parameters(payload, PROFILE)) == {"metadata": {"user_id": "1"}}


def test_a_signed_summary_is_requested_and_sent_back_with_its_beta_header() -> None:
    plain = build_payload(MODEL, [b"{}"], settings=CallSettings(extra={"compaction": {"type": "x"}}))
    assert (build_extra(plain, {}), build_headers(plain)) == ({}, {})
    asking = replace(plain, requests_summary=True)
    assert build_extra(asking, {}) == {"compaction": {"type": "summarize"}}
    assert build_headers(asking) == {"anthropic-beta": "compact-2026-09-04"}
    opened = replace(plain, messages=tuple(replace(message, is_signed_summary=True) for message in plain.messages))
    assert (build_extra(opened, {}), build_headers(opened)) == ({}, build_headers(asking))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b'[{"type":"compaction","content":"All.","signature":"c2ln"}]', "All."),
        (b'[{"type":"compaction","content":"All.","signature":null}]', None),
        (b'[{"type":"compaction","content":null,"signature":"c2ln"}]', None),
        (b'[{"type":"compaction","content":" ","signature":"c2ln"}]', None),
        (b'[{"type":"compaction","content":"All.","signature":"c2ln"},{"type":"text","text":"Hm."}]', None),
        (b'[{"type":"text","text":"I cannot do that."}]', None),
        (b"[]", None),
    ],
)
def test_only_a_compaction_block_is_a_signed_summary(content: bytes, text: str | None) -> None:
    assert signed_summary_text(b'{"role":"assistant","content":%s}' % content) == text


def test_parameters_that_are_not_set_are_not_sent() -> None:
    payload = build_payload(MODEL, [], static_text="", tools=(), settings=CallSettings())
    assert set(build_parameters(payload, PROFILE)) == {"model", "max_tokens", "thinking"}


@pytest.mark.parametrize(
    ("model", "settings", "expected"),
    [
        (MODEL, {}, {"thinking": {"type": "adaptive", "display": "summarized"}}),
        (MODEL, {"show_thinking": False}, {"thinking": {"type": "adaptive", "display": "omitted"}}),
        (
            MODEL,
            {"thinking": "max"},
            {"thinking": {"type": "adaptive", "display": "summarized"}, "output_config": {"effort": "max"}},
        ),
        ("claude-haiku-5-5", {"thinking": "off"}, {"thinking": {"type": "disabled"}}),
        ("claude-sonnet-4-5", {}, {}),
        ("claude-sonnet-4-5", {"thinking": "off"}, {}),
        ("claude-sonnet-4-5", {"thinking": "2048"}, {"thinking": {"type": "enabled", "budget_tokens": 2048}}),
    ],
)
def test_thinking_is_requested_in_the_form_of_the_model(model: str, settings: dict[str, Any], expected: Any) -> None:
    assert thinking(model, **settings) == expected


@pytest.mark.parametrize(("model", "asked"), [(MODEL, "off"), (MODEL, "2048"), ("claude-sonnet-4-5", "high")])
def test_thinking_that_the_model_does_not_support_is_refused(model: str, asked: str) -> None:
    with pytest.raises(ValidationFailed):
        thinking(model, thinking=asked)


def test_messages_without_a_marker_are_unchanged() -> None:
    assert join_messages(build_payload(MODEL, [b'{"a":1.0}', b'{"b" : 2}']), PROFILE) == b'{"a":1.0},{"b" : 2}'


def test_old_thinking_without_a_signature_is_sent_without_the_field() -> None:
    data = b'{"role":"assistant","content":[{"type":"thinking","thinking":"Hm."},{"type":"text","text":"Yes."}]}'
    for breakpoints in ((), (0,)):
        [message] = joined(build_payload(MODEL, [data], breakpoints=breakpoints))
        assert message["content"][0] == {"type": "thinking", "thinking": "Hm."}


def test_a_marked_message_keeps_its_numbers_and_the_order_of_its_keys() -> None:
    data = b'{"role":"assistant","content":[{"type":"tool_use","id":"1","name":"f","input":{"b":1.0,"a":1E400}}]}'
    sent = join_messages(build_payload(MODEL, [data], breakpoints=(0,)), PROFILE)
    assert sent == data[:-3] + b',"cache_control":{"type":"ephemeral"}}]}'


def test_a_block_of_an_unknown_type_gets_no_marker() -> None:
    content = [{"type": "text", "text": "Fine."}, {"type": "novelty", "novelty": {}}]
    data = json.dumps({"role": "assistant", "content": content}).encode()
    sent = json.loads(join_messages(build_payload(MODEL, [data], breakpoints=(0,)), PROFILE))
    assert ["cache_control" in block for block in sent["content"]] == [True, False]


@given(
    st.lists(st.lists(st.sampled_from(KINDS), max_size=4), max_size=10),
    st.lists(st.integers(0, 12), max_size=9, unique=True).map(sorted),
    st.sampled_from(["", "You help."]),
)
def test_there_are_at_most_four_markers_and_none_where_none_is_allowed(
    shapes: list[list[str]], breakpoints: list[int], static_text: str
) -> None:
    messages = [json.dumps({"role": "user", "content": [block(kind) for kind in kinds]}).encode() for kinds in shapes]
    payload = build_payload(MODEL, messages, breakpoints=tuple(breakpoints), static_text=static_text)
    sent = [one for message in joined(payload) for one in message["content"]]
    marked = [one for one in sent if "cache_control" in one]
    fixed = [*json.loads(encode_system(payload, PROFILE)), *json.loads(encode_tools(payload, PROFILE))]
    above = [one for one in fixed if "cache_control" in one]
    assert len(marked) + len(above) <= 4
    assert all(one["type"] in {"text", "tool_use"} and one.get("text") != "" for one in marked)
    assert [{name: value for name, value in one.items() if name != "cache_control"} for one in sent] == [
        block(kind) for kinds in shapes for kind in kinds
    ]


def test_the_newest_breakpoints_are_kept() -> None:
    messages = [json.dumps({"role": "user", "content": [block("text")]}).encode()] * 6
    sent = joined(build_payload(MODEL, messages, breakpoints=(0, 1, 2, 4, 5)))
    assert ["cache_control" in message["content"][0] for message in sent] == [False, False, True, False, True, True]


def _message(role: str, *types: str, dynamic: str | None = None) -> PayloadMessage:
    content = [{"type": type_} for type_ in types]
    data = json.dumps({"role": role, "content": content}).encode()
    return PayloadMessage(layer=Layer.BUFFERED, data=data, role=role, seq=len(types), dynamic=dynamic)


TASK, RESULTS = _message("user", "text"), _message("tool", "tool_result")
RESULTS_AND_TEXT = _message("tool", "tool_result", "text", dynamic="{}")
THOUGHT_CALL, BARE_CALL = _message("model", "thinking", "tool_use"), _message("model", "tool_use")


@pytest.mark.parametrize(
    ("messages", "thoughtless"),
    [
        ([TASK], []),
        ([TASK, BARE_CALL, RESULTS], [BARE_CALL]),
        ([TASK, THOUGHT_CALL, RESULTS], []),
        # Without interleaved thinking only the first answer of a loop has thinking.
        ([TASK, THOUGHT_CALL, RESULTS, BARE_CALL, RESULTS], []),
        ([TASK, BARE_CALL, RESULTS, THOUGHT_CALL, RESULTS], [BARE_CALL]),
        # An abandoned call, whose result is sent with the next task.
        ([TASK, BARE_CALL, RESULTS, TASK], [BARE_CALL]),
        ([TASK, THOUGHT_CALL, RESULTS, TASK], []),
        # Text next to results may end a loop or not.
        ([TASK, THOUGHT_CALL, RESULTS_AND_TEXT, BARE_CALL, RESULTS], [BARE_CALL]),
        ([TASK, BARE_CALL, RESULTS_AND_TEXT, THOUGHT_CALL, RESULTS], [BARE_CALL]),
        # A loop that has ended does not matter.
        ([TASK, BARE_CALL, RESULTS, _message("model", "text"), TASK], []),
        ([TASK, BARE_CALL, RESULTS, _message("model", "text"), TASK, THOUGHT_CALL, RESULTS], []),
    ],
)
def test_with_a_budget_an_open_loop_has_to_begin_with_thinking(
    messages: list[PayloadMessage], thoughtless: list[PayloadMessage]
) -> None:
    manual = find_profile("anthropic", "claude-haiku-4-5")
    payload = Payload(
        model=manual.model,
        static_text="",
        tools=(),
        messages=tuple(messages),
        settings=CallSettings(thinking="2048"),
    )
    assert list(find_thoughtless(payload, manual)) == thoughtless
    assert ("thinking" in build_parameters(payload, manual)) == (not thoughtless)
    off = replace(payload, settings=CallSettings())
    assert find_thoughtless(off, manual) == ()
    adaptive = find_profile("anthropic", "claude-opus-4-8")
    assert find_thoughtless(replace(payload, model=adaptive.model), adaptive) == ()
