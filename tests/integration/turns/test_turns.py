"""A turn from its request to its durable answer, on both providers."""

import asyncio
import hashlib
import json
from typing import Any

import pytest

from server.conversation.block import Blob, ImageBlock, TextBlock, ToolResultBlock
from server.conversation.conversation import ConversationState, OnBusy
from server.conversation.epoch import EpochReason
from server.conversation.errors import (
    ConversationBusy,
    HistoryRuleBroken,
    IdempotencyKeyReused,
    ProviderNotConfigured,
    RevisionMismatch,
    TurnNotFound,
    TurnNotRunning,
)
from server.conversation.event import TextDelta, TurnEnded, TurnStarted
from server.conversation.payload import LayerOrder
from server.conversation.store import ConversationChange
from server.conversation.turn import StopReason, TurnState
from server.emulator.reply import FaultKind, Reply, ToolCall
from server.payload.shared_caches import StaticTextCache
from server.turns.handle import TurnHandle
from tests.conftest import StrataServer
from tests.support.builders import definition
from tests.support.emulators import BOTH, MODELS, EmulatedProviders
from tests.support.turn_service_driver import (
    answer_tools,
    calls_of,
    open_conversation,
    read_all,
    read_events,
    say,
    text_of,
    tool_results,
    user_task,
)

PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c6360606060000000050001a5f64540"
    "0000000049454e44ae426082"
)
CALL = Reply(thinking="Ask.", tool_calls=(ToolCall(name="get_weather", arguments={"city": "Oslo"}),))


