"""The contract of the provider port: every implementation of `providers.provider.Provider` passes it, on its
emulator.
"""

import asyncio
import json
from collections.abc import Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, ClassVar

import pytest

from server.conversation.assistant import Tool
from server.conversation.block import TextBlock, ThinkingBlock, ToolCallBlock, ToolResultBlock
from server.conversation.errors import ProviderDisconnected, ProviderFailed
from server.conversation.event import ProviderEvent, TextDelta, ToolCallBegin, ToolCallEnd, UsageReported
from server.conversation.payload import CallSettings
from server.conversation.turn import StopReason
from server.emulator.reply import FaultKind, Reply
from server.emulator.server import emulating
from server.providers.provider import ProviderAnswer, ProviderStream, StreamState
from tests.contracts.provider_harness import (
    WAIT_SECONDS,
    ProviderHarness,
    answer_calls,
    complete,
    consume,
    native_of,
    step,
)
from tests.recordings.catalogue import NUMBERS, Recorded, load
from tests.recordings.replay import Replay

STEPS = 10
ENDED = (StreamState.COMPLETE, StreamState.FAILED, StreamState.CANCELLED)
DYNAMIC = '{"todos":["buy milk"]}'
HOLE_LIKE = "@strata:messages:0123456789abcdef"
SPEECH = Reply(thinking="Let me think about it.", text="Here is what I can say about all of it.")


async def begin(stream: ProviderStream) -> asyncio.Task[Any]:
    """Consume the stream in the background."""
    return asyncio.create_task(consume(stream))


async def collect(stream: ProviderStream, batches: list[Sequence[ProviderEvent]]) -> None:
    async for batch in stream.event_batches():
        batches.append(batch)  # noqa: PERF401  reason: keeps what came before a failure


async def bring_to(harness: ProviderHarness, state: StreamState) -> tuple[ProviderStream, asyncio.Event | None, Any]:
    """A stream in the state, what its peer sets when it is done, and whatever has to be kept alive for it."""
    silent = {StreamState.WAITING: 0, StreamState.STREAMING: 3, StreamState.CANCELLED: 3}
    harness.queue_replies(SPEECH)
    if state in silent:
        harness.inject_fault(FaultKind.SILENCE, after_chunks=silent[state])
    elif state is StreamState.FAILED:
        harness.inject_fault(FaultKind.CUT, after_chunks=3)
    stream = harness.provider.open_stream(harness.ask("Tell me."))
    if state is StreamState.NEW:
        return stream, None, None
    if state in {StreamState.COMPLETE, StreamState.FAILED}:
        try:
            await consume(stream)
        except ProviderFailed:
            assert state is StreamState.FAILED
        return stream, await harness.watch.next_visit(), None
    if state is StreamState.WAITING:
        listening = await begin(stream)
        return stream, await harness.watch.next_visit(), listening
    events = stream.events()
    await anext(events)
    visit = await harness.watch.next_visit()
    if state is StreamState.CANCELLED:
        await stream.cancel()
    return stream, visit, events


async def is_over(visit: asyncio.Event) -> None:
    await asyncio.wait_for(visit.wait(), WAIT_SECONDS)


