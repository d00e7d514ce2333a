"""The request for a signed summary contains what the model was sent, and the turns after the cut stay unchanged."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.compaction.signed_summary import build_compaction_payload, find_cut, request_caching
from server.conversation.block import Block, TextBlock, ToolCallBlock, ToolResultBlock
from server.conversation.call import CallTrace
from server.conversation.epoch import SignedSummary
from server.conversation.payload import Payload
from server.conversation.store import PayloadSource
from server.conversation.turn import Native, StopReason, TurnKind, TurnState
from server.conversation.usage import Usage
from server.payload.history import Step
from server.providers.anthropic.provider import AnthropicProvider
from tests.support.fakes.conversation import NOW, InMemoryConversation, ModelTarget, data_of
from tests.support.strategies import broken_histories

CLAUDE = ModelTarget(provider=AnthropicProvider("key"), model="claude-fable-5-2")
SIGNED_SUMMARY = SignedSummary(
    data=b'{"role":"assistant","content":[]}', start_seq=1, text="[1-2] told\n", token_count=3
)
CALL = ToolCallBlock(id="call_1", name="get_weather", arguments={"city": "Oslo"})
THOUGHT = b'{"role":"assistant","content":[{"type":"thinking","thinking":"Hm.","signature":"c2ln"}]}'
RESULT = ToolResultBlock(tool_call_id="call_1", output={"celsius": 4})


def answered(conversation: InMemoryConversation, *blocks: Block, **fields: Any) -> None:
    data = CLAUDE.provider.foreign_message(blocks) or b""
    values: dict[str, Any] = {
        "native": Native(dialect="anthropic", data=data),
        "provider": "anthropic",
        "model": CLAUDE.model,
        "account": CLAUDE.provider.account,
        "prefix_hash": CLAUDE.prefix_hash,
        "dynamic": b'{"todos":[1]}',
    }
    turn = conversation.put(TurnKind.MODEL_RESPONSE, blocks, **values | fields)
    if any(isinstance(block, ToolCallBlock) for block in blocks):
        conversation.stop_reasons[turn.seq] = StopReason.TOOL_USE


def exchanges(count: int) -> InMemoryConversation:
    conversation = InMemoryConversation()
    for number in range(1, count + 1):
        conversation.say(f"Task {number}.")
        answered(conversation, TextBlock(text=f"Answer {number}."))
    return conversation


def cut_of(source: PayloadSource, last_seq: int) -> int | None:
    return find_cut(source, provider=CLAUDE.provider, account=CLAUDE.provider.account, last_seq=last_seq)


def build(source: PayloadSource, last_seq: int) -> Payload:
    return build_compaction_payload(
        source,
        provider=CLAUDE.provider,
        account=CLAUDE.provider.account,
        static_text=CLAUDE.static_text,
        last_seq=last_seq,
        blobs={},
    )


def test_the_messages_are_those_of_the_turns_up_to_the_cut() -> None:
    conversation = exchanges(3)
    payload = build(conversation.source(CLAUDE), 4)
    conversation.say("Next.")
    sent = conversation.build(CLAUDE).payload
    assert payload.requests_summary
    assert data_of(payload.messages) == data_of(sent.messages)[:4]
    assert (payload.static_text, payload.tools, payload.model) == (sent.static_text, sent.tools, sent.model)
    assert (payload.settings.max_output_tokens, payload.settings.stop_sequences) == (None, ())


def test_an_earlier_summary_is_summarised_with_the_rest() -> None:
    source = exchanges(2).source(CLAUDE)
    assert source.epoch is not None
    payload = build(replace(source, epoch=replace(source.epoch, signed_summary=SIGNED_SUMMARY)), 2)
    assert payload.messages[0].is_signed_summary
    assert data_of(payload.messages)[0] == SIGNED_SUMMARY.data
    assert payload.signed_summary == payload.messages[0]


def test_a_cut_is_made_at_the_requested_turn() -> None:
    assert cut_of(exchanges(3).source(CLAUDE), 4) == 4


@pytest.mark.parametrize(
    ("blocks", "fields"),
    [
        # No answer came: for the provider the task is followed by the next one.
        ((), {"state": TurnState.FAILED}),
        # The call was never answered: its result is supplied, and that is an input.
        ((CALL,), {}),
        # It was cut off while thinking, and the thinking cannot be sent back.
        ((), {"state": TurnState.FAILED, "native": Native(dialect="anthropic", data=THOUGHT), "prefix_hash": b"else"}),
    ],
)
def test_a_cut_goes_back_to_an_exchange_that_ends_with_the_model(
    blocks: tuple[Block, ...], fields: dict[str, Any]
) -> None:
    conversation = exchanges(2)
    conversation.say("Task 3.")
    answered(conversation, *blocks, **fields)
    conversation.say("Task 4.")
    answered(conversation, TextBlock(text="Answer 4."))
    source = conversation.source(CLAUDE)
    assert cut_of(source, 6) == 4
    only = replace(source, buffered=source.buffered[4:])
    assert cut_of(only, 6) is None


def test_a_cut_does_not_separate_calls_with_the_same_id() -> None:
    """The second is renamed because of the first; without the first its message would differ."""
    conversation = InMemoryConversation()
    for _ in range(2):
        conversation.say("Task.")
        answered(conversation, CALL)
        conversation.put(TurnKind.TOOL_RESPONSE, (RESULT,))
        answered(conversation, TextBlock(text="Four degrees."))
    assert cut_of(conversation.source(CLAUDE), 4) is None


@given(steps=broken_histories, place=st.integers(0, 12))
def test_for_any_history_the_turns_after_the_cut_stay_unchanged(steps: Sequence[Step], place: int) -> None:
    conversation = InMemoryConversation()
    for step in steps:
        blocks: tuple[Block, ...] = (*step.calls, *step.results)
        if step.kind is TurnKind.MODEL_RESPONSE:
            state = TurnState.COMPLETE if step.complete else TurnState.CANCELLED
            answered(conversation, TextBlock(text=f"Turn {step.seq}."), *blocks, state=state)
        else:
            conversation.put(step.kind, blocks or (TextBlock(text=f"Turn {step.seq}."),))
    conversation.say("Well?")
    source = conversation.source(CLAUDE)
    cut = cut_of(source, place)
    if cut is None:
        return
    assert cut <= place
    whole = data_of(conversation.build(CLAUDE).payload.messages)
    moved = build(source, cut)
    kept = InMemoryConversation(
        turns=[turn for turn in conversation.turns if turn.seq > cut], stop_reasons=conversation.stop_reasons
    ).build(CLAUDE)
    assert moved.messages[-1].role == "model"
    assert [*data_of(moved.messages), *data_of(kept.payload.messages)] == whole


@pytest.mark.parametrize(
    ("elapsed", "changes", "marked"),
    [(299, {}, True), (301, {}, False), (1, {"account": "other"}, False), (1, {"model": "claude-opus-5-5"}, False)],
)
def test_the_cache_is_used_if_it_may_have_an_entry(elapsed: float, changes: dict[str, Any], marked: bool) -> None:  # noqa: FBT001  reason: a parameter
    values: dict[str, Any] = {
        "provider": "anthropic",
        "model": CLAUDE.model,
        "account": "one",
        "started_at": NOW,
        "usage": Usage(),
        "response_id": None,
        "caching": {"cache_seconds": 300, "static_cache_seconds": 3600},
    }
    source = replace(exchanges(2).source(CLAUDE), previous_call=CallTrace(**values | changes))
    asked = request_caching(build(source, 4), source, "one", NOW + timedelta(seconds=elapsed))
    assert asked.breakpoints == ((3,) if marked else ())
    assert asked.static_cache_seconds == (3600 if marked else 0)