@pytest.mark.parametrize("provider", BOTH)
class TestATurn:
    async def test_is_answered_and_stored(
        self, strata_server: StrataServer, emulated: EmulatedProviders, provider: str
    ) -> None:
        program, tenant = strata_server.program, strata_server.tenant
        conversation = await open_conversation(program.store, tenant.id, provider)
        emulated[provider].queue_replies(Reply(thinking="Hm.", text="Once upon a time."))
        ended = await say(program.turn_service, tenant.id, user_task(conversation.id))
        assert ended.turn.state is TurnState.COMPLETE
        assert ended.turn.stop_reason is StopReason.END_TURN
        assert text_of(ended) == "Once upon a time."
        assert ended.turn.usage.output_tokens > 0
        assert ended.turn.cost_usd is not None
        assert ended.turn.cost_usd > 0
        assert await program.store.load_turn(tenant.id, conversation.id, 2) == ended.turn
        stored = await program.store.load_conversation(tenant.id, conversation.id)
        assert (stored.state, stored.revision) == (ConversationState.IDLE, ended.conversation.revision)

    async def test_keeps_every_byte_and_the_hash_of_what_was_sent(
        self, strata_server: StrataServer, emulated: EmulatedProviders, provider: str
    ) -> None:
        program, tenant = strata_server.program, strata_server.tenant
        conversation = await open_conversation(program.store, tenant.id, provider)
        await say(program.turn_service, tenant.id, user_task(conversation.id))
        (call,) = await program.store.list_calls(tenant.id, conversation.id, 2)
        assert call.end is not None
        assert call.end.raw_response
        assert call.end.status == 200
        assert {entry["layer"] for entry in call.start.manifest} == {"static", "dynamic", "trigger"}
        sent = emulated[provider].requests()[-1]["body"]
        assert json.dumps("Tell me a story.") in json.dumps(sent)

    async def test_has_its_events_in_order_and_one_end(
        self, strata_server: StrataServer, emulated: EmulatedProviders, provider: str
    ) -> None:
        program, tenant = strata_server.program, strata_server.tenant
        conversation = await open_conversation(program.store, tenant.id, provider)
        emulated[provider].queue_replies(Reply(text="One two three four five."))
        handle = await program.turn_service.take_turn(tenant.id, user_task(conversation.id))
        events = await read_all(handle)
        assert [number for number, _ in events] == list(range(1, len(events) + 1))
        assert isinstance(events[0][1], TurnStarted)
        assert [index for index, (_, event) in enumerate(events) if isinstance(event, TurnEnded)] == [len(events) - 1]
        streamed = "".join(event.text for _, event in events if isinstance(event, TextDelta))
        assert streamed == "One two three four five."

    async def test_a_tool_loop_continues_until_the_model_is_done(
        self, strata_server: StrataServer, emulated: EmulatedProviders, provider: str
    ) -> None:
        program, tenant = strata_server.program, strata_server.tenant
        conversation = await open_conversation(program.store, tenant.id, provider)
        emulated[provider].queue_replies(CALL, CALL, Reply(text="Cold in Oslo."))
        asked = await say(program.turn_service, tenant.id, user_task(conversation.id, "Weather in Oslo?"))
        assert asked.turn.stop_reason is StopReason.TOOL_USE
        assert asked.conversation.state is ConversationState.AWAITING_TOOLS
        stored = await program.store.load_conversation(tenant.id, conversation.id)
        assert [call.arguments for call in stored.pending_calls] == [{"city": "Oslo"}]
        ended = await answer_tools(program.turn_service, tenant.id, asked)
        assert text_of(ended) == "Cold in Oslo."
        assert ended.turn.seq == 6

    async def test_a_user_task_before_the_results_is_refused_and_stores_nothing(
        self, strata_server: StrataServer, emulated: EmulatedProviders, provider: str
    ) -> None:
        program, tenant = strata_server.program, strata_server.tenant
        conversation = await open_conversation(program.store, tenant.id, provider)
        emulated[provider].queue_replies(CALL)
        asked = await say(program.turn_service, tenant.id, user_task(conversation.id, "Weather?"))
        with pytest.raises(HistoryRuleBroken) as refused:
            await program.turn_service.take_turn(tenant.id, user_task(conversation.id, "Never mind."))
        assert refused.value.details["missing_ids"] == calls_of(asked)
        page = await program.store.list_turns(tenant.id, conversation.id)
        assert [turn.seq for turn in page.items] == [1, 2]

    async def test_an_abandoned_call_has_a_result_for_the_model(
        self, strata_server: StrataServer, emulated: EmulatedProviders, provider: str
    ) -> None:
        program, tenant = strata_server.program, strata_server.tenant
        conversation = await open_conversation(program.store, tenant.id, provider)
        emulated[provider].queue_replies(CALL, Reply(text="Fine."))
        await say(program.turn_service, tenant.id, user_task(conversation.id, "Weather?"))
        ended = await say(
            program.turn_service, tenant.id, user_task(conversation.id, "Never mind.", abandons_calls=True)
        )
        assert text_of(ended) == "Fine."
        (call,) = await program.store.list_calls(tenant.id, conversation.id, ended.turn.seq)
        assert "call_abandoned" in [repair["kind"] for repair in call.start.repairs]

    async def test_an_error_of_a_tool_is_a_result(
        self, strata_server: StrataServer, emulated: EmulatedProviders, provider: str
    ) -> None:
        program, tenant = strata_server.program, strata_server.tenant
        conversation = await open_conversation(program.store, tenant.id, provider)
        emulated[provider].queue_replies(CALL, Reply(text="It broke."))
        asked = await say(program.turn_service, tenant.id, user_task(conversation.id, "Weather?"))
        (call_id,) = calls_of(asked)
        block = ToolResultBlock(tool_call_id=call_id, output="out of service", is_error=True)
        ended = await say(program.turn_service, tenant.id, tool_results(conversation.id, [call_id], blocks=(block,)))
        assert text_of(ended) == "It broke."

    async def test_an_image_reaches_the_provider_and_is_stored_once(
        self, strata_server: StrataServer, emulated: EmulatedProviders, provider: str
    ) -> None:
        program, tenant = strata_server.program, strata_server.tenant
        conversation = await open_conversation(program.store, tenant.id, provider)
        digest = hashlib.sha256(PNG)
        image = ImageBlock(media_type="image/png", sha256=digest.hexdigest(), size_bytes=len(PNG))
        blob = Blob(sha256=digest.digest(), media_type="image/png", data=PNG)
        for _ in range(3):
            ended = await say(
                program.turn_service,
                tenant.id,
                user_task(conversation.id, blocks=(TextBlock(text="What is this?"), image), blobs=(blob,)),
            )
            assert ended.turn.state is TurnState.COMPLETE
        async with program.database.connection() as connection:
            assert await connection.fetchval("SELECT count(*) FROM blobs") == 1
        assert json.dumps(emulated[provider].requests()[-1]["body"]).count("image/png") == 3

    async def test_a_transient_fault_is_retried_and_every_attempt_is_stored(
        self, strata_server: StrataServer, emulated: EmulatedProviders, provider: str
    ) -> None:
        program, tenant = strata_server.program, strata_server.tenant
        conversation = await open_conversation(program.store, tenant.id, provider)
        emulated[provider].inject_fault(FaultKind.RATE_LIMITED, times=2, retry_after_seconds=0.01)
        ended = await say(program.turn_service, tenant.id, user_task(conversation.id))
        assert ended.turn.state is TurnState.COMPLETE
        assert ended.turn.attempt == 3
        calls = await program.store.list_calls(tenant.id, conversation.id, 2)
        ends = [call.end for call in calls if call.end is not None]
        assert [end.status for end in ends] == [429, 429, 200]
        assert [end.error_code for end in ends] == ["provider_rate_limited", "provider_rate_limited", None]
        assert all(end.raw_response for end in ends)

    async def test_a_fault_in_the_middle_fails_the_turn_and_keeps_what_had_arrived(
        self, strata_server: StrataServer, emulated: EmulatedProviders, provider: str
    ) -> None:
        program, tenant = strata_server.program, strata_server.tenant
        conversation = await open_conversation(program.store, tenant.id, provider)
        emulated[provider].inject_fault(FaultKind.CUT, after_chunks=4)
        handle = await program.turn_service.take_turn(tenant.id, user_task(conversation.id))
        events = await read_all(handle)
        ended = await handle.wait()
        assert ended.turn.state is TurnState.FAILED
        assert ended.turn.error_code == "provider_disconnected"
        assert ended.turn.blocks
        assert "".join(event.text for _, event in events if isinstance(event, TextDelta)) == text_of(ended)
        after = await say(program.turn_service, tenant.id, user_task(conversation.id, "Go on."))
        assert after.turn.state is TurnState.COMPLETE

    @pytest.mark.parametrize("kind", [FaultKind.BAD_AUTH, FaultKind.EMPTY_STOP])
    async def test_a_permanent_fault_fails_the_turn_and_the_conversation_continues(
        self, strata_server: StrataServer, emulated: EmulatedProviders, provider: str, kind: FaultKind
    ) -> None:
        program, tenant = strata_server.program, strata_server.tenant
        conversation = await open_conversation(program.store, tenant.id, provider)
        emulated[provider].inject_fault(kind, times=4)
        failed = await say(program.turn_service, tenant.id, user_task(conversation.id, "First."))
        assert failed.turn.state is TurnState.FAILED
        emulated[provider].state.faults.clear()
        after = await say(program.turn_service, tenant.id, user_task(conversation.id, "Second."))
        assert after.turn.state is TurnState.COMPLETE
        sent = json.dumps(emulated[provider].requests()[-1]["body"])
        assert "First." in sent
        assert "Second." in sent

    async def test_a_cancelled_turn_keeps_what_had_arrived_and_the_next_one_works(
        self, strata_server: StrataServer, emulated: EmulatedProviders, provider: str
    ) -> None:
        program, tenant = strata_server.program, strata_server.tenant
        conversation = await open_conversation(program.store, tenant.id, provider)
        emulated[provider].queue_replies(Reply(thinking="Let me think.", text="One two three four five six seven."))
        emulated[provider].inject_fault(FaultKind.SILENCE, after_chunks=5)
        handle = await program.turn_service.take_turn(tenant.id, user_task(conversation.id))
        await read_events(handle, 4)
        cancelled = await (await program.turn_service.cancel_turn(tenant.id, conversation.id)).wait()
        assert cancelled.turn.state is TurnState.CANCELLED
        assert cancelled.turn.stop_reason is StopReason.ABORTED
        assert cancelled.turn.blocks
        with pytest.raises(TurnNotRunning):
            await program.turn_service.cancel_turn(tenant.id, conversation.id)
        after = await say(program.turn_service, tenant.id, user_task(conversation.id, "Go on."))
        assert after.turn.state is TurnState.COMPLETE

    async def test_a_turn_cancelled_before_anything_arrived_does_not_block_the_next(
        self, strata_server: StrataServer, emulated: EmulatedProviders, provider: str
    ) -> None:
        program, tenant = strata_server.program, strata_server.tenant
        conversation = await open_conversation(program.store, tenant.id, provider)
        emulated[provider].inject_fault(FaultKind.SILENCE, after_chunks=0)
        handle = await program.turn_service.take_turn(tenant.id, user_task(conversation.id))
        with pytest.raises(TurnNotRunning):
            await program.turn_service.cancel_turn(tenant.id, conversation.id, handle.seq + 2)
        await program.turn_service.cancel_turn(tenant.id, conversation.id, handle.seq)
        assert (await handle.wait()).turn.state is TurnState.CANCELLED
        # The call may not have been sent at all.
        emulated[provider].state.faults.clear()
        after = await say(program.turn_service, tenant.id, user_task(conversation.id, "Go on."))
        assert after.turn.state is TurnState.COMPLETE

    async def test_the_requesting_task_may_be_cancelled(
        self, strata_server: StrataServer, emulated: EmulatedProviders, provider: str
    ) -> None:
        program, tenant = strata_server.program, strata_server.tenant
        conversation = await open_conversation(program.store, tenant.id, provider)
        asking = asyncio.create_task(program.turn_service.take_turn(tenant.id, user_task(conversation.id)))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        handle = await _eventually_followed(strata_server, conversation.id)
        assert (await handle.wait()).turn.state is TurnState.COMPLETE
        assert len(emulated[provider].requests()) == 1


