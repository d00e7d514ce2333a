"""Payloads are translated into requests for Gemini."""

import base64
import json
from dataclasses import replace
from typing import Any

import pytest

from server.conversation.block import Blob, Block, ImageBlock, TextBlock, ThinkingBlock, ToolCallBlock, ToolResultBlock
from server.conversation.errors import Internal, ValidationFailed
from server.conversation.payload import CallSettings
from server.providers.gemini.request import (
    UNSIGNED_CALL,
    build_config,
    build_safety,
    build_thinking,
    build_tools,
    dynamic_message,
    foreign_message,
    join_messages,
    tool_message,
    unsigned_message,
    user_message,
)
from server.providers.model_profile import find_profile
from tests.contracts.provider_harness import build_payload

LAYERS = {"contents": ["placeholder"], "systemInstruction": "another"}
PIXEL = Blob(sha256=b"\x01" * 32, media_type="image/png", data=b"\x89PNG")


def thinking(model: str, **settings: Any) -> dict[str, Any]:
    config = build_thinking(CallSettings(**settings), find_profile("gemini", model))
    return config.model_dump(exclude_none=True, mode="json")


def test_a_user_task_is_one_content() -> None:
    image = ImageBlock(media_type="image/png", sha256=PIXEL.sha256.hex(), size_bytes=4)
    message = json.loads(user_message([TextBlock(text="Ü"), image, TextBlock(text="")], {image.sha256: PIXEL}))
    data = base64.b64encode(PIXEL.data).decode()
    assert message == {
        "role": "user",
        "parts": [{"text": "Ü"}, {"inlineData": {"mimeType": "image/png", "data": data}}, {"text": ""}],
    }


@pytest.mark.parametrize("block", [ThinkingBlock(text="Hm."), ToolResultBlock(tool_call_id="1", output=1)])
def test_a_user_task_takes_no_other_blocks(block: Block) -> None:
    with pytest.raises(ValidationFailed, match=type(block).__name__):
        user_message([block], {})


def test_safety_settings_are_sent_by_category() -> None:
    settings = CallSettings(safety={"HARM_CATEGORY_HARASSMENT": "BLOCK_ONLY_HIGH"})
    [asked] = build_safety(settings)
    assert asked.model_dump(mode="json", exclude_none=True) == {
        "category": "HARM_CATEGORY_HARASSMENT",
        "threshold": "BLOCK_ONLY_HIGH",
    }


@pytest.mark.parametrize(
    "safety",
    [{"HARM_CATEGORY_BOREDOM": "OFF"}, {"HARM_CATEGORY_HARASSMENT": "SOMETIMES"}],
    ids=["category", "threshold"],
)
def test_an_unknown_value_for_gemini_is_refused(safety: dict[str, str]) -> None:
    with pytest.raises(ValidationFailed, match="of Gemini"):
        build_safety(CallSettings(safety=safety))


def test_results_come_in_the_order_of_the_calls_with_their_names() -> None:
    calls: list[Block] = [
        ToolCallBlock(id="a", name="f", arguments={}),
        TextBlock(text="x"),
        ToolCallBlock(id="b", name="g", arguments={}),
    ]
    results = [
        ToolResultBlock(tool_call_id="b", output="broken", is_error=True),
        ToolResultBlock(tool_call_id="a", output={"n": 1.5}),
        ToolResultBlock(tool_call_id="stranger", output=0),
    ]
    assert json.loads(tool_message(results, calls)) == {
        "role": "user",
        "parts": [
            {"functionResponse": {"id": "a", "name": "f", "response": {"output": {"n": 1.5}}}},
            {"functionResponse": {"id": "b", "name": "g", "response": {"error": "broken"}}},
        ],
    }