class StreamContract:
    async def test_nothing_is_sent_before_the_stream_is_consumed(self, harness: ProviderHarness) -> None:
        stream = harness.provider.open_stream(harness.ask())
        assert stream.state is StreamState.NEW
        assert stream.answer == ProviderAnswer()
        assert (stream.record.body, stream.record.status, stream.record.ended_at) == (b"", None, None)
        assert harness.requests() == []

    async def test_a_waiting_stream_has_no_answer_yet(self, harness: ProviderHarness) -> None:
        stream, _, _ = await bring_to(harness, StreamState.WAITING)
        assert stream.state is StreamState.WAITING
        assert stream.answer == ProviderAnswer()
        assert (stream.record.body, stream.record.status, stream.record.first_byte_at) == (b"", None, None)
        await stream.cancel()

    async def test_a_running_stream_has_what_has_arrived(self, harness: ProviderHarness) -> None:
        stream, _, _ = await bring_to(harness, StreamState.STREAMING)
        assert stream.state is StreamState.STREAMING
        assert stream.record.status == 200
        assert stream.record.first_byte_at is not None
        assert stream.record.ended_at is None
        assert stream.answer.stop_reason is None
        assert stream.answer == harness.provider.fold_body(stream.record.body)
        await stream.cancel()

    async def test_a_complete_stream_has_the_whole_answer(self, harness: ProviderHarness) -> None:
        harness.queue_replies(SPEECH)
        stream = harness.provider.open_stream(harness.ask("Tell me."))
        events = await consume(stream)
        answer, record = stream.answer, stream.record
        assert stream.state is StreamState.COMPLETE
        assert answer.stop_reason is StopReason.END_TURN
        assert "".join(event.text for event in events if isinstance(event, TextDelta)) == SPEECH.text
        assert "".join(block.text for block in answer.blocks if isinstance(block, TextBlock)) == SPEECH.text
        assert answer.native is not None
        assert answer.native.dialect == harness.provider.name
        assert answer.response_id
        assert [event for event in events if isinstance(event, UsageReported)][-1].usage == answer.usage
        assert answer.usage.input_tokens > 0
        assert answer.usage.output_tokens > 0
        assert answer.usage.reasoning_tokens > 0
        assert record.first_byte_at is not None
        assert record.ended_at is not None
        assert record.started_at <= record.first_byte_at <= record.ended_at
        assert harness.provider.fold_body(record.body) == answer

    async def test_the_record_has_the_request_as_sent(self, harness: ProviderHarness) -> None:
        stream = harness.provider.open_stream(harness.ask())
        await consume(stream)
        (request,) = harness.requests()
        assert json.loads(stream.record.request_body) == request["body"]

    async def test_a_call_starts_when_it_is_sent_and_not_when_it_is_opened(self, harness: ProviderHarness) -> None:
        stream = harness.provider.open_stream(harness.ask())
        between = datetime.now(UTC)
        await consume(stream)
        assert stream.record.started_at >= between

    async def test_events_can_be_consumed_once(self, harness: ProviderHarness) -> None:
        stream = harness.provider.open_stream(harness.ask())
        assert await consume(stream)
        assert await consume(stream) == []
        assert len(harness.requests()) == 1

    async def test_batches_are_the_same_events(self, harness: ProviderHarness) -> None:
        harness.queue_replies(SPEECH)
        stream = harness.provider.open_stream(harness.ask("Tell me."))
        batches = [batch async for batch in stream.event_batches()]
        assert stream.state is StreamState.COMPLETE
        assert all(batches)
        assert [event for batch in batches for event in batch] == list(
            harness.provider.open_fold().feed(stream.record.body)
        )
        assert [batch async for batch in stream.event_batches()] == []
        assert await consume(stream) == []
        assert len(harness.requests()) == 1

    async def test_a_failure_follows_the_batches_before_it(self, harness: ProviderHarness) -> None:
        harness.queue_replies(SPEECH)
        harness.inject_fault(FaultKind.CUT, after_chunks=4)
        stream = harness.provider.open_stream(harness.ask("Tell me."))
        batches: list[Sequence[ProviderEvent]] = []
        with pytest.raises(ProviderDisconnected):
            await collect(stream, batches)
        assert batches
        assert stream.state is StreamState.FAILED
        assert stream.answer == harness.provider.fold_body(stream.record.body)

    async def test_calls_are_announced_and_ended_in_order(self, harness: ProviderHarness) -> None:
        harness.queue_replies(step(1))
        stream = harness.provider.open_stream(harness.ask())
        events = await consume(stream)
        begun = [event.call_id for event in events if isinstance(event, ToolCallBegin)]
        ended = [event for event in events if isinstance(event, ToolCallEnd)]
        calls = [block for block in stream.answer.blocks if isinstance(block, ToolCallBlock)]
        assert begun == [event.call_id for event in ended] == [call.id for call in calls]
        assert [(event.name, event.arguments) for event in ended] == [(call.name, call.arguments) for call in calls]
        assert [call.name for call in calls] == ["get_weather", "get_time"]
        assert stream.answer.stop_reason is StopReason.TOOL_USE

    async def test_many_streams_at_once_do_not_mix(self, harness: ProviderHarness) -> None:
        streams = [harness.provider.open_stream(harness.ask(f"Say something about number {n}.")) for n in range(20)]
        await asyncio.gather(*(consume(stream) for stream in streams))
        assert len(harness.requests()) == 20
        for number, stream in enumerate(streams):
            assert f"number {number}." in stream.record.request_body.decode()
            assert f"number {number}" in "".join(b.text for b in stream.answer.blocks if isinstance(b, TextBlock))