async def _eventually_followed(server: StrataServer, conversation_id: str) -> TurnHandle:
    for _ in range(200):
        try:
            return await server.program.turn_service.follow_turn(server.tenant.id, conversation_id, 2)
        except TurnNotFound:
            await asyncio.sleep(0.01)
    raise AssertionError


@pytest.mark.parametrize("provider", BOTH)
class TestASecondWriter:
    async def test_is_rejected_while_a_turn_runs(
        self, strata_server: StrataServer, emulated: EmulatedProviders, provider: str
    ) -> None:
        program, tenant = strata_server.program, strata_server.tenant
        conversation = await open_conversation(program.store, tenant.id, provider)
        emulated[provider].inject_fault(FaultKind.SILENCE)
        handle = await program.turn_service.take_turn(tenant.id, user_task(conversation.id))
        with pytest.raises(ConversationBusy) as busy:
            await program.turn_service.take_turn(tenant.id, user_task(conversation.id, "Me too."))
        assert busy.value.details["running_seq"] == handle.seq
        await program.turn_service.cancel_turn(tenant.id, conversation.id)
        await handle.wait()

    async def test_supersedes_the_running_turn(
        self, strata_server: StrataServer, emulated: EmulatedProviders, provider: str
    ) -> None:
        program, tenant = strata_server.program, strata_server.tenant
        conversation = await open_conversation(program.store, tenant.id, provider)
        emulated[provider].inject_fault(FaultKind.SILENCE, after_chunks=3)
        first = await program.turn_service.take_turn(tenant.id, user_task(conversation.id))
        await read_events(first, 2)
        second = await program.turn_service.take_turn(
            tenant.id, user_task(conversation.id, "This instead.", on_busy=OnBusy.SUPERSEDE)
        )
        assert (await first.wait()).turn.state is TurnState.CANCELLED
        assert (await second.wait()).turn.state is TurnState.COMPLETE
        assert second.seq == first.seq + 2

    async def test_a_stale_client_is_refused(self, strata_server: StrataServer, provider: str) -> None:
        program, tenant = strata_server.program, strata_server.tenant
        conversation = await open_conversation(program.store, tenant.id, provider)
        ended = await say(program.turn_service, tenant.id, user_task(conversation.id))
        with pytest.raises(RevisionMismatch):
            await program.turn_service.take_turn(tenant.id, user_task(conversation.id, "Stale.", expected_revision=0))
        fresh = user_task(conversation.id, "Fresh.", expected_revision=ended.conversation.revision)
        assert (await say(program.turn_service, tenant.id, fresh)).turn.state is TurnState.COMPLETE