def test_the_answer_of_another_vendor_is_text_and_calls_of_which_the_first_is_marked() -> None:
    blocks: list[Block] = [
        ThinkingBlock(text="secret"),
        TextBlock(text=""),
        TextBlock(text="I look."),
        ToolCallBlock(id="a", name="f", arguments={"n": 1}),
        ToolCallBlock(id="b", name="f", arguments={}),
    ]
    message = foreign_message(blocks)
    assert message is not None
    assert json.loads(message) == {
        "role": "model",
        "parts": [
            {"text": "I look."},
            {"functionCall": {"id": "a", "name": "f", "args": {"n": 1}}, "thoughtSignature": UNSIGNED_CALL},
            {"functionCall": {"id": "b", "name": "f", "args": {}}},
        ],
    }
    assert base64.b64decode(UNSIGNED_CALL) == b"skip_thought_signature_validator"


def test_an_answer_of_thinking_alone_is_no_message() -> None:
    assert foreign_message([ThinkingBlock(text="secret")]) is None


def test_the_dynamic_block_is_a_part_before_the_task_after_results_or_alone() -> None:
    dynamic = {"text": '{"todos":[]}'}
    task = json.loads(user_message([TextBlock(text="Go.")], {}, dynamic["text"]))
    assert task["parts"] == [dynamic, {"text": "Go."}]
    call, result = ToolCallBlock(id="a", name="f", arguments={}), ToolResultBlock(tool_call_id="a", output=4)
    response = json.loads(tool_message([result], [call], dynamic["text"]))
    answered = {"functionResponse": {"id": "a", "name": "f", "response": {"output": 4}}}
    assert response["parts"] == [answered, dynamic]
    assert json.loads(dynamic_message(dynamic["text"])) == {"role": "user", "parts": [dynamic]}


def test_a_user_task_without_blocks_is_an_empty_text() -> None:
    assert json.loads(user_message([], {})) == {"role": "user", "parts": [{"text": ""}]}


def test_a_lone_surrogate_is_replaced_in_what_is_sent() -> None:
    assert json.loads(user_message([TextBlock(text="a\ud83d")], {}))["parts"] == [{"text": "a\ufffd"}]


def test_an_own_answer_without_signatures_keeps_everything_else_and_its_calls_are_marked() -> None:
    native = (
        b'{"role":"model","parts":[{"text":"Hm.","thought":true},{"text":"I look.","thoughtSignature":"cw=="},'
        b'{"functionCall":{"id":"1","args":{"b":1.0,"a":1E400},"name":"f"},"thoughtSignature":"cw==","futureHint":1.50},'
        b'{"functionCall":{"id":"2","name":"f"}},{"text":"","thoughtSignature":"cw=="},{"futureContent":{"x":[]}}]}'
    )
    mark = b'"thoughtSignature":"%s"' % UNSIGNED_CALL.encode()
    assert unsigned_message(native) == (
        b'{"role":"model","parts":[{"text":"I look."},'
        b'{"functionCall":{"id":"1","args":{"b":1.0,"a":1E400},"name":"f"},"futureHint":1.50,' + mark + b"},"
        b'{"functionCall":{"id":"2","name":"f"}},{"futureContent":{"x":[]}}]}'
    )


def test_an_own_answer_of_thoughts_alone_is_no_message() -> None:
    thoughts = b'{"role":"model","parts":[{"text":"Hm.","thought":true},{"text":"","thoughtSignature":"cw=="}]}'
    assert unsigned_message(thoughts) is None


def test_the_automation_of_the_sdk_is_switched_off() -> None:
    config = build_config(build_payload("gemini-3.8-flash", []), find_profile("gemini", "gemini-3.8-flash"), LAYERS)
    assert config.automatic_function_calling is not None
    assert config.automatic_function_calling.disable is True
    assert config.automatic_continuation is False
    assert config.http_options is not None
    assert config.http_options.extra_body == LAYERS