class CancelContract:
    @pytest.mark.parametrize("state", StreamState)
    async def test_cancel_ends_the_call_in_every_state(self, harness: ProviderHarness, state: StreamState) -> None:
        stream, visit, kept = await bring_to(harness, state)
        before = stream.answer
        assert stream.state is state
        await stream.cancel()
        assert stream.state is (state if state in ENDED else StreamState.CANCELLED)
        assert stream.record.ended_at is not None
        if visit is not None:
            await is_over(visit)
        await stream.cancel()
        assert stream.answer == before == harness.provider.fold_body(stream.record.body)
        assert len(harness.requests()) == (0 if state is StreamState.NEW else 1)
        assert await consume(stream) == []
        if isinstance(kept, asyncio.Task):
            assert await kept == []
        elif kept is not None:
            assert [event async for event in kept] == []

    async def test_cancel_of_a_waiting_call_returns_when_the_call_is_over(self, harness: ProviderHarness) -> None:
        stream, _, listening = await bring_to(harness, StreamState.WAITING)
        others = asyncio.all_tasks()
        await stream.cancel()
        left = asyncio.all_tasks() & others - {asyncio.current_task(), listening}
        assert not [task for task in left if "send" in str(task.get_coro())]

    async def test_cancel_from_within_the_loop_ends_it(self, harness: ProviderHarness) -> None:
        harness.queue_replies(SPEECH)
        stream = harness.provider.open_stream(harness.ask("Tell me."))
        received = []
        async for event in stream.events():
            received.append(event)
            await stream.cancel()
        assert len(received) == 1
        assert stream.state is StreamState.CANCELLED
        assert stream.answer == harness.provider.fold_body(stream.record.body)

    async def test_cancel_between_two_batches_is_the_end(self, harness: ProviderHarness) -> None:
        harness.queue_replies(SPEECH)
        harness.inject_fault(FaultKind.SILENCE, after_chunks=4)
        stream = harness.provider.open_stream(harness.ask("Tell me."))
        batches = []
        async for batch in stream.event_batches():
            batches.append(batch)
            await stream.cancel()
        assert len(batches) == 1
        assert stream.state is StreamState.CANCELLED
        await is_over(await harness.watch.next_visit())

    async def test_two_cancels_at_once_are_one(self, harness: ProviderHarness) -> None:
        stream, visit, listening = await bring_to(harness, StreamState.WAITING)
        await asyncio.gather(stream.cancel(), stream.cancel(), stream.cancel())
        assert visit is not None
        await is_over(visit)
        assert await listening == []

    @pytest.mark.parametrize("after_chunks", [0, 3])
    async def test_a_cancelled_listener_closes_the_connection(
        self, harness: ProviderHarness, after_chunks: int
    ) -> None:
        harness.queue_replies(SPEECH)
        harness.inject_fault(FaultKind.SILENCE, after_chunks=after_chunks)
        stream = harness.provider.open_stream(harness.ask("Tell me."))
        listening = await begin(stream)
        visit = await harness.watch.next_visit()
        listening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await listening
        await is_over(visit)
        assert stream.state is StreamState.CANCELLED
        assert stream.record.ended_at is not None
        assert stream.answer == harness.provider.fold_body(stream.record.body)

    async def test_a_listener_that_is_cancelled_together_with_its_stream_is_cancelled(
        self, harness: ProviderHarness
    ) -> None:
        stream, visit, listening = await bring_to(harness, StreamState.WAITING)
        listening.cancel()
        await stream.cancel()
        with pytest.raises(asyncio.CancelledError):
            await listening
        assert visit is not None
        await is_over(visit)

    async def test_a_timeout_of_a_listener_stays_its_own(self, harness: ProviderHarness) -> None:
        harness.inject_fault(FaultKind.SILENCE)
        stream = harness.provider.open_stream(harness.ask())
        visits: list[asyncio.Event] = []

        async def consume_until_the_request_has_arrived() -> None:
            async with asyncio.timeout(None) as limit, asyncio.TaskGroup() as group:
                listening = group.create_task(consume(stream))
                visits.append(await harness.watch.next_visit())
                limit.reschedule(asyncio.get_running_loop().time())
                await listening

        with pytest.raises(TimeoutError):
            await consume_until_the_request_has_arrived()
        assert stream.state is StreamState.CANCELLED
        await is_over(*visits)

    async def test_an_abandoned_loop_closes_the_connection(self, harness: ProviderHarness) -> None:
        harness.queue_replies(SPEECH)
        harness.inject_fault(FaultKind.SILENCE, after_chunks=4)
        stream = harness.provider.open_stream(harness.ask("Tell me."))
        async with aclosing(stream.events()) as events:
            await anext(events)
        await is_over(await harness.watch.next_visit())
        assert stream.state is StreamState.CANCELLED
        assert stream.answer == harness.provider.fold_body(stream.record.body)

    async def test_after_a_cancel_the_next_call_succeeds(self, harness: ProviderHarness) -> None:
        stream, _, _ = await bring_to(harness, StreamState.STREAMING)
        await stream.cancel()
        assert (await complete(harness.provider, harness.ask())).stop_reason is not None


