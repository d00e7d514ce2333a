"""Payloads are built from values alone, the same ones always in the same way."""

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
from tests.contracts.provider_rig import TOOLS
from tests.support.builders import epoch
from tests.support.fakes.conversation import Speaker, Talk, data_of
from tests.support.strategies import broken_histories

GEMINI_PROFILE = find_profile("gemini", "gemini-3.8-flash")
CLAUDE_PROFILE = find_profile("anthropic", "claude-fable-5-2")
GEMINI = Speaker(provider=GeminiProvider("key"), model="gemini-3.8-flash")
CLAUDE = Speaker(provider=AnthropicProvider("key"), model="claude-fable-5-2")
CALLER = identify({"x-api-key": "key", "anthropic-version": VERSION_2026})
ONE = '{"todos":[1],"current_datetime":"12:00"}'
LATER = '{"todos":[1],"current_datetime":"12:01"}'
TWO = '{"todos":[1,2],"current_datetime":"12:02"}'
CALL = ToolCallBlock(id="call_1", name="get_weather", arguments={"city": "Oslo"})
RESULT = ToolResultBlock(tool_call_id="call_1", output={"celsius": 4})


def said(talk: Talk, speaker: Speaker, *blocks: Block, dynamic: str | None = None, **fields: Any) -> None:
    """An answer of the speaker's, without anything signed in it."""
    data = speaker.provider.foreign_message(blocks) or b""
    turn = talk.put(
        TurnKind.MODEL_RESPONSE,
        blocks,
        **{
            "native": Native(dialect=speaker.provider.name, data=data),
            "provider": speaker.provider.name,
            "model": speaker.model,
            "account": speaker.provider.account,
            "prefix_hash": speaker.prefix_hash,
            "dynamic": None if dynamic is None else dynamic.encode(),
            **fields,
        },
    )
    talk.stop_reasons[turn.seq] = StopReason.TOOL_USE if CALL in blocks else StopReason.END_TURN


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
def test_the_dynamic_layer_is_sent_again_where_it_says_something_new(
    sent: str | None, now: str, *, expected: bool
) -> None:
    assert needs_dynamic(sent, now) is expected


def test_the_layered_order_has_the_dynamic_layer_first_and_the_trigger_last() -> None:
    talk = Talk()
    talk.say("First.")
    said(talk, GEMINI, TextBlock(text="Yes."), dynamic=ONE)
    talk.say("Second.")
    built = talk.build(GEMINI, TWO)
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


def test_the_append_only_order_has_each_dynamic_block_where_it_was_sent() -> None:
    talk = Talk()
    talk.say("First.")
    said(talk, CLAUDE, TextBlock(text="Yes."), dynamic=ONE)
    talk.say("Second.")
    said(talk, CLAUDE, state=TurnState.FAILED, dynamic=LATER)
    talk.say("Third.")
    said(talk, CLAUDE, TextBlock(text="No."))
    talk.say("Fourth.")
    built = talk.build(CLAUDE, TWO)
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
def test_results_carry_a_dynamic_block_only_where_it_has_changed(now: str | None, expected: str | None) -> None:
    talk = Talk()
    talk.say("Go.")
    said(talk, CLAUDE, CALL, dynamic=ONE)
    talk.put(TurnKind.TOOL_RESPONSE, (RESULT,))
    built = talk.build(CLAUDE, now)
    assert built.dynamic_sent == expected
    assert texts_of(built)[-1] == ([] if expected is None else [expected])


def test_what_was_sent_within_the_exchange_is_what_counts() -> None:
    talk = Talk()
    talk.say("Go.")
    said(talk, CLAUDE, CALL, dynamic=ONE)
    talk.put(TurnKind.TOOL_RESPONSE, (RESULT,))
    said(talk, CLAUDE, CALL, dynamic=TWO)
    talk.put(TurnKind.TOOL_RESPONSE, (RESULT,))
    assert talk.build(CLAUDE, TWO).dynamic_sent is None
    assert talk.build(CLAUDE, ONE).dynamic_sent == ONE
    said(talk, CLAUDE, TextBlock(text="Done."))
    talk.say("Again.")
    said(talk, CLAUDE, CALL)
    talk.put(TurnKind.TOOL_RESPONSE, (RESULT,))
    assert talk.build(CLAUDE, TWO).dynamic_sent == TWO


@pytest.mark.parametrize("speaker", [GEMINI, CLAUDE], ids=["gemini", "claude"])
@pytest.mark.parametrize("dynamic", [None, "", " \n"])
def test_a_dynamic_layer_with_nothing_in_it_is_not_sent(speaker: Speaker, dynamic: str | None) -> None:
    talk = Talk()
    talk.say("Go.")
    built = talk.build(speaker, dynamic)
    assert built.dynamic_sent is None
    assert texts_of(built) == [["Go."]]