@pytest.mark.parametrize("provider", BOTH)
class TestADuplicate:
    async def test_of_a_finished_turn_gives_the_same_turn_without_a_call(
        self, strata_server: StrataServer, emulated: EmulatedProviders, provider: str
    ) -> None:
        program, tenant = strata_server.program, strata_server.tenant
        conversation = await open_conversation(program.store, tenant.id, provider)
        request = user_task(conversation.id, idempotency_key="k")
        first = await program.turn_service.take_turn(tenant.id, request)
        events = await read_all(first)
        again = await program.turn_service.take_turn(tenant.id, request)
        assert again.duplicate
        assert await read_all(again) == events
        assert len(emulated[provider].requests()) == 1
        with pytest.raises(IdempotencyKeyReused):
            await program.turn_service.take_turn(tenant.id, user_task(conversation.id, "Other.", idempotency_key="k"))

    async def test_of_a_running_turn_gets_its_events(
        self, strata_server: StrataServer, emulated: EmulatedProviders, provider: str
    ) -> None:
        program, tenant = strata_server.program, strata_server.tenant
        conversation = await open_conversation(program.store, tenant.id, provider)
        emulated[provider].queue_replies(Reply(text="One two three four five six seven."))
        emulated[provider].inject_fault(FaultKind.SILENCE, after_chunks=4)
        request = user_task(conversation.id, idempotency_key="k")
        first = await program.turn_service.take_turn(tenant.id, request)
        again = await program.turn_service.take_turn(tenant.id, request)
        assert again.duplicate
        listening = asyncio.gather(read_all(first), read_all(again))
        await program.turn_service.cancel_turn(tenant.id, conversation.id)
        one, two = await listening
        assert one == two

    async def test_without_a_key_is_recognised_if_it_is_declared(
        self, strata_server: StrataServer, emulated: EmulatedProviders, provider: str
    ) -> None:
        program, tenant = strata_server.program, strata_server.tenant
        conversation = await open_conversation(program.store, tenant.id, provider)
        first = await say(program.turn_service, tenant.id, user_task(conversation.id))
        again = await say(program.turn_service, tenant.id, user_task(conversation.id, announces_retry=True))
        assert again == first
        assert len(emulated[provider].requests()) == 1