class LoopContract:
    refused_without: ClassVar[type[ProviderFailed]]
    refused_swapped: ClassVar[type[ProviderFailed]]
    refused_merged: ClassVar[type[ProviderFailed]]

    @staticmethod
    def drop_signature(message: dict[str, Any]) -> None:
        raise NotImplementedError

    @staticmethod
    def swap_signatures(one: dict[str, Any], other: dict[str, Any]) -> None:
        raise NotImplementedError

    @staticmethod
    def merge_texts(message: dict[str, Any]) -> None:
        raise NotImplementedError

    async def run_loop(self, harness: ProviderHarness, steps: int) -> list[bytes]:
        """A user task and a number of steps with their results, each checked by the emulator in the next request."""
        messages = [harness.provider.user_message([TextBlock(text="Go"), TextBlock(text="on.")], {})]
        for number in range(steps):
            harness.queue_replies(step(number, text="I look." if number % 2 else ""))
            answer = await complete(harness.provider, harness.payload(messages))
            assert answer.stop_reason is StopReason.TOOL_USE
            messages += [native_of(answer), answer_calls(harness.provider, answer)]
        return messages

    async def test_ten_steps_with_calls_in_parallel_keep_every_signature(self, harness: ProviderHarness) -> None:
        messages = await self.run_loop(harness, STEPS)
        harness.queue_replies(SPEECH)
        answer = await complete(harness.provider, harness.payload(messages))
        assert answer.stop_reason is StopReason.END_TURN
        again = [*messages, native_of(answer), harness.provider.user_message([TextBlock(text="Thanks.")], {})]
        assert (await complete(harness.provider, harness.payload(again))).blocks
        assert len(harness.requests()) == STEPS + 2
        assert {request["status"] for request in harness.requests()} == {200}

    async def expect(self, harness: ProviderHarness, messages: list[bytes], error: type[ProviderFailed]) -> None:
        stream = harness.provider.open_stream(harness.payload(messages))
        with pytest.raises(error) as caught:
            await consume(stream)
        assert type(caught.value) is error
        assert stream.state is StreamState.FAILED
        assert stream.record.status == 400
        assert str(caught.value.details["provider_message"]) in json.loads(stream.record.body)["error"]["message"]

    async def test_a_dropped_signature_is_refused(self, harness: ProviderHarness) -> None:
        messages = await self.run_loop(harness, 2)
        await self.expect(harness, tampered(messages, [3], self.drop_signature), self.refused_without)

    async def test_swapped_signatures_are_refused(self, harness: ProviderHarness) -> None:
        messages = await self.run_loop(harness, 2)
        await self.expect(harness, tampered(messages, [1, 3], self.swap_signatures), self.refused_swapped)

    async def test_merged_parts_are_refused(self, harness: ProviderHarness) -> None:
        messages = await self.run_loop(harness, 1)
        harness.queue_replies(SPEECH)
        answer = await complete(harness.provider, harness.payload(messages))
        messages += [native_of(answer), harness.provider.user_message([TextBlock(text="Thanks.")], {})]
        stream = harness.provider.open_stream(harness.payload(messages))
        await consume(stream)
        place = 0 if harness.provider.name == "anthropic" else 3
        await self.expect(harness, tampered(messages, [place], self.merge_texts), self.refused_merged)