def test_claude_caches_behind_the_last_finished_turn_and_the_newest_message() -> None:
    talk = Talk()
    talk.say("First.")
    assert talk.build(CLAUDE).payload.breakpoints == (0,)
    said(talk, CLAUDE, TextBlock(text="Yes."))
    talk.say("Second.")
    built = talk.build(CLAUDE)
    assert built.payload.breakpoints == (1, 2)
    assert [entry.marked for entry in built.manifest] == [True, True, False, True, True]


def test_nothing_is_cached_behind_a_dynamic_layer_that_stands_first() -> None:
    speaker = replace(CLAUDE, model="claude-opus-5", order=LayerOrder.LAYERED)
    talk = Talk()
    talk.say("First.")
    said(talk, speaker, TextBlock(text="Yes."))
    talk.say("Second.")
    built = talk.build(speaker, ONE)
    assert (built.payload.marks_tools, built.payload.breakpoints) == (True, ())
    assert [entry.marked for entry in built.manifest] == [True, True, False, False, False, False]
    assert talk.build(speaker, None).payload.breakpoints == (1, 2)


def test_a_wide_answer_gets_a_marker_before_it_too() -> None:
    talk = Talk()
    talk.say("First.")
    calls = [replace(CALL, id=f"call_{number}") for number in range(20)]
    said(talk, CLAUDE, *calls, CALL)
    talk.put(TurnKind.TOOL_RESPONSE, tuple(replace(RESULT, tool_call_id=call.id) for call in calls))
    payload = talk.build(CLAUDE).payload
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


def after_a_call(talk: Talk, speaker: Speaker, **changes: Any) -> PayloadSource:
    """As the store would give it if the request for all but the last two turns had been the last one."""
    asked = Talk(turns=talk.turns[:-2], stop_reasons=talk.stop_reasons).build(speaker, ONE)
    values: dict[str, Any] = {
        "previous_manifest": (asked.manifest),
        "previous_order": asked.order,
        "previous_prefix_hash": speaker.prefix_hash,
    }
    return replace(talk.source(speaker), **values | changes)


def build(source: PayloadSource, speaker: Speaker, settled: Epoch | None = None, dynamic: str = TWO) -> BuiltPayload:
    return build_payload(
        source,
        provider=speaker.provider,
        profile=CLAUDE_PROFILE if speaker is CLAUDE else GEMINI_PROFILE,
        static_text=speaker.static_text,
        epoch=settled or epoch(prefix_hash=speaker.prefix_hash),
        dynamic=dynamic,
        blobs={},
    )


def two_exchanges(speaker: Speaker) -> Talk:
    talk = Talk()
    talk.say("First.")
    said(talk, speaker, TextBlock(text="Yes."), dynamic=ONE)
    talk.say("Second.")
    return talk


def breaks(built: BuiltPayload) -> list[tuple[Any, Any]]:
    return [(one["index"], one["seq"]) for one in built.warnings if one["kind"] == "prefix_break"]


def test_a_prefix_that_broke_is_named() -> None:
    talk = two_exchanges(CLAUDE)
    source = after_a_call(talk, CLAUDE)
    assert breaks(build(source, CLAUDE)) == []
    edited = replace(talk.turns[0], blocks=(TextBlock(text="Edited."),))
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
    talk = two_exchanges(CLAUDE)
    source = after_a_call(talk, CLAUDE, **changes)
    edited = replace(talk.turns[0], blocks=(TextBlock(text="Edited."),))
    assert breaks(build(replace(source, buffered=(edited, *source.buffered[1:])), CLAUDE)) == []


def opened(data: bytes, number: int) -> Epoch:
    signed_summary = SignedSummary(data=data, start_seq=1, text="", token_count=1)
    return epoch(number, prefix_hash=CLAUDE.prefix_hash, signed_summary=signed_summary, buffer_start_seq=3)


@pytest.mark.parametrize(("number", "data", "found"), [(3, b"new", []), (2, b"new", [(2, None)]), (3, b"old", [])])
def test_an_signed_summary_may_change_with_an_epoch_and_not_within_one(
    number: int, data: bytes, found: list[Any]
) -> None:
    talk = two_exchanges(CLAUDE)
    source = after_a_call(talk, CLAUDE)
    asked = build(replace(source, buffered=source.buffered[:-2]), CLAUDE, opened(b"old", 2), ONE)
    source = replace(source, previous_manifest=asked.manifest, previous_epoch=2)
    built = build(source, CLAUDE, opened(data, number))
    assert breaks(built) == found
    first = built.payload.messages[0]
    assert (first.data, first.is_signed_summary, first.layer) == (data, True, Layer.BUFFERED)