def test_extra_parameters_do_not_replace_those_of_the_payload() -> None:
    extra = {
        "contents": [],
        "system_instruction": "You do harm.",
        "tools": [],
        "safetySettings": [1],
        "generationConfig": {"topP": 0.5, "maxOutputTokens": 1, "stop_sequences": ["x"]},
    }
    settings = CallSettings(max_output_tokens=7, extra=extra)
    payload = build_payload("gemini-3.8-flash", [], settings=settings)
    config = build_config(payload, find_profile("gemini", "gemini-3.8-flash"), LAYERS)
    assert config.http_options is not None
    assert config.http_options.extra_body == {
        "safetySettings": [1],
        "generationConfig": {"topP": 0.5, "stop_sequences": ["x"]},
        **LAYERS,
    }


def test_an_explicit_cache_is_referred_to_by_name() -> None:
    profile = find_profile("gemini", "gemini-3.8-flash")
    plain = build_config(build_payload("gemini-3.8-flash", []), profile, LAYERS)
    cached = build_config(build_payload("gemini-3.8-flash", [], cached_content="cachedContents/1"), profile, LAYERS)
    assert (plain.cached_content, cached.cached_content) == (None, "cachedContents/1")


@pytest.mark.parametrize(("model", "expected"), [("gemini-3.8-flash", 0.3), ("gemini-4-argon", None)])
def test_sampling_parameters_are_sent_to_models_that_support_them(model: str, expected: float | None) -> None:
    payload = build_payload(model, [], settings=CallSettings(temperature=0.3))
    assert build_config(payload, find_profile("gemini", model), LAYERS).temperature == expected


@pytest.mark.parametrize(
    ("model", "settings", "expected"),
    [
        ("gemini-3.8-flash", {}, {"include_thoughts": True}),
        ("gemini-3.8-flash", {"show_thinking": False}, {"include_thoughts": False}),
        ("gemini-3.8-flash", {"thinking": "high"}, {"include_thoughts": True, "thinking_level": "HIGH"}),
        ("gemini-3.6-flash", {"thinking": "minimal"}, {"include_thoughts": True, "thinking_level": "MINIMAL"}),
        ("gemini-2.5-flash", {"thinking": "off"}, {"include_thoughts": False, "thinking_budget": 0}),
        ("gemini-2.5-flash", {"thinking": "512"}, {"include_thoughts": True, "thinking_budget": 512}),
    ],
)
def test_thinking_is_requested_in_the_form_of_the_model(model: str, settings: dict[str, Any], expected: Any) -> None:
    assert thinking(model, **settings) == expected


@pytest.mark.parametrize(
    ("model", "asked"),
    [
        ("gemini-4-argon", "minimal"),
        ("gemini-4-argon", "off"),
        ("gemini-3.8-flash", "512"),
        ("gemini-2.5-flash", "high"),
        ("gemini-2.5-pro", "off"),
    ],
)
def test_thinking_that_the_model_does_not_support_is_refused(model: str, asked: str) -> None:
    with pytest.raises(ValidationFailed):
        thinking(model, thinking=asked)


def test_tools_are_one_tool_with_all_functions_and_their_schemas_in_order() -> None:
    tools = build_tools(build_payload("gemini-3.8-flash", []))
    assert tools is not None
    (tool,) = tools
    assert [one.name for one in tool.function_declarations or []] == ["get_weather", "get_time"]
    assert build_tools(build_payload("gemini-3.8-flash", [], tools=())) is None


def test_contents_are_joined_unchanged() -> None:
    assert join_messages(build_payload("gemini-3.8-flash", [b'{"a":1.0}', b'{"b" : 2}'])) == b'{"a":1.0},{"b" : 2}'


@pytest.mark.parametrize("is_asked", [True, False])
def test_gemini_has_no_signed_summaries(is_asked: bool) -> None:  # noqa: FBT001  reason: a parameter
    payload = build_payload("gemini-3.8-flash", [b"{}"], requests_summary=is_asked)
    opened = replace(payload, messages=tuple(replace(message, is_signed_summary=True) for message in payload.messages))
    with pytest.raises(Internal):
        build_config(opened, find_profile("gemini", "gemini-3.8-flash"), LAYERS)