def tampered(messages: list[bytes], places: list[int], change: Any) -> list[bytes]:
    documents = [json.loads(messages[place]) for place in places]
    change(*documents)
    changed = dict(zip(places, documents, strict=True))
    return [json.dumps(changed[at]).encode() if at in changed else data for at, data in enumerate(messages)]


class PartialContract:
    @staticmethod
    def unsigned_thinking(message: dict[str, Any]) -> list[Any]:
        raise NotImplementedError

    @pytest.mark.parametrize("after_chunks", range(12))
    async def test_a_partial_answer_is_accepted_by_the_provider(
        self, harness: ProviderHarness, after_chunks: int
    ) -> None:
        harness.queue_replies(Reply(thinking="One two three.", text="Four five.", tool_calls=step(1).tool_calls))
        harness.inject_fault(FaultKind.CUT, after_chunks=after_chunks)
        stream = harness.provider.open_stream(harness.ask())
        with pytest.raises(ProviderDisconnected):
            await consume(stream)
        answer = stream.answer
        assert harness.provider.fold_body(stream.record.body) == answer
        assert answer.stop_reason is None
        if answer.native is None:
            assert not any(isinstance(block, ToolCallBlock) for block in answer.blocks)
            return
        assert self.unsigned_thinking(json.loads(answer.native.data)) == []
        messages = [harness.ask().messages[0].data, answer.native.data]
        called = any(isinstance(block, ToolCallBlock) for block in answer.blocks)
        goes_on = harness.provider.user_message([TextBlock(text="Go on.")], {})
        messages.append(answer_calls(harness.provider, answer) if called else goes_on)
        assert (await complete(harness.provider, harness.payload(messages))).stop_reason is not None

    async def test_thinking_that_was_cut_is_shown_and_not_sent_back(self, harness: ProviderHarness) -> None:
        harness.queue_replies(SPEECH)
        harness.inject_fault(FaultKind.CUT, after_chunks=2)
        stream = harness.provider.open_stream(harness.ask("Tell me."))
        with pytest.raises(ProviderDisconnected):
            await consume(stream)
        (thinking,) = stream.answer.blocks
        assert isinstance(thinking, ThinkingBlock)
        assert thinking.text
        assert thinking.signature is None
        assert stream.answer.native is None


