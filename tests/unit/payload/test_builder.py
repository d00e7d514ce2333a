"""Payloads are built from values only, and always in the same way."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.conversation.assistant import Tool
from server.conversation.block import Block, TextBlock, ToolCallBlock, ToolResultBlock
from server.conversation.epoch import Epoch, SignedSummary
from server.conversation.errors import HistoryRuleBroken, Internal, ValidationFailed
from server.conversation.payload import Layer, LayerOrder
from server.conversation.store import PayloadSource
from server.conversation.turn import Native, StopReason, TurnKind, TurnState
from server.emulator.anthropic.caller import VERSION_2026, identify
from server.emulator.anthropic.message_rules import check_ending, check_messages
from server.emulator.anthropic.models import MODELS
from server.emulator.gemini.decoding import decode
from server.emulator.gemini.turn_order import check_order, check_shape
from server.payload.builder import BuiltPayload, build_payload, hash_prefix, needs_dynamic
from server.payload.history import Step
from server.providers.anthropic.provider import AnthropicProvider
from server.providers.gemini.provider import GeminiProvider
from server.providers.model_profile import find_profile
from server.providers.provider import Provider
from tests.contracts.provider_harness import TOOLS
from tests.support.builders import epoch
from tests.support.fakes.conversation import InMemoryConversation, ModelTarget, data_of
from tests.support.strategies import broken_histories

GEMINI_PROFILE = find_profile("gemini", "gemini-3.8-flash")
CLAUDE_PROFILE = find_profile("anthropic", "claude-fable-5-2")
GEMINI = ModelTarget(provider=GeminiProvider("key"), model="gemini-3.8-flash")
CLAUDE = ModelTarget(provider=AnthropicProvider("key"), model="claude-fable-5-2")
CALLER = identify({"x-api-key": "key", "anthropic-version": VERSION_2026})
ONE = '{"todos":[1],"current_datetime":"12:00"}'
LATER = '{"todos":[1],"current_datetime":"12:01"}'
TWO = '{"todos":[1,2],"current_datetime":"12:02"}'
CALL = ToolCallBlock(id="call_1", name="get_weather", arguments={"city": "Oslo"})
RESULT = ToolResultBlock(tool_call_id="call_1", output={"celsius": 4})


def put_answer(
    conversation: InMemoryConversation, target: ModelTarget, *blocks: Block, dynamic: str | None = None, **fields: Any
) -> None:
    """Append an answer of the model, without any signature."""
    data = target.provider.foreign_message(blocks) or b""
    turn = conversation.put(
        TurnKind.MODEL_RESPONSE,
        blocks,
        **{
            "native": Native(dialect=target.provider.name, data=data),
            "provider": target.provider.name,
            "model": target.model,
            "account": target.provider.account,
            "prefix_hash": target.prefix_hash,
            "dynamic": None if dynamic is None else dynamic.encode(),
            **fields,
        },
    )
    conversation.stop_reasons[turn.seq] = StopReason.TOOL_USE if CALL in blocks else StopReason.END_TURN


def texts_of(built: BuiltPayload) -> list[list[str]]:
    messages = [json.loads(message.data) for message in built.payload.messages]
    return [
        [part["text"] for part in message.get("parts", message.get("content")) if "text" in part]
        for message in messages
    ]


@pytest.mark.parametrize(
    ("sent", "now", "expected"),
    [
        (None, ONE, True),
        (ONE, ONE, False),
        (ONE, LATER, False),
        (ONE, TWO, True),
        (ONE, '{"todos":[1]}', False),
        (ONE, "no JSON", True),
        ("no JSON", "no JSON", False),
        ("[1]", "[1]", False),
        ("[1]", "[2]", True),
    ],
)
def test_the_dynamic_layer_is_sent_again_if_it_changed(sent: str | None, now: str, *, expected: bool) -> None:
    assert needs_dynamic(sent, now) is expected


def test_the_layered_order_has_the_dynamic_layer_first_and_the_trigger_last() -> None:
    conversation = InMemoryConversation()
    conversation.say("First.")
    put_answer(conversation, GEMINI, TextBlock(text="Yes."), dynamic=ONE)
    conversation.say("Second.")
    built = conversation.build(GEMINI, TWO)
    assert built.order is LayerOrder.LAYERED
    assert [(message.layer, message.role, message.seq) for message in built.payload.messages] == [
        (Layer.DYNAMIC, "user", None),
        (Layer.BUFFERED, "user", 1),
        (Layer.BUFFERED, "model", 2),
        (Layer.TRIGGER, "user", 3),
    ]
    assert texts_of(built) == [[TWO], ["First."], ["Yes."], ["Second."]]
    assert built.dynamic_sent == TWO
    assert built.payload.breakpoints == ()


def test_the_append_only_order_has_each_dynamic_block_at_the_position_where_it_was_sent() -> None:
    conversation = InMemoryConversation()
    conversation.say("First.")
    put_answer(conversation, CLAUDE, TextBlock(text="Yes."), dynamic=ONE)
    conversation.say("Second.")
    put_answer(conversation, CLAUDE, state=TurnState.FAILED, dynamic=LATER)
    conversation.say("Third.")
    put_answer(conversation, CLAUDE, TextBlock(text="No."))
    conversation.say("Fourth.")
    built = conversation.build(CLAUDE, TWO)
    assert texts_of(built) == [
        [ONE, "First."],
        ["Yes."],
        [LATER, "Second."],
        ["Third."],
        ["No."],
        [TWO, "Fourth."],
    ]
    assert [message.dynamic for message in built.payload.messages] == [ONE, None, LATER, None, None, TWO]
    assert built.repairs == ({"kind": "answer_left_out", "seq": 4, "ids": []},)


@pytest.mark.parametrize(("now", "expected"), [(LATER, None), (TWO, TWO), ("", None), (None, None)])
def test_results_carry_a_dynamic_block_only_if_it_changed(now: str | None, expected: str | None) -> None:
    conversation = InMemoryConversation()
    conversation.say("Go.")
    put_answer(conversation, CLAUDE, CALL, dynamic=ONE)
    conversation.put(TurnKind.TOOL_RESPONSE, (RESULT,))
    built = conversation.build(CLAUDE, now)
    assert built.dynamic_sent == expected
    assert texts_of(built)[-1] == ([] if expected is None else [expected])


def test_the_last_dynamic_block_of_the_exchange_is_compared() -> None:
    conversation = InMemoryConversation()
    conversation.say("Go.")
    put_answer(conversation, CLAUDE, CALL, dynamic=ONE)
    conversation.put(TurnKind.TOOL_RESPONSE, (RESULT,))
    put_answer(conversation, CLAUDE, CALL, dynamic=TWO)
    conversation.put(TurnKind.TOOL_RESPONSE, (RESULT,))
    assert conversation.build(CLAUDE, TWO).dynamic_sent is None
    assert conversation.build(CLAUDE, ONE).dynamic_sent == ONE
    put_answer(conversation, CLAUDE, TextBlock(text="Done."))
    conversation.say("Again.")
    put_answer(conversation, CLAUDE, CALL)
    conversation.put(TurnKind.TOOL_RESPONSE, (RESULT,))
    assert conversation.build(CLAUDE, TWO).dynamic_sent == TWO


@pytest.mark.parametrize("target", [GEMINI, CLAUDE], ids=["gemini", "claude"])
@pytest.mark.parametrize("dynamic", [None, "", " \n"])
def test_a_dynamic_layer_with_nothing_in_it_is_not_sent(target: ModelTarget, dynamic: str | None) -> None:
    conversation = InMemoryConversation()
    conversation.say("Go.")
    built = conversation.build(target, dynamic)
    assert built.dynamic_sent is None
    assert texts_of(built) == [["Go."]]


def test_claude_caches_after_the_last_finished_turn_and_the_newest_message() -> None:
    conversation = InMemoryConversation()
    conversation.say("First.")
    assert conversation.build(CLAUDE).payload.breakpoints == (0,)
    put_answer(conversation, CLAUDE, TextBlock(text="Yes."))
    conversation.say("Second.")
    built = conversation.build(CLAUDE)
    assert built.payload.breakpoints == (1, 2)
    assert [entry.marked for entry in built.manifest] == [True, True, False, True, True]


def test_nothing_is_cached_after_a_leading_dynamic_layer() -> None:
    target = replace(CLAUDE, model="claude-opus-5", order=LayerOrder.LAYERED)
    conversation = InMemoryConversation()
    conversation.say("First.")
    put_answer(conversation, target, TextBlock(text="Yes."))
    conversation.say("Second.")
    built = conversation.build(target, ONE)
    assert (built.payload.marks_tools, built.payload.breakpoints) == (True, ())
    assert [entry.marked for entry in built.manifest] == [True, True, False, False, False, False]
    assert conversation.build(target, None).payload.breakpoints == (1, 2)


def test_a_wide_answer_gets_an_additional_marker_before_it() -> None:
    conversation = InMemoryConversation()
    conversation.say("First.")
    calls = [replace(CALL, id=f"call_{number}") for number in range(20)]
    put_answer(conversation, CLAUDE, *calls, CALL)
    conversation.put(TurnKind.TOOL_RESPONSE, tuple(replace(RESULT, tool_call_id=call.id) for call in calls))
    payload = conversation.build(CLAUDE).payload
    assert (payload.marks_tools, payload.breakpoints) == (False, (0, 1, 2))


def test_the_prefix_hash_is_of_the_text_and_the_tools() -> None:
    tool = Tool(name="f", description="", parameters={"z": 1, "a": 2})
    hashes = [
        hash_prefix("", ()),
        hash_prefix("a", ()),
        hash_prefix("\ud800", ()),
        hash_prefix("", (tool,)),
        hash_prefix("", (replace(tool, parameters={"a": 2, "z": 1}),)),
        hash_prefix("", (tool, tool)),
        hash_prefix("[]", ()),
    ]
    assert len(set(hashes)) == len(hashes)
    assert hash_prefix("a", (tool,)) == hash_prefix("a", (replace(tool, parameters=dict(tool.parameters)),))


def after_a_call(conversation: InMemoryConversation, target: ModelTarget, **changes: Any) -> PayloadSource:
    """The source as the store returns it if the request for all but the last two turns was the last one."""
    asked = InMemoryConversation(turns=conversation.turns[:-2], stop_reasons=conversation.stop_reasons).build(
        target, ONE
    )
    values: dict[str, Any] = {
        "previous_manifest": (asked.manifest),
        "previous_order": asked.order,
        "previous_prefix_hash": target.prefix_hash,
    }
    return replace(conversation.source(target), **values | changes)


def build(source: PayloadSource, target: ModelTarget, settled: Epoch | None = None, dynamic: str = TWO) -> BuiltPayload:
    return build_payload(
        source,
        provider=target.provider,
        static_text=target.static_text,
        epoch=settled or epoch(prefix_hash=target.prefix_hash),
        dynamic=dynamic,
        blobs={},
    )


def two_exchanges(target: ModelTarget) -> InMemoryConversation:
    conversation = InMemoryConversation()
    conversation.say("First.")
    put_answer(conversation, target, TextBlock(text="Yes."), dynamic=ONE)
    conversation.say("Second.")
    return conversation


def breaks(built: BuiltPayload) -> list[tuple[Any, Any]]:
    return [(one["index"], one["seq"]) for one in built.warnings if one["kind"] == "prefix_break"]


def test_a_broken_prefix_is_named() -> None:
    conversation = two_exchanges(CLAUDE)
    source = after_a_call(conversation, CLAUDE)
    assert breaks(build(source, CLAUDE)) == []
    edited = replace(conversation.turns[0], blocks=(TextBlock(text="Edited."),))
    assert breaks(build(replace(source, buffered=(edited, *source.buffered[1:])), CLAUDE)) == [(3, 1)]


@pytest.mark.parametrize(
    "changes",
    [
        {"previous_prefix_hash": b"another"},
        {"previous_order": LayerOrder.LAYERED},
        {"previous_order": None, "previous_prefix_hash": None, "previous_manifest": ()},
    ],
)
def test_a_new_epoch_or_order_is_no_broken_prefix(changes: dict[str, Any]) -> None:
    conversation = two_exchanges(CLAUDE)
    source = after_a_call(conversation, CLAUDE, **changes)
    edited = replace(conversation.turns[0], blocks=(TextBlock(text="Edited."),))
    assert breaks(build(replace(source, buffered=(edited, *source.buffered[1:])), CLAUDE)) == []


def opened(data: bytes, number: int) -> Epoch:
    signed_summary = SignedSummary(data=data, start_seq=1, text="", token_count=1)
    return epoch(number, prefix_hash=CLAUDE.prefix_hash, signed_summary=signed_summary, buffer_start_seq=3)


@pytest.mark.parametrize(("number", "data", "found"), [(3, b"new", []), (2, b"new", [(2, None)]), (3, b"old", [])])
def test_a_signed_summary_may_change_with_an_epoch_and_not_within_one(
    number: int, data: bytes, found: list[Any]
) -> None:
    conversation = two_exchanges(CLAUDE)
    source = after_a_call(conversation, CLAUDE)
    asked = build(replace(source, buffered=source.buffered[:-2]), CLAUDE, opened(b"old", 2), ONE)
    source = replace(source, previous_manifest=asked.manifest, previous_epoch=2)
    built = build(source, CLAUDE, opened(data, number))
    assert breaks(built) == found
    first = built.payload.messages[0]
    assert (first.data, first.is_signed_summary, first.layer) == (data, True, Layer.BUFFERED)


def test_requests_of_different_providers_are_not_compared() -> None:
    conversation = two_exchanges(GEMINI)
    assert breaks(build(after_a_call(conversation, CLAUDE), CLAUDE)) == []


def test_a_trigger_that_answers_no_call_is_refused() -> None:
    conversation = InMemoryConversation()
    conversation.put(TurnKind.TOOL_RESPONSE, (RESULT,))
    with pytest.raises(HistoryRuleBroken) as caught:
        conversation.build(CLAUDE)
    assert caught.value.details == {"rule": "result_orphaned", "seq": 1}
    conversation.turns.clear()
    conversation.say("Go.")
    conversation.put(TurnKind.TOOL_RESPONSE, (RESULT,))
    with pytest.raises(HistoryRuleBroken):
        conversation.build(CLAUDE)


def test_a_request_needs_a_trigger() -> None:
    conversation = InMemoryConversation()
    with pytest.raises(Internal):
        conversation.build(GEMINI)
    conversation.say("Go.")
    put_answer(conversation, GEMINI, TextBlock(text="Yes."))
    with pytest.raises(Internal):
        conversation.build(GEMINI)


def test_a_foreign_answer_needs_its_blocks() -> None:
    conversation = two_exchanges(GEMINI)
    source = conversation.source(CLAUDE)
    bare = replace(source.buffered[1], blocks=None)
    with pytest.raises(Internal, match="without its blocks"):
        build(replace(source, buffered=(source.buffered[0], bare, source.buffered[2])), CLAUDE)


def test_settings_that_cannot_be_read_are_refused() -> None:
    conversation = two_exchanges(GEMINI)
    source = conversation.source(GEMINI)
    definition = replace(source.assistant.definition, settings={"tone": "kind"})
    with pytest.raises(ValidationFailed):
        build(replace(source, assistant=replace(source.assistant, definition=definition)), GEMINI)


def imported(steps: Sequence[Step]) -> InMemoryConversation:
    """Any turns in any order, followed by a user task."""
    conversation = InMemoryConversation()
    for step in steps:
        blocks: tuple[Block, ...] = (*step.calls, *step.results)
        if step.kind is not TurnKind.TOOL_RESPONSE:
            blocks = (TextBlock(text=f"Turn {step.seq}."), *blocks)
        conversation.put(step.kind, blocks, state=TurnState.COMPLETE if step.complete else TurnState.CANCELLED)
    conversation.say("Well?")
    return conversation


async def body_of(provider: Provider, built: BuiltPayload) -> bytes:
    return await provider.encode_request(built.payload)


@settings(max_examples=60)
@given(broken_histories, st.sampled_from(LayerOrder))
async def test_any_imported_history_is_accepted_by_gemini(steps: tuple[Step, ...], order: LayerOrder) -> None:
    conversation = imported(steps)
    target = replace(GEMINI, order=order)
    built = conversation.build(target, ONE)
    assert built == conversation.build(target, ONE)
    request = decode(await body_of(GEMINI.provider, built), "GenerateContentRequest")
    check_shape(request["contents"])
    check_order(request["contents"])


@settings(max_examples=60)
@given(broken_histories)
async def test_any_imported_history_is_accepted_by_claude(steps: tuple[Step, ...]) -> None:
    conversation = imported(steps)
    built = conversation.build(CLAUDE, ONE)
    assert built == conversation.build(CLAUDE, ONE)
    body = json.loads(await body_of(CLAUDE.provider, built))
    check_messages(body, MODELS[CLAUDE.model], CALLER)
    check_ending(body, MODELS[CLAUDE.model], continues_paused_turn=False)


@given(broken_histories, st.sampled_from([GEMINI, CLAUDE]))
def test_in_the_append_only_order_a_request_begins_with_the_previous_one(
    steps: tuple[Step, ...], target: ModelTarget
) -> None:
    target = replace(target, order=LayerOrder.APPEND_ONLY)
    conversation = imported(steps)
    early = conversation.build(target, ONE)
    put_answer(conversation, target, TextBlock(text="Yes."), dynamic=ONE)
    conversation.say("And?")
    late = conversation.build(target, TWO)
    sent = data_of(early.payload.messages)
    assert data_of(late.payload.messages)[: len(sent)] == sent


def test_the_tools_of_the_assistant_are_sent() -> None:
    conversation = two_exchanges(GEMINI)
    assert conversation.build(GEMINI).payload.tools == TOOLS
