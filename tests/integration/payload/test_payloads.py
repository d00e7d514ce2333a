"""Payloads go to strict providers: whatever a conversation has been through, its next request is one that they take."""

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
from tests.contracts.provider_rig import Rig, open_rig, step
from tests.support.fakes.conversation import Sent, Speaker, Talk

FLASH = "gemini-3.8-flash"
FABLE = "claude-fable-5-2"
"""Checks what stands before thinking, for every account."""
SPEECH = Reply(thinking="Let me think about it.", text="Here is what I can say.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rigs:
    gemini: Rig
    anthropic: Rig

    def of(self, speaker: Speaker) -> Rig:
        return self.gemini if speaker.provider.name == "gemini" else self.anthropic

    def speakers(self) -> list[Speaker]:
        """Both vendors, several families, two accounts and two static texts."""
        other = self.gemini.another("another-account")
        return [
            Speaker(provider=self.gemini.provider, model=FLASH),
            Speaker(provider=self.gemini.provider, model="gemini-4-argon", order=LayerOrder.APPEND_ONLY),
            Speaker(provider=self.gemini.provider, model="gemini-2.5-flash"),
            Speaker(provider=other, model=FLASH, order=LayerOrder.APPEND_ONLY),
            Speaker(provider=self.anthropic.provider, model=FABLE),
            Speaker(provider=self.anthropic.provider, model=FABLE, static_text="You help now and then."),
            Speaker(provider=self.anthropic.provider, model="claude-opus-5-5"),
            Speaker(provider=self.anthropic.provider, model="claude-sonnet-5", order=LayerOrder.LAYERED),
        ]


@pytest.fixture(scope="module")
async def shared_rigs() -> AsyncIterator[Rigs]:
    async with (
        open_rig(build_gemini_app, GeminiProvider, FLASH) as gemini,
        open_rig(build_anthropic_app, AnthropicProvider, FABLE) as anthropic,
    ):
        yield Rigs(gemini=gemini, anthropic=anthropic)


@pytest.fixture
def rigs(shared_rigs: Rigs) -> Rigs:
    shared_rigs.gemini.reset()
    shared_rigs.anthropic.reset()
    return shared_rigs


@pytest.fixture
def gemini(rigs: Rigs) -> Speaker:
    return Speaker(provider=rigs.gemini.provider, model=FLASH)


@pytest.fixture
def claude(rigs: Rigs) -> Speaker:
    return Speaker(provider=rigs.anthropic.provider, model=FABLE)


async def ask(rigs: Rigs, talk: Talk, speaker: Speaker, *replies: Reply, dynamic: str | None = None) -> Sent:
    """One request that goes well."""
    rigs.of(speaker).says(*replies)
    sent = await talk.ask(speaker, dynamic)
    assert sent.failure is None
    return sent


async def loop(rigs: Rigs, talk: Talk, speaker: Speaker, text: str) -> None:
    """A whole exchange with two steps of tools."""
    talk.say(text)
    await ask(rigs, talk, speaker, step(1, text="I look."))
    talk.give_results()
    await ask(rigs, talk, speaker, step(2))
    talk.give_results()
    await ask(rigs, talk, speaker, SPEECH)


def withheld(sent: Sent) -> dict[str, list[int]]:
    return {
        str(warning["reason"]): warning["seqs"]
        for warning in sent.built.warnings
        if warning["kind"] == "signatures_withheld"
    }


def is_prefix(early: Sequence[bytes], late: Sequence[bytes]) -> bool:
    return list(late[: len(early)]) == list(early)


async def test_gemini_gets_the_four_layers_in_the_order_of_their_stability(rigs: Rigs, gemini: Speaker) -> None:
    talk = Talk()
    talk.say("What is the weather?")
    await ask(rigs, talk, gemini, step(1), dynamic='{"todos":[1]}')
    talk.give_results()
    await ask(rigs, talk, gemini, SPEECH, dynamic='{"todos":[2]}')
    body = rigs.gemini.requests()[-1]["body"]
    assert body["systemInstruction"]["parts"][0]["text"] == "You help."
    texts = [[part.get("text") for part in content["parts"]] for content in body["contents"]]
    assert texts[:2] == [['{"todos":[2]}'], ["What is the weather?"]]
    assert [content["role"] for content in body["contents"]] == ["user", "user", "model", "user"]
    assert all("functionResponse" in part for part in body["contents"][-1]["parts"])


async def test_claude_gets_the_dynamic_block_where_it_was_first_sent(rigs: Rigs, claude: Speaker) -> None:
    talk = Talk()
    talk.say("What is the weather?")
    await ask(rigs, talk, claude, step(1), dynamic='{"todos":[1],"current_datetime":"12:00"}')
    talk.give_results()
    await ask(rigs, talk, claude, SPEECH, dynamic='{"todos":[1],"current_datetime":"12:01"}')
    talk.say("And now?")
    await ask(rigs, talk, claude, SPEECH, dynamic='{"todos":[],"current_datetime":"12:02"}')
    messages = rigs.anthropic.requests()[-1]["body"]["messages"]
    texts = [[block["text"] for block in message["content"] if block["type"] == "text"] for message in messages]
    assert texts == [
        ['{"todos":[1],"current_datetime":"12:00"}', "What is the weather?"],
        [],
        [],
        [SPEECH.text],
        ['{"todos":[],"current_datetime":"12:02"}', "And now?"],
    ]
    assert [sent.built.dynamic_sent is None for sent in talk.sent] == [False, True, False]
    assert all(is_prefix(early.messages, late.messages) for early, late in zip(talk.sent, talk.sent[1:], strict=False))


async def test_claude_reads_from_the_cache_what_was_said_before(rigs: Rigs, claude: Speaker) -> None:
    talk = Talk()
    talk.say("Many words. " * 1_000)
    await ask(rigs, talk, claude, SPEECH)
    talk.say("Go on.")
    second = await ask(rigs, talk, claude, SPEECH)
    marked = [entry for entry in second.built.manifest if entry.marked]
    places = [("tools", None), ("static", None), ("message", 2), ("message", 3)]
    assert [(entry.kind, entry.seq) for entry in marked] == places
    assert second.stream.answer.usage.cache_read_tokens > 2_000


@pytest.mark.parametrize("first", ["gemini", "claude"])
async def test_switching_there_and_back_sends_the_old_signatures_again(
    rigs: Rigs, gemini: Speaker, claude: Speaker, first: str
) -> None:
    one, other = (gemini, claude) if first == "gemini" else (claude, gemini)
    talk = Talk()
    await loop(rigs, talk, one, "First.")
    await loop(rigs, talk, other, "Second.")
    there = talk.sent[-1]
    await loop(rigs, talk, one, "Third.")
    back = talk.sent[-1]
    natives = {turn.seq: turn.native.data for turn in talk.turns if turn.kind is TurnKind.MODEL_RESPONSE}
    assert withheld(there) == {"provider": [2, 4, 6]}
    assert not any(natives[seq] in there.request_body for seq in (2, 4, 6))
    assert withheld(back) == {"provider": [8, 10, 12]}
    assert all(natives[seq] in b"".join(back.messages) for seq in (2, 4, 6, 14, 16))
    assert b"City 1" in there.request_body


async def test_another_family_and_another_account_get_no_signatures_and_take_the_calls(
    rigs: Rigs, gemini: Speaker
) -> None:
    talk = Talk()
    await loop(rigs, talk, gemini, "First.")
    argon = Speaker(provider=gemini.provider, model="gemini-4-argon")
    await loop(rigs, talk, argon, "Second.")
    stranger = Speaker(provider=rigs.gemini.another("another-account"), model=FLASH)
    await loop(rigs, talk, stranger, "Third.")
    await loop(rigs, talk, gemini, "Fourth.")
    reasons = [withheld(sent) for sent in talk.sent[2::3]]
    assert reasons == [
        {},
        {"family": [2, 4, 6]},
        {"family": [8, 10, 12], "account": [2, 4, 6]},
        {"family": [8, 10, 12], "account": [14, 16, 18]},
    ]


async def test_another_prefix_withholds_thinking_until_the_old_one_is_back(rigs: Rigs, claude: Speaker) -> None:
    edited = Speaker(provider=claude.provider, model=FABLE, static_text="You help now and then.")
    talk = Talk()
    await loop(rigs, talk, claude, "First.")
    await loop(rigs, talk, edited, "Second.")
    await loop(rigs, talk, claude, "Third.")
    assert [withheld(sent) for sent in talk.sent[2::3]] == [
        {},
        {"prefix": [2, 4, 6]},
        {"prefix": [8, 10, 12]},
    ]


async def test_calls_given_up_under_another_prefix_take_the_thinking_before_them_along(
    rigs: Rigs, claude: Speaker
) -> None:
    edited = Speaker(provider=claude.provider, model=FABLE, static_text="You help now and then.")
    talk = Talk()
    talk.say("First.")
    await ask(rigs, talk, edited, SPEECH)
    talk.say("Second.")
    await ask(rigs, talk, claude, step(1))
    talk.say("Never mind.")
    sent = await ask(rigs, talk, edited, SPEECH)
    assert withheld(sent) == {"prefix": [2, 4]}
    await loop(rigs, talk, edited, "Third.")
    assert withheld(talk.sent[-1]) == {"prefix": [2, 4]}


async def test_a_call_that_came_without_a_signature_is_marked(rigs: Rigs, gemini: Speaker) -> None:
    talk = Talk()
    talk.say("What is the weather?")
    call = ToolCallBlock(id="call_1", name="get_weather", arguments={"city": "Oslo"})
    native = {"role": "model", "parts": [{"functionCall": {"id": "call_1", "name": call.name, "args": call.arguments}}]}
    turn = talk.put(
        TurnKind.MODEL_RESPONSE,
        (call,),
        native=Native(dialect="gemini", data=json.dumps(native).encode()),
        provider="gemini",
        model=FLASH,
        account=gemini.provider.account,
    )
    talk.stop_reasons[turn.seq] = StopReason.TOOL_USE
    talk.put(TurnKind.TOOL_RESPONSE, (ToolResultBlock(tool_call_id="call_1", output=4),))
    sent = await ask(rigs, talk, gemini, SPEECH)
    assert withheld(sent) == {"unsigned": [2]}


@pytest.mark.parametrize("vendor", ["gemini", "claude"])
async def test_a_history_from_elsewhere_that_breaks_every_rule_is_taken(
    rigs: Rigs, gemini: Speaker, claude: Speaker, vendor: str
) -> None:
    speaker = gemini if vendor == "gemini" else claude
    talk = Talk()
    twice = ToolCallBlock(id="same|id", name="get_weather", arguments={"city": "Oslo"})
    result = ToolResultBlock(tool_call_id="same|id", output=4)
    talk.put(TurnKind.TOOL_RESPONSE, (result,))
    talk.put(TurnKind.MODEL_RESPONSE, (TextBlock(text="Hello!"),))
    talk.put(TurnKind.MODEL_RESPONSE, (twice, twice))
    talk.put(TurnKind.TOOL_RESPONSE, (result, result, result))
    talk.put(TurnKind.MODEL_RESPONSE, (twice,), state=TurnState.INTERRUPTED)
    talk.say("Go on.")
    talk.say("Please.")
    talk.put(TurnKind.MODEL_RESPONSE, (twice, twice))
    talk.say("Never mind.")
    sent = await ask(rigs, talk, speaker, SPEECH)
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
async def test_a_turn_that_failed_or_was_cancelled_is_gone_on_from(
    rigs: Rigs, gemini: Speaker, claude: Speaker, vendor: str
) -> None:
    speaker = gemini if vendor == "gemini" else claude
    rig = rigs.of(speaker)
    talk = Talk()
    for after_chunks in range(0, 33, 3):
        # Without a script, so that the emulated model calls the tool, which is cut off sooner or later.
        talk.say(f"What is the weather and the time in Oslo? Try {after_chunks}.")
        rig.fails(FaultKind.CUT, after_chunks=after_chunks)
        assert isinstance((await talk.ask(speaker)).failure, ProviderDisconnected)
        talk.say("Again.")
        rig.says(SPEECH)
        sent = await talk.ask(speaker, stop_after=after_chunks % 7 + 1)
        assert sent.failure is None
    talk.say("At last.")
    final = await ask(rigs, talk, speaker, SPEECH)
    asked = b"".join(final.messages).decode()
    assert all(f"Try {number}." in asked for number in range(0, 33, 3))
    kinds = {repair["kind"] for repair in final.built.repairs}
    assert kinds == {"answer_left_out", "result_supplied", "task_joined"}


@pytest.mark.parametrize("vendor", ["gemini", "claude"])
async def test_results_whose_answer_failed_go_out_with_the_next_task(
    rigs: Rigs, gemini: Speaker, claude: Speaker, vendor: str
) -> None:
    speaker = gemini if vendor == "gemini" else claude
    talk = Talk()
    talk.say("What is the weather?")
    await ask(rigs, talk, speaker, step(1))
    talk.give_results({"celsius": -17})
    rigs.of(speaker).fails(FaultKind.OVERLOADED)
    assert isinstance((await talk.ask(speaker)).failure, ProviderOverloaded)
    talk.say("Well?")
    sent = await ask(rigs, talk, speaker, SPEECH)
    assert [repair["kind"] for repair in sent.built.repairs] == ["answer_left_out", "task_joined"]
    assert "-17" in sent.request_body.decode()
    talk.say("Thanks.")
    later = await ask(rigs, talk, speaker, SPEECH)
    assert is_prefix(sent.messages, later.messages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What may happen after somebody has said something."""

    speaker: int
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
    speaker=st.integers(0, 7),
    texts=st.lists(st.sampled_from(["What is the weather in Oslo?", "", " \n", "\x00 \ud83d"]), max_size=2).map(tuple),
    replies=st.lists(REPLIES, min_size=1, max_size=3).map(tuple),
    fault=st.none() | st.sampled_from([FaultKind.CUT, FaultKind.OVERLOADED, FaultKind.EMPTY_STREAM]),
    after_chunks=st.integers(0, 6),
    stop_after=st.none() | st.integers(1, 5),
    todos=st.integers(0, 2),
)


async def live_through(rigs: Rigs, talk: Talk, speaker: Speaker, exchange: Exchange) -> None:
    """The user says something, the model answers and calls tools, the last step fails or is cancelled."""
    rig = rigs.of(speaker)
    talk.say(*exchange.texts)
    for number, reply in enumerate(exchange.replies, start=1):
        is_last = number == len(exchange.replies)
        rig.reset()
        rig.says(reply)
        if is_last and exchange.fault is not None:
            rig.fails(exchange.fault, after_chunks=exchange.after_chunks)
        dynamic = json.dumps({"todos": [exchange.todos] * number, "current_datetime": f"12:0{number}"})
        await talk.ask(speaker, dynamic, stop_after=exchange.stop_after if is_last else None)
        if is_last or not talk.pending:
            break
        talk.give_results()


@settings(max_examples=25)
@given(st.lists(EXCHANGES, min_size=2, max_size=5))
async def test_whatever_a_conversation_has_been_through_its_requests_are_taken_and_can_be_rebuilt(
    shared_rigs: Rigs, exchanges: list[Exchange]
) -> None:
    speakers = shared_rigs.speakers()
    talk = Talk()
    for exchange in exchanges:
        await live_through(shared_rigs, talk, speakers[exchange.speaker], exchange)
    for exchange in exchanges[:2]:
        talk.say("And the end of it?")
        shared_rigs.of(speakers[exchange.speaker]).reset()
        await talk.ask(speakers[exchange.speaker])
    for sent in talk.sent:
        told = sent.stream.record
        assert told.status in {None, 200, 503, 529}, told.body
        payload = rebuild_payload(sent.rebuild, provider=sent.speaker.provider).payload
        assert payload == sent.built.payload
        rebuilt = await sent.speaker.provider.encode_request(payload)
        assert hashlib.sha256(rebuilt).digest() == sent.rebuild.call.start.request_hash
        assert sent.built.payload.messages[-1].layer is Layer.TRIGGER
        for warning in sent.built.warnings:
            event(f"{warning['kind']} {warning.get('reason')}")
    for early, late in zip(talk.sent, talk.sent[1:], strict=False):
        if late.speaker == early.speaker and late.built.order is LayerOrder.APPEND_ONLY:
            assert is_prefix(early.messages, late.messages)
            assert not any(warning["kind"] == "prefix_break" for warning in late.built.warnings)