class UnknownContract:
    async def test_undocumented_content_is_sent_back_unchanged(self, harness: ProviderHarness) -> None:
        harness.inject_fault(FaultKind.UNKNOWN_PARTS)
        first = harness.ask("Tell me.")
        answer = await complete(harness.provider, first)
        novelties = ("futureContent", "futureHint") if harness.provider.name == "gemini" else ("emulated_n",)
        assert all(novelty in native_of(answer).decode() for novelty in novelties)
        more = harness.provider.user_message([TextBlock(text="Go on.")], {})
        stream = harness.provider.open_stream(harness.payload([first.messages[0].data, native_of(answer), more]))
        await consume(stream)
        assert native_of(answer) in stream.record.request_body
        assert json.loads(native_of(answer)) in _messages(harness.requests()[-1]["body"])

    async def test_a_stored_message_is_sent_byte_for_byte(self, harness: ProviderHarness) -> None:
        answer = await complete(harness.provider, harness.ask("Tell me."))
        message = b" " + native_of(answer).replace(b'":', b'" : ', 1) + b"\n"
        more = harness.provider.user_message([TextBlock(text=f'{HOLE_LIKE} "@strata:contents"')], {})
        stream = harness.provider.open_stream(
            harness.payload([harness.ask("Tell me.").messages[0].data, message, more])
        )
        await consume(stream)
        assert message + b"," + more in stream.record.request_body
        assert HOLE_LIKE in json.dumps(harness.requests()[-1]["body"])

    async def test_numbers_come_back_as_they_were_written(self, harness: ProviderHarness) -> None:
        body = load(harness.provider.name, "numbers")
        async with emulating(Replay(pieces=[body])) as url:
            provider = harness.build("key", base_url=url)
            answer = await complete(provider, harness.ask())
            stream = provider.open_stream(
                harness.payload([harness.ask().messages[0].data, native_of(answer), answer_calls(provider, answer)])
            )
            await consume(stream)
            await provider.close()
        assert NUMBERS in stream.record.request_body