def test_another_providers_request_is_not_compared_with() -> None:
    talk = two_exchanges(GEMINI)
    assert breaks(build(after_a_call(talk, CLAUDE), CLAUDE)) == []


def test_a_trigger_that_answers_no_call_is_refused() -> None:
    talk = Talk()
    talk.put(TurnKind.TOOL_RESPONSE, (RESULT,))
    with pytest.raises(HistoryRuleBroken) as caught:
        talk.build(CLAUDE)
    assert caught.value.details == {"rule": "result_orphaned", "seq": 1}
    talk.turns.clear()
    talk.say("Go.")
    talk.put(TurnKind.TOOL_RESPONSE, (RESULT,))
    with pytest.raises(HistoryRuleBroken):
        talk.build(CLAUDE)


def test_there_has_to_be_something_to_answer() -> None:
    talk = Talk()
    with pytest.raises(Internal):
        talk.build(GEMINI)
    talk.say("Go.")
    said(talk, GEMINI, TextBlock(text="Yes."))
    with pytest.raises(Internal):
        talk.build(GEMINI)


def test_a_foreign_answer_needs_its_blocks() -> None:
    talk = two_exchanges(GEMINI)
    source = talk.source(CLAUDE)
    bare = replace(source.buffered[1], blocks=None)
    with pytest.raises(Internal, match="without its blocks"):
        build(replace(source, buffered=(source.buffered[0], bare, source.buffered[2])), CLAUDE)


def test_settings_that_cannot_be_read_are_refused() -> None:
    talk = two_exchanges(GEMINI)
    source = talk.source(GEMINI)
    definition = replace(source.assistant.definition, settings={"tone": "kind"})
    with pytest.raises(ValidationFailed):
        build(replace(source, assistant=replace(source.assistant, definition=definition)), GEMINI)


def imported(steps: Sequence[Step]) -> Talk:
    """Any turns in any order, with a user task behind them."""
    talk = Talk()
    for step in steps:
        blocks: tuple[Block, ...] = (*step.calls, *step.results)
        if step.kind is not TurnKind.TOOL_RESPONSE:
            blocks = (TextBlock(text=f"Turn {step.seq}."), *blocks)
        talk.put(step.kind, blocks, state=TurnState.COMPLETE if step.complete else TurnState.CANCELLED)
    talk.say("Well?")
    return talk


async def body_of(provider: Provider, built: BuiltPayload) -> bytes:
    return await provider.encode_request(built.payload)


@settings(max_examples=60)
@given(broken_histories, st.sampled_from(LayerOrder))
async def test_any_imported_history_is_one_that_gemini_takes(steps: tuple[Step, ...], order: LayerOrder) -> None:
    talk = imported(steps)
    speaker = replace(GEMINI, order=order)
    built = talk.build(speaker, ONE)
    assert built == talk.build(speaker, ONE)
    request = decode(await body_of(GEMINI.provider, built), "GenerateContentRequest")
    check_shape(request["contents"])
    check_order(request["contents"])


@settings(max_examples=60)
@given(broken_histories)
async def test_any_imported_history_is_one_that_claude_takes(steps: tuple[Step, ...]) -> None:
    talk = imported(steps)
    built = talk.build(CLAUDE, ONE)
    assert built == talk.build(CLAUDE, ONE)
    body = json.loads(await body_of(CLAUDE.provider, built))
    check_messages(body, MODELS[CLAUDE.model], CALLER)
    check_ending(body, MODELS[CLAUDE.model], continues_paused_turn=False)


@given(broken_histories, st.sampled_from([GEMINI, CLAUDE]))
def test_in_the_append_only_order_a_request_begins_with_the_one_before(
    steps: tuple[Step, ...], speaker: Speaker
) -> None:
    speaker = replace(speaker, order=LayerOrder.APPEND_ONLY)
    talk = imported(steps)
    early = talk.build(speaker, ONE)
    said(talk, speaker, TextBlock(text="Yes."), dynamic=ONE)
    talk.say("And?")
    late = talk.build(speaker, TWO)
    sent = data_of(early.payload.messages)
    assert data_of(late.payload.messages)[: len(sent)] == sent


def test_the_tools_of_the_assistant_are_sent() -> None:
    talk = two_exchanges(GEMINI)
    assert talk.build(GEMINI).payload.tools == TOOLS