class TestLayers:
    async def test_gemini_gets_the_dynamic_layer_first_and_claude_in_the_newest_message(
        self, strata_server: StrataServer, emulated: EmulatedProviders
    ) -> None:
        program, tenant = strata_server.program, strata_server.tenant
        for provider in BOTH:
            conversation = await open_conversation(program.store, tenant.id, provider)
            change = ConversationChange(context={"todos": ["water the plants"]})
            await program.store.change_conversation(tenant.id, conversation.id, change)
            for text in ("First.", "Second."):
                await say(program.turn_service, tenant.id, user_task(conversation.id, text))
        gemini = emulated.gemini.requests()[-1]["body"]["contents"]
        assert "water the plants" in gemini[0]["parts"][0]["text"]
        assert sum("water the plants" in json.dumps(content) for content in gemini) == 1
        assert list(json.loads(gemini[-1]["parts"][0]["text"])) == ["current_datetime"]
        assert gemini[-1]["parts"][1:] == [{"text": "Second."}]
        claude = emulated.anthropic.requests()[-1]["body"]["messages"]
        tasks = [message["content"] for message in claude if message["role"] == "user"]
        assert ["water the plants" in json.dumps(content[0]) for content in tasks] == [True, True]
        assert [content[-1]["text"] for content in tasks] == ["First.", "Second."]

    async def test_claude_gets_a_changed_context_within_a_tool_loop_and_nothing_else(
        self, strata_server: StrataServer, emulated: EmulatedProviders
    ) -> None:
        program, tenant = strata_server.program, strata_server.tenant
        conversation = await open_conversation(program.store, tenant.id, "anthropic")
        emulated.anthropic.queue_replies(CALL, CALL, Reply(text="Done."))
        asked = await say(program.turn_service, tenant.id, user_task(conversation.id, "Weather?"))
        asked = await say(program.turn_service, tenant.id, tool_results(conversation.id, calls_of(asked)))
        change = ConversationChange(context={"todos": ["new"]})
        await program.store.change_conversation(tenant.id, conversation.id, change)
        await say(program.turn_service, tenant.id, tool_results(conversation.id, calls_of(asked)))
        results = [
            message["content"]
            for message in emulated.anthropic.requests()[-1]["body"]["messages"]
            if message["content"][0]["type"] == "tool_result"
        ]
        assert [len(content) for content in results] == [1, 2]

    async def test_an_edited_assistant_begins_an_epoch_with_the_next_user_task(
        self, strata_server: StrataServer, emulated: EmulatedProviders
    ) -> None:
        program, tenant = strata_server.program, strata_server.tenant
        conversation = await open_conversation(program.store, tenant.id, "anthropic")
        emulated.anthropic.queue_replies(CALL, Reply(text="Done."), Reply(text="Arr."))
        asked = await say(program.turn_service, tenant.id, user_task(conversation.id, "Weather?"))
        pirate = definition(
            provider="anthropic",
            model=MODELS["anthropic"],
            instructions=definition().instructions.__class__(roles="You are a pirate."),
            settings={},
        )
        revised = await program.store.revise_assistant(tenant.id, conversation.assistant_id, pirate)
        change = ConversationChange(assistant_version=revised.version)
        await program.store.change_conversation(tenant.id, conversation.id, change)
        await answer_tools(program.turn_service, tenant.id, asked)
        assert "pirate" not in json.dumps(emulated.anthropic.requests()[-1]["body"]["system"])
        ended = await say(program.turn_service, tenant.id, user_task(conversation.id, "And now?"))
        assert ended.turn.state is TurnState.COMPLETE
        assert "pirate" in json.dumps(emulated.anthropic.requests()[-1]["body"]["system"])
        async with program.database.connection() as connection:
            reasons = await connection.fetch("SELECT reason FROM epochs ORDER BY number")
        assert [row["reason"] for row in reasons] == [EpochReason.STARTED, EpochReason.ASSISTANT_CHANGED]

    async def test_the_static_text_is_identical_within_an_epoch(
        self, strata_server: StrataServer, emulated: EmulatedProviders
    ) -> None:
        program, tenant = strata_server.program, strata_server.tenant
        for provider in BOTH:
            conversation = await open_conversation(program.store, tenant.id, provider)
            for text in ("One.", "Two.", "Three."):
                await say(program.turn_service, tenant.id, user_task(conversation.id, text))
            calls = [(await program.store.list_calls(tenant.id, conversation.id, seq))[0].start for seq in (2, 4, 6)]
            statics = {tuple(entry["hash"] for entry in call.manifest if entry["layer"] == "static") for call in calls}
            assert len(statics) == 1
            assert {call.epoch for call in calls} == {1}
            assert not any(warning for call in calls for warning in call.warnings)
            expected = LayerOrder.LAYERED if provider == "gemini" else LayerOrder.APPEND_ONLY
            assert {call.layer_order for call in calls} == {expected}


