"""Payloads are sent to strict providers: after any history, the next request is accepted."""

import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from server.conversation.block import TextBlock, ToolCallBlock, ToolResultBlock
from server.conversation.errors import ProviderDisconnected, ProviderOverloaded
from server.conversation.payload import Layer, LayerOrder
from server.conversation.turn import Native, StopReason, TurnKind, TurnState
from server.emulator.anthropic.app import build_anthropic_app
from server.emulator.gemini.app import build_gemini_app
from server.emulator.reply import FaultKind, Reply, ToolCall
from server.payload.builder import rebuild_payload
from server.providers.anthropic.provider import AnthropicProvider
from server.providers.gemini.provider import GeminiProvider
from tests.contracts.provider_harness import ProviderHarness, open_harness, step
from tests.support.fakes.conversation import InMemoryConversation, ModelTarget, Sent

FLASH = "gemini-3.8-flash"
FABLE = "claude-fable-5-2"
"""Checks what precedes thinking, for every account."""
SPEECH = Reply(thinking="Let me think about it.", text="Here is what I can say.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderHarnesses:
    gemini: ProviderHarness
    anthropic: ProviderHarness

    def of(self, target: ModelTarget) -> ProviderHarness:
        return self.gemini if target.provider.name == "gemini" else self.anthropic

    def targets(self) -> list[ModelTarget]:
        """Both vendors, several families, two accounts and two static texts."""
        other = self.gemini.another("another-account")
        return [
            ModelTarget(provider=self.gemini.provider, model=FLASH),
            ModelTarget(provider=self.gemini.provider, model="gemini-4-argon", order=LayerOrder.APPEND_ONLY),
            ModelTarget(provider=self.gemini.provider, model="gemini-2.5-flash"),
            ModelTarget(provider=other, model=FLASH, order=LayerOrder.APPEND_ONLY),
            ModelTarget(provider=self.anthropic.provider, model=FABLE),
            ModelTarget(provider=self.anthropic.provider, model=FABLE, static_text="You help now and then."),
            ModelTarget(provider=self.anthropic.provider, model="claude-opus-5-5"),
            ModelTarget(provider=self.anthropic.provider, model="claude-sonnet-5", order=LayerOrder.LAYERED),
        ]


@pytest.fixture(scope="module")
async def shared_harnesses() -> AsyncIterator[ProviderHarnesses]:
    async with (
        open_harness(build_gemini_app, GeminiProvider, FLASH) as gemini,
        open_harness(build_anthropic_app, AnthropicProvider, FABLE) as anthropic,
    ):
        yield ProviderHarnesses(gemini=gemini, anthropic=anthropic)


@pytest.fixture
def harnesses(shared_harnesses: ProviderHarnesses) -> ProviderHarnesses:
    shared_harnesses.gemini.reset()
    shared_harnesses.anthropic.reset()
    return shared_harnesses


@pytest.fixture
def gemini(harnesses: ProviderHarnesses) -> ModelTarget:
    return ModelTarget(provider=harnesses.gemini.provider, model=FLASH)


@pytest.fixture
def claude(harnesses: ProviderHarnesses) -> ModelTarget:
    return ModelTarget(provider=harnesses.anthropic.provider, model=FABLE)


async def ask(
    harnesses: ProviderHarnesses,
    conversation: InMemoryConversation,
    target: ModelTarget,
    *replies: Reply,
    dynamic: str | None = None,
) -> Sent:
    """One successful request."""
    harnesses.of(target).queue_replies(*replies)
    sent = await conversation.ask(target, dynamic)
    assert sent.failure is None
    return sent


async def loop(
    harnesses: ProviderHarnesses, conversation: InMemoryConversation, target: ModelTarget, text: str
) -> None:
    """A whole exchange with two steps of tools."""
    conversation.say(text)
    await ask(harnesses, conversation, target, step(1, text="I look."))
    conversation.give_results()
    await ask(harnesses, conversation, target, step(2))
    conversation.give_results()
    await ask(harnesses, conversation, target, SPEECH)


def withheld(sent: Sent) -> dict[str, list[int]]:
    return {
        str(warning["reason"]): warning["seqs"]
        for warning in sent.built.warnings
        if warning["kind"] == "signatures_withheld"
    }


def is_prefix(early: Sequence[bytes], late: Sequence[bytes]) -> bool:
    return list(late[: len(early)]) == list(early)


async def test_gemini_gets_the_four_layers_in_order_of_stability(
    harnesses: ProviderHarnesses, gemini: ModelTarget
) -> None:
    conversation = InMemoryConversation()
    conversation.say("What is the weather?")
    await ask(harnesses, conversation, gemini, step(1), dynamic='{"todos":[1]}')
    conversation.give_results()
    await ask(harnesses, conversation, gemini, SPEECH, dynamic='{"todos":[2]}')
    body = harnesses.gemini.requests()[-1]["body"]
    assert body["systemInstruction"]["parts"][0]["text"] == "You help."
    texts = [[part.get("text") for part in content["parts"]] for content in body["contents"]]
    assert texts[:2] == [['{"todos":[2]}'], ["What is the weather?"]]
    assert [content["role"] for content in body["contents"]] == ["user", "user", "model", "user"]
    assert all("functionResponse" in part for part in body["contents"][-1]["parts"])


async def test_claude_gets_the_dynamic_block_at_the_position_where_it_was_first_sent(
    harnesses: ProviderHarnesses, claude: ModelTarget
) -> None:
    conversation = InMemoryConversation()
    conversation.say("What is the weather?")
    await ask(harnesses, conversation, claude, step(1), dynamic='{"todos":[1],"current_datetime":"12:00"}')
    conversation.give_results()
    await ask(harnesses, conversation, claude, SPEECH, dynamic='{"todos":[1],"current_datetime":"12:01"}')
    conversation.say("And now?")
    await ask(harnesses, conversation, claude, SPEECH, dynamic='{"todos":[],"current_datetime":"12:02"}')
    messages = harnesses.anthropic.requests()[-1]["body"]["messages"]
    texts = [[block["text"] for block in message["content"] if block["type"] == "text"] for message in messages]
    assert texts == [
        ['{"todos":[1],"current_datetime":"12:00"}', "What is the weather?"],
        [],
        [],
        [SPEECH.text],
        ['{"todos":[],"current_datetime":"12:02"}', "And now?"],
    ]
    assert [sent.built.dynamic_sent is None for sent in conversation.sent] == [False, True, False]
    assert all(
        is_prefix(early.messages, late.messages)
        for early, late in zip(conversation.sent, conversation.sent[1:], strict=False)
    )


async def test_claude_reads_earlier_turns_from_the_cache(harnesses: ProviderHarnesses, claude: ModelTarget) -> None:
    conversation = InMemoryConversation()
    conversation.say("Many words. " * 1_000)
    await ask(harnesses, conversation, claude, SPEECH)
    conversation.say("Go on.")
    second = await ask(harnesses, conversation, claude, SPEECH)
    marked = [entry for entry in second.built.manifest if entry.marked]
    places = [("tools", None), ("static", None), ("message", 2), ("message", 3)]
    assert [(entry.kind, entry.seq) for entry in marked] == places
    assert second.stream.answer.usage.cache_read_tokens > 2_000


@pytest.mark.parametrize("first", ["gemini", "claude"])
async def test_switching_there_and_back_sends_the_old_signatures_again(
    harnesses: ProviderHarnesses, gemini: ModelTarget, claude: ModelTarget, first: str
) -> None:
    one, other = (gemini, claude) if first == "gemini" else (claude, gemini)
    conversation = InMemoryConversation()
    await loop(harnesses, conversation, one, "First.")
    await loop(harnesses, conversation, other, "Second.")
    there = conversation.sent[-1]
    await loop(harnesses, conversation, one, "Third.")
    back = conversation.sent[-1]
    natives = {turn.seq: turn.native.data for turn in conversation.turns if turn.kind is TurnKind.MODEL_RESPONSE}
    assert withheld(there) == {"provider": [2, 4, 6]}
    assert not any(natives[seq] in there.request_body for seq in (2, 4, 6))
    assert withheld(back) == {"provider": [8, 10, 12]}
    assert all(natives[seq] in b"".join(back.messages) for seq in (2, 4, 6, 14, 16))
    assert b"City 1" in there.request_body


async def test_another_family_and_another_account_get_no_signatures_and_accept_the_calls(
    harnesses: ProviderHarnesses, gemini: ModelTarget
) -> None:
    conversation = InMemoryConversation()
    await loop(harnesses, conversation, gemini, "First.")
    argon = ModelTarget(provider=gemini.provider, model="gemini-4-argon")
    await loop(harnesses, conversation, argon, "Second.")
    stranger = ModelTarget(provider=harnesses.gemini.another("another-account"), model=FLASH)
    await loop(harnesses, conversation, stranger, "Third.")
    await loop(harnesses, conversation, gemini, "Fourth.")
    reasons = [withheld(sent) for sent in conversation.sent[2::3]]
    assert reasons == [
        {},
        {"family": [2, 4, 6]},
        {"family": [8, 10, 12], "account": [2, 4, 6]},
        {"family": [8, 10, 12], "account": [14, 16, 18]},
    ]


async def test_another_prefix_withholds_thinking_until_the_old_one_is_back(
    harnesses: ProviderHarnesses, claude: ModelTarget
) -> None:
    edited = ModelTarget(provider=claude.provider, model=FABLE, static_text="You help now and then.")
    conversation = InMemoryConversation()
    await loop(harnesses, conversation, claude, "First.")
    await loop(harnesses, conversation, edited, "Second.")
    await loop(harnesses, conversation, claude, "Third.")
    assert [withheld(sent) for sent in conversation.sent[2::3]] == [
        {},
        {"prefix": [2, 4, 6]},
        {"prefix": [8, 10, 12]},
    ]


async def test_abandoned_calls_under_another_prefix_also_withhold_the_thinking_before_them(
    harnesses: ProviderHarnesses, claude: ModelTarget
) -> None:
    edited = ModelTarget(provider=claude.provider, model=FABLE, static_text="You help now and then.")
    conversation = InMemoryConversation()
    conversation.say("First.")
    await ask(harnesses, conversation, edited, SPEECH)
    conversation.say("Second.")
    await ask(harnesses, conversation, claude, step(1))
    conversation.say("Never mind.")
    sent = await ask(harnesses, conversation, edited, SPEECH)
    assert withheld(sent) == {"prefix": [2, 4]}
    await loop(harnesses, conversation, edited, "Third.")
    assert withheld(conversation.sent[-1]) == {"prefix": [2, 4]}


async def test_a_call_without_a_signature_is_marked(harnesses: ProviderHarnesses, gemini: ModelTarget) -> None:
    conversation = InMemoryConversation()
    conversation.say("What is the weather?")
    call = ToolCallBlock(id="call_1", name="get_weather", arguments={"city": "Oslo"})
    native = {"role": "model", "parts": [{"functionCall": {"id": "call_1", "name": call.name, "args": call.arguments}}]}
    turn = conversation.put(
        TurnKind.MODEL_RESPONSE,
        (call,),
        native=Native(dialect="gemini", data=json.dumps(native).encode()),
        provider="gemini",
        model=FLASH,
        account=gemini.provider.account,
    )
    conversation.stop_reasons[turn.seq] = StopReason.TOOL_USE
    conversation.put(TurnKind.TOOL_RESPONSE, (ToolResultBlock(tool_call_id="call_1", output=4),))
    sent = await ask(harnesses, conversation, gemini, SPEECH)
    assert withheld(sent) == {"unsigned": [2]}


@pytest.mark.parametrize("vendor", ["gemini", "claude"])
async def test_an_imported_history_that_breaks_every_rule_is_accepted(
    harnesses: ProviderHarnesses, gemini: ModelTarget, claude: ModelTarget, vendor: str
) -> None:
    target = gemini if vendor == "gemini" else claude
    conversation = InMemoryConversation()
    twice = ToolCallBlock(id="same|id", name="get_weather", arguments={"city": "Oslo"})
    result = ToolResultBlock(tool_call_id="same|id", output=4)
    conversation.put(TurnKind.TOOL_RESPONSE, (result,))
    conversation.put(TurnKind.MODEL_RESPONSE, (TextBlock(text="Hello!"),))
    conversation.put(TurnKind.MODEL_RESPONSE, (twice, twice))
    conversation.put(TurnKind.TOOL_RESPONSE, (result, result, result))
    conversation.put(TurnKind.MODEL_RESPONSE, (twice,), state=TurnState.INTERRUPTED)
    conversation.say("Go on.")
    conversation.say("Please.")
    conversation.put(TurnKind.MODEL_RESPONSE, (twice, twice))
    conversation.say("Never mind.")
    sent = await ask(harnesses, conversation, target, SPEECH)
    assert {repair["kind"] for repair in sent.built.repairs} == {
        "orphan_result_dropped",
        "task_supplied",
        "call_renamed",
        "repeated_result_dropped",
        "result_supplied",
        "call_abandoned",
        "task_joined",
    }
    assert [message.layer for message in sent.built.payload.messages][-1] is Layer.TRIGGER


@pytest.mark.parametrize("vendor", ["gemini", "claude"])
async def test_a_conversation_continues_after_a_failed_or_cancelled_turn(
    harnesses: ProviderHarnesses, gemini: ModelTarget, claude: ModelTarget, vendor: str
) -> None:
    target = gemini if vendor == "gemini" else claude
    harness = harnesses.of(target)
    conversation = InMemoryConversation()
    for after_chunks in range(0, 33, 3):
        # Without a script, so that the emulated model calls the tool, whose call is cut off sooner or later.
        conversation.say(f"What is the weather and the time in Oslo? Try {after_chunks}.")
        harness.inject_fault(FaultKind.CUT, after_chunks=after_chunks)
        assert isinstance((await conversation.ask(target)).failure, ProviderDisconnected)
        conversation.say("Again.")
        harness.queue_replies(SPEECH)
        sent = await conversation.ask(target, stop_after=after_chunks % 7 + 1)
        assert sent.failure is None
    conversation.say("At last.")
    final = await ask(harnesses, conversation, target, SPEECH)
    asked = b"".join(final.messages).decode()
    assert all(f"Try {number}." in asked for number in range(0, 33, 3))
    kinds = {repair["kind"] for repair in final.built.repairs}
    assert kinds == {"answer_left_out", "result_supplied", "task_joined"}


@pytest.mark.parametrize("vendor", ["gemini", "claude"])
async def test_results_whose_answer_failed_are_sent_with_the_next_task(
    harnesses: ProviderHarnesses, gemini: ModelTarget, claude: ModelTarget, vendor: str
) -> None:
    target = gemini if vendor == "gemini" else claude
    conversation = InMemoryConversation()
    conversation.say("What is the weather?")
    await ask(harnesses, conversation, target, step(1))
    conversation.give_results({"celsius": -17})
    harnesses.of(target).inject_fault(FaultKind.OVERLOADED)
    assert isinstance((await conversation.ask(target)).failure, ProviderOverloaded)
    conversation.say("Well?")
    sent = await ask(harnesses, conversation, target, SPEECH)
    assert [repair["kind"] for repair in sent.built.repairs] == ["answer_left_out", "task_joined"]
    assert "-17" in sent.request_body.decode()
    conversation.say("Thanks.")
    later = await ask(harnesses, conversation, target, SPEECH)
    assert is_prefix(sent.messages, later.messages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What may happen after a user task."""

    target: int
    texts: tuple[str, ...]
    replies: tuple[Reply, ...]
    fault: FaultKind | None
    after_chunks: int
    stop_after: int | None
    todos: int


REPLIES = st.builds(
    Reply,
    thinking=st.sampled_from(["", "Let me see."]),
    text=st.sampled_from(["", "Well, then.", " Yes."]),
    tool_calls=st.lists(
        st.builds(ToolCall, name=st.sampled_from(["get_weather", "get_time"]), arguments=st.just({"city": "Oslo"})),
        max_size=2,
    ).map(tuple),
).map(lambda reply: reply if reply.text or reply.tool_calls else SPEECH)
EXCHANGES = st.builds(
    Exchange,
    target=st.integers(0, 7),
    texts=st.lists(st.sampled_from(["What is the weather in Oslo?", "", " \n", "\x00 \ud83d"]), max_size=2).map(tuple),
    replies=st.lists(REPLIES, min_size=1, max_size=3).map(tuple),
    fault=st.none() | st.sampled_from([FaultKind.CUT, FaultKind.OVERLOADED, FaultKind.EMPTY_STREAM]),
    after_chunks=st.integers(0, 6),
    stop_after=st.none() | st.integers(1, 5),
    todos=st.integers(0, 2),
)


async def live_through(
    harnesses: ProviderHarnesses, conversation: InMemoryConversation, target: ModelTarget, exchange: Exchange
) -> None:
    """The user sends a task, the model answers and calls tools, the last step fails or is cancelled."""
    harness = harnesses.of(target)
    conversation.say(*exchange.texts)
    for number, reply in enumerate(exchange.replies, start=1):
        is_last = number == len(exchange.replies)
        harness.reset()
        harness.queue_replies(reply)
        if is_last and exchange.fault is not None:
            harness.inject_fault(exchange.fault, after_chunks=exchange.after_chunks)
        dynamic = json.dumps({"todos": [exchange.todos] * number, "current_datetime": f"12:0{number}"})
        await conversation.ask(target, dynamic, stop_after=exchange.stop_after if is_last else None)
        if is_last or not conversation.pending:
            break
        conversation.give_results()


@settings(max_examples=25)
@given(st.lists(EXCHANGES, min_size=2, max_size=5))
async def test_after_any_history_requests_are_accepted_and_can_be_rebuilt(
    shared_harnesses: ProviderHarnesses, exchanges: list[Exchange]
) -> None:
    targets = shared_harnesses.targets()
    conversation = InMemoryConversation()
    for exchange in exchanges:
        await live_through(shared_harnesses, conversation, targets[exchange.target], exchange)
    for exchange in exchanges[:2]:
        conversation.say("And the end of it?")
        shared_harnesses.of(targets[exchange.target]).reset()
        await conversation.ask(targets[exchange.target])
    for sent in conversation.sent:
        record = sent.stream.record
        assert record.status in {None, 200, 503, 529}, record.body
        payload = rebuild_payload(sent.rebuild, provider=sent.target.provider).payload
        assert payload == sent.built.payload
        rebuilt = await sent.target.provider.encode_request(payload)
        assert hashlib.sha256(rebuilt).digest() == sent.rebuild.call.start.request_hash
        assert sent.built.payload.messages[-1].layer is Layer.TRIGGER
        for warning in sent.built.warnings:
            event(f"{warning['kind']} {warning.get('reason')}")
    for early, late in zip(conversation.sent, conversation.sent[1:], strict=False):
        if late.target == early.target and late.built.order is LayerOrder.APPEND_ONLY:
            assert is_prefix(early.messages, late.messages)
            assert not any(warning["kind"] == "prefix_break" for warning in late.built.warnings)