class RequestContract:
    @staticmethod
    def texts_of(message: dict[str, Any]) -> list[str]:
        """The texts among the blocks of a message, in order."""
        raise NotImplementedError

    async def test_the_encoded_request_is_the_one_that_is_sent(self, harness: ProviderHarness) -> None:
        messages = [harness.ask('A "quoted" Ü\n').messages[0].data, harness.provider.dynamic_message('{"todos":[1.0]}')]
        payload = harness.payload(messages, breakpoints=(0, 1), settings=CallSettings(max_output_tokens=900))
        encoded = await harness.provider.encode_request(payload)
        assert harness.requests() == []
        stream = harness.provider.open_stream(payload)
        await consume(stream)
        assert encoded == stream.record.request_body
        assert encoded == await harness.provider.encode_request(payload)
        assert len(harness.requests()) == 1

    async def test_a_request_is_encoded_while_others_are_running(self, harness: ProviderHarness) -> None:
        payloads = [harness.ask(f"Say something about number {n}.") for n in range(8)]
        streams = [harness.provider.open_stream(payload) for payload in payloads]
        encoded, _ = await asyncio.gather(
            asyncio.gather(*(harness.provider.encode_request(payload) for payload in payloads)),
            asyncio.gather(*(consume(stream) for stream in streams)),
        )
        assert encoded == [stream.record.request_body for stream in streams]
        assert len(harness.requests()) == 8

    async def test_a_fold_reads_a_body_from_another_source(self, harness: ProviderHarness) -> None:
        harness.queue_replies(SPEECH)
        stream = harness.provider.open_stream(harness.ask("Tell me."))
        received = await consume(stream)
        fold = harness.provider.open_fold()
        body = stream.record.body
        pieces = [body[at : at + 50] for at in range(0, len(body), 50)]
        assert [event for piece in pieces for event in fold.feed(piece)] == received
        fold.finish()
        assert fold.answer == stream.answer

    async def test_the_dynamic_block_is_before_a_task_and_after_results(self, harness: ProviderHarness) -> None:
        task = harness.provider.user_message([TextBlock(text="Go on.")], {}, DYNAMIC)
        harness.queue_replies(step(1), Reply(text="Done."))
        answer = await complete(harness.provider, harness.payload([task]))
        results = [
            ToolResultBlock(tool_call_id=block.id, output=[1.0, None, {"ü": "\ud800"}])
            for block in answer.blocks
            if isinstance(block, ToolCallBlock)
        ]
        response = harness.provider.tool_message(results, answer.blocks, DYNAMIC)
        await complete(harness.provider, harness.payload([task, native_of(answer), response]))
        assert self.texts_of(json.loads(task)) == [DYNAMIC, "Go on."]
        assert self.texts_of(json.loads(response)) == [DYNAMIC]
        assert response.rindex(b"todos") > response.rindex("ü".encode())
        assert {request["status"] for request in harness.requests()} == {200}

    @pytest.mark.parametrize("texts", [[], [""], [" \n"], ["", "\ud83d"], ["\ud83d", "\udc00", "a\x00b"]])
    async def test_every_user_task_is_accepted_by_the_provider(
        self, harness: ProviderHarness, texts: list[str]
    ) -> None:
        blocks = [TextBlock(text=text) for text in texts]
        for dynamic in (None, DYNAMIC):
            message = harness.provider.user_message(blocks, {}, dynamic)
            assert (await complete(harness.provider, harness.payload([message]))).blocks

    async def test_an_answer_without_its_signatures_is_accepted(self, harness: ProviderHarness) -> None:
        first = harness.ask("Go.").messages[0].data
        harness.queue_replies(step(1, text="I look."), SPEECH)
        called = await complete(harness.provider, harness.payload([first]))
        bare = harness.provider.unsigned_message(native_of(called))
        assert bare is not None
        messages = [first, bare, answer_calls(harness.provider, called)]
        signed = await complete(harness.provider, harness.payload(messages))
        bare = harness.provider.unsigned_message(native_of(signed))
        assert bare is not None
        assert self.texts_of(json.loads(bare)) == [SPEECH.text]
        messages += [bare, harness.provider.user_message([TextBlock(text="Thanks.")], {})]
        other = harness.another("another-account")
        assert (await complete(other, harness.payload(messages, static_text="You help now and then."))).blocks

    async def test_tools_and_texts_with_invalid_unicode_are_sent(self, harness: ProviderHarness) -> None:
        odd = Tool(name="odd", description="\udc00", parameters={"type": "object", "description": "\ud800!"})
        payload = harness.payload([harness.ask().messages[0].data], static_text="You help.\ud83d", tools=(odd,))
        assert (await complete(harness.provider, payload)).blocks
        assert harness.requests()[-1]["status"] == 200


async def send_recorded(harness: ProviderHarness, recorded: Recorded) -> None:
    """Check that a recording has the same meaning over the network as its bytes have."""
    app = Replay(pieces=[recorded.body[at : at + 700] for at in range(0, len(recorded.body), 700)])
    async with emulating(app) as url:
        provider = harness.build("key", base_url=url)
        stream = provider.open_stream(harness.ask())
        if recorded.failure is None:
            await consume(stream)
            assert (stream.state, stream.answer.stop_reason) == (StreamState.COMPLETE, recorded.stop_reason)
        else:
            with pytest.raises(recorded.failure):
                await consume(stream)
            assert stream.state is StreamState.FAILED
        await provider.close()
    # Nothing is read after an error: it could only contradict it.
    assert recorded.body.startswith(stream.record.body)
    assert stream.answer == provider.fold_body(stream.record.body) == provider.fold_body(recorded.body)
    assert len(app.requests) == 1


def _messages(body: dict[str, Any]) -> list[Any]:
    return list(body.get("contents") or body.get("messages") or [])


class ProviderContract(StreamContract, CancelContract, LoopContract, PartialContract, UnknownContract, RequestContract):
    """The whole contract. Needs a fixture `harness`."""