class TestWithoutTheProvider:
    async def test_the_turn_fails_with_a_clear_code(self, strata_server: StrataServer) -> None:
        program, tenant = strata_server.program, strata_server.tenant
        conversation = await open_conversation(program.store, tenant.id, "gemini")
        async with program.database.connection() as connection:
            await connection.execute("UPDATE assistants SET provider = 'nobody'")
        ended = await say(program.turn_service, tenant.id, user_task(conversation.id))
        assert ended.turn.state is TurnState.FAILED
        assert ended.turn.error_code == ProviderNotConfigured.code
        assert ended.turn.attempt is None


async def test_a_static_text_that_was_evicted_while_loading_is_loaded_again(
    strata_server: StrataServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, tenant = strata_server.program, strata_server.tenant
    conversation = await open_conversation(program.store, tenant.id, "gemini")
    await say(program.turn_service, tenant.id, user_task(conversation.id, "One."))
    load = program.store.load_payload_source

    async def load_and_forget(*arguments: Any, **options: Any) -> Any:
        source = await load(*arguments, **options)
        monkeypatch.setattr(StaticTextCache, "find", lambda _texts, _hash: None)
        return source

    monkeypatch.setattr(program.store, "load_payload_source", load_and_forget)
    ended = await say(program.turn_service, tenant.id, user_task(conversation.id, "Two."))
    assert ended.turn.state is TurnState.COMPLETE
    async with program.database.connection() as connection:
        assert await connection.fetchval("SELECT count(*) FROM epochs") == 1
