"""The contract of the provider port: whoever implements `providers.provider.Provider` passes this, on its emulator."""

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
from tests.contracts.provider_rig import PATIENCE_SECONDS, Rig, answer_calls, complete, consume, native_of, step
from tests.recordings.catalogue import NUMBERS, Recorded, load
from tests.recordings.replay import Replay

STEPS = 10
ENDED = (StreamState.COMPLETE, StreamState.FAILED, StreamState.CANCELLED)
DYNAMIC = '{"todos":["buy milk"]}'
HOLE_LIKE = "@strata:messages:0123456789abcdef"
SPEECH = Reply(thinking="Let me think about it.", text="Here is what I can say about all of it.")


async def begin(stream: ProviderStream) -> asyncio.Task[Any]:
    """Listens in the background."""
    return asyncio.create_task(consume(stream))


async def collect(stream: ProviderStream, batches: list[Sequence[ProviderEvent]]) -> None:
    async for batch in stream.event_batches():
        batches.append(batch)  # noqa: PERF401  reason: keeps what came before a failure


async def bring_to(rig: Rig, state: StreamState) -> tuple[ProviderStream, asyncio.Event | None, Any]:
    """A stream in the state, what its peer sets when it is done, and whatever has to be kept alive for it."""
    silent = {StreamState.WAITING: 0, StreamState.STREAMING: 3, StreamState.CANCELLED: 3}
    rig.says(SPEECH)
    if state in silent:
        rig.fails(FaultKind.SILENCE, after_chunks=silent[state])
    elif state is StreamState.FAILED:
        rig.fails(FaultKind.CUT, after_chunks=3)
    stream = rig.provider.open_stream(rig.ask("Tell me."))
    if state is StreamState.NEW:
        return stream, None, None
    if state in {StreamState.COMPLETE, StreamState.FAILED}:
        try:
            await consume(stream)
        except ProviderFailed:
            assert state is StreamState.FAILED
        return stream, await rig.watch.next_visit(), None
    if state is StreamState.WAITING:
        listening = await begin(stream)
        return stream, await rig.watch.next_visit(), listening
    events = stream.events()
    await anext(events)
    visit = await rig.watch.next_visit()
    if state is StreamState.CANCELLED:
        await stream.cancel()
    return stream, visit, events


async def is_over(visit: asyncio.Event) -> None:
    await asyncio.wait_for(visit.wait(), PATIENCE_SECONDS)


class StreamContract:
    async def test_nothing_is_sent_before_somebody_listens(self, rig: Rig) -> None:
        stream = rig.provider.open_stream(rig.ask())
        assert stream.state is StreamState.NEW
        assert stream.answer == ProviderAnswer()
        assert (stream.record.body, stream.record.status, stream.record.ended_at) == (b"", None, None)
        assert rig.requests() == []

    async def test_a_stream_that_waits_has_nothing_yet(self, rig: Rig) -> None:
        stream, _, _ = await bring_to(rig, StreamState.WAITING)
        assert stream.state is StreamState.WAITING
        assert stream.answer == ProviderAnswer()
        assert (stream.record.body, stream.record.status, stream.record.first_byte_at) == (b"", None, None)
        await stream.cancel()

    async def test_a_running_stream_gives_what_has_arrived(self, rig: Rig) -> None:
        stream, _, _ = await bring_to(rig, StreamState.STREAMING)
        assert stream.state is StreamState.STREAMING
        assert stream.record.status == 200
        assert stream.record.first_byte_at is not None
        assert stream.record.ended_at is None
        assert stream.answer.stop_reason is None
        assert stream.answer == rig.provider.fold_body(stream.record.body)
        await stream.cancel()

    async def test_a_complete_stream_has_the_whole_answer(self, rig: Rig) -> None:
        rig.says(SPEECH)
        stream = rig.provider.open_stream(rig.ask("Tell me."))
        events = await consume(stream)
        answer, record = stream.answer, stream.record
        assert stream.state is StreamState.COMPLETE
        assert answer.stop_reason is StopReason.END_TURN
        assert "".join(event.text for event in events if isinstance(event, TextDelta)) == SPEECH.text
        assert "".join(block.text for block in answer.blocks if isinstance(block, TextBlock)) == SPEECH.text
        assert answer.native is not None
        assert answer.native.dialect == rig.provider.name
        assert answer.response_id
        assert [event for event in events if isinstance(event, UsageReported)][-1].usage == answer.usage
        assert answer.usage.input_tokens > 0
        assert answer.usage.output_tokens > 0
        assert answer.usage.reasoning_tokens > 0
        assert record.first_byte_at is not None
        assert record.ended_at is not None
        assert record.started_at <= record.first_byte_at <= record.ended_at
        assert rig.provider.fold_body(record.body) == answer

    async def test_the_record_has_the_request_as_it_left(self, rig: Rig) -> None:
        stream = rig.provider.open_stream(rig.ask())
        await consume(stream)
        (request,) = rig.requests()
        assert json.loads(stream.record.request_body) == request["body"]

    async def test_a_call_starts_when_it_leaves_and_not_when_it_is_opened(self, rig: Rig) -> None:
        stream = rig.provider.open_stream(rig.ask())
        between = datetime.now(UTC)
        await consume(stream)
        assert stream.record.started_at >= between

    async def test_events_can_be_listened_to_once(self, rig: Rig) -> None:
        stream = rig.provider.open_stream(rig.ask())
        assert await consume(stream)
        assert await consume(stream) == []
        assert len(rig.requests()) == 1

    async def test_batches_are_the_same_events(self, rig: Rig) -> None:
        rig.says(SPEECH)
        stream = rig.provider.open_stream(rig.ask("Tell me."))
        batches = [batch async for batch in stream.event_batches()]
        assert stream.state is StreamState.COMPLETE
        assert all(batches)
        assert [event for batch in batches for event in batch] == list(
            rig.provider.open_fold().feed(stream.record.body)
        )
        assert [batch async for batch in stream.event_batches()] == []
        assert await consume(stream) == []
        assert len(rig.requests()) == 1

    async def test_a_failure_follows_the_batches_before_it(self, rig: Rig) -> None:
        rig.says(SPEECH)
        rig.fails(FaultKind.CUT, after_chunks=4)
        stream = rig.provider.open_stream(rig.ask("Tell me."))
        batches: list[Sequence[ProviderEvent]] = []
        with pytest.raises(ProviderDisconnected):
            await collect(stream, batches)
        assert batches
        assert stream.state is StreamState.FAILED
        assert stream.answer == rig.provider.fold_body(stream.record.body)

    async def test_calls_are_announced_and_ended_in_order(self, rig: Rig) -> None:
        rig.says(step(1))
        stream = rig.provider.open_stream(rig.ask())
        events = await consume(stream)
        begun = [event.call_id for event in events if isinstance(event, ToolCallBegin)]
        ended = [event for event in events if isinstance(event, ToolCallEnd)]
        calls = [block for block in stream.answer.blocks if isinstance(block, ToolCallBlock)]
        assert begun == [event.call_id for event in ended] == [call.id for call in calls]
        assert [(event.name, event.arguments) for event in ended] == [(call.name, call.arguments) for call in calls]
        assert [call.name for call in calls] == ["get_weather", "get_time"]
        assert stream.answer.stop_reason is StopReason.TOOL_USE

    async def test_many_streams_at_once_do_not_mix(self, rig: Rig) -> None:
        streams = [rig.provider.open_stream(rig.ask(f"Say something about number {n}.")) for n in range(20)]
        await asyncio.gather(*(consume(stream) for stream in streams))
        assert len(rig.requests()) == 20
        for number, stream in enumerate(streams):
            assert f"number {number}." in stream.record.request_body.decode()
            assert f"number {number}" in "".join(b.text for b in stream.answer.blocks if isinstance(b, TextBlock))


class CancelContract:
    @pytest.mark.parametrize("state", StreamState)
    async def test_cancel_ends_the_call_in_every_state(self, rig: Rig, state: StreamState) -> None:
        stream, visit, kept = await bring_to(rig, state)
        before = stream.answer
        assert stream.state is state
        await stream.cancel()
        assert stream.state is (state if state in ENDED else StreamState.CANCELLED)
        assert stream.record.ended_at is not None
        if visit is not None:
            await is_over(visit)
        await stream.cancel()
        assert stream.answer == before == rig.provider.fold_body(stream.record.body)
        assert len(rig.requests()) == (0 if state is StreamState.NEW else 1)
        assert await consume(stream) == []
        if isinstance(kept, asyncio.Task):
            assert await kept == []
        elif kept is not None:
            assert [event async for event in kept] == []

    async def test_cancel_of_a_waiting_call_returns_when_the_call_is_over(self, rig: Rig) -> None:
        stream, _, listening = await bring_to(rig, StreamState.WAITING)
        others = asyncio.all_tasks()
        await stream.cancel()
        left = asyncio.all_tasks() & others - {asyncio.current_task(), listening}
        assert not [task for task in left if "send" in str(task.get_coro())]

    async def test_cancel_from_within_the_loop_ends_it(self, rig: Rig) -> None:
        rig.says(SPEECH)
        stream = rig.provider.open_stream(rig.ask("Tell me."))
        heard = []
        async for event in stream.events():
            heard.append(event)
            await stream.cancel()
        assert len(heard) == 1
        assert stream.state is StreamState.CANCELLED
        assert stream.answer == rig.provider.fold_body(stream.record.body)

    async def test_cancel_between_two_batches_is_the_end(self, rig: Rig) -> None:
        rig.says(SPEECH)
        rig.fails(FaultKind.SILENCE, after_chunks=4)
        stream = rig.provider.open_stream(rig.ask("Tell me."))
        batches = []
        async for batch in stream.event_batches():
            batches.append(batch)
            await stream.cancel()
        assert len(batches) == 1
        assert stream.state is StreamState.CANCELLED
        await is_over(await rig.watch.next_visit())

    async def test_two_cancels_at_once_are_one(self, rig: Rig) -> None:
        stream, visit, listening = await bring_to(rig, StreamState.WAITING)
        await asyncio.gather(stream.cancel(), stream.cancel(), stream.cancel())
        assert visit is not None
        await is_over(visit)
        assert await listening == []

    @pytest.mark.parametrize("after_chunks", [0, 3])
    async def test_a_cancelled_listener_closes_the_connection(self, rig: Rig, after_chunks: int) -> None:
        rig.says(SPEECH)
        rig.fails(FaultKind.SILENCE, after_chunks=after_chunks)
        stream = rig.provider.open_stream(rig.ask("Tell me."))
        listening = await begin(stream)
        visit = await rig.watch.next_visit()
        listening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await listening
        await is_over(visit)
        assert stream.state is StreamState.CANCELLED
        assert stream.record.ended_at is not None
        assert stream.answer == rig.provider.fold_body(stream.record.body)

    async def test_a_listener_that_is_cancelled_together_with_its_stream_sees_it(self, rig: Rig) -> None:
        stream, visit, listening = await bring_to(rig, StreamState.WAITING)
        listening.cancel()
        await stream.cancel()
        with pytest.raises(asyncio.CancelledError):
            await listening
        assert visit is not None
        await is_over(visit)

    async def test_the_time_limit_of_a_listener_is_its_own(self, rig: Rig) -> None:
        rig.fails(FaultKind.SILENCE)
        stream = rig.provider.open_stream(rig.ask())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await consume(stream)
        assert stream.state is StreamState.CANCELLED
        await is_over(await rig.watch.next_visit())

    async def test_an_abandoned_loop_closes_the_connection(self, rig: Rig) -> None:
        rig.says(SPEECH)
        rig.fails(FaultKind.SILENCE, after_chunks=4)
        stream = rig.provider.open_stream(rig.ask("Tell me."))
        async with aclosing(stream.events()) as events:
            await anext(events)
        await is_over(await rig.watch.next_visit())
        assert stream.state is StreamState.CANCELLED
        assert stream.answer == rig.provider.fold_body(stream.record.body)

    async def test_after_a_cancel_the_next_call_goes_well(self, rig: Rig) -> None:
        stream, _, _ = await bring_to(rig, StreamState.STREAMING)
        await stream.cancel()
        assert (await complete(rig.provider, rig.ask())).stop_reason is not None


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

    async def run_loop(self, rig: Rig, steps: int) -> list[bytes]:
        """A user task and so many steps with their results, each checked by the emulator when the next is asked."""
        messages = [rig.provider.user_message([TextBlock(text="Go"), TextBlock(text="on.")], {})]
        for number in range(steps):
            rig.says(step(number, text="I look." if number % 2 else ""))
            answer = await complete(rig.provider, rig.payload(messages))
            assert answer.stop_reason is StopReason.TOOL_USE
            messages += [native_of(answer), answer_calls(rig.provider, answer)]
        return messages

    async def test_ten_steps_with_calls_in_parallel_keep_every_signature(self, rig: Rig) -> None:
        messages = await self.run_loop(rig, STEPS)
        rig.says(SPEECH)
        answer = await complete(rig.provider, rig.payload(messages))
        assert answer.stop_reason is StopReason.END_TURN
        again = [*messages, native_of(answer), rig.provider.user_message([TextBlock(text="Thanks.")], {})]
        assert (await complete(rig.provider, rig.payload(again))).blocks
        assert len(rig.requests()) == STEPS + 2
        assert {request["status"] for request in rig.requests()} == {200}

    async def expect(self, rig: Rig, messages: list[bytes], error: type[ProviderFailed]) -> None:
        stream = rig.provider.open_stream(rig.payload(messages))
        with pytest.raises(error) as caught:
            await consume(stream)
        assert type(caught.value) is error
        assert stream.state is StreamState.FAILED
        assert stream.record.status == 400
        assert str(caught.value.details["provider_message"]) in json.loads(stream.record.body)["error"]["message"]

    async def test_a_dropped_signature_is_refused(self, rig: Rig) -> None:
        messages = await self.run_loop(rig, 2)
        await self.expect(rig, tampered(messages, [3], self.drop_signature), self.refused_without)

    async def test_swapped_signatures_are_refused(self, rig: Rig) -> None:
        messages = await self.run_loop(rig, 2)
        await self.expect(rig, tampered(messages, [1, 3], self.swap_signatures), self.refused_swapped)

    async def test_merged_parts_are_refused(self, rig: Rig) -> None:
        messages = await self.run_loop(rig, 1)
        rig.says(SPEECH)
        answer = await complete(rig.provider, rig.payload(messages))
        messages += [native_of(answer), rig.provider.user_message([TextBlock(text="Thanks.")], {})]
        stream = rig.provider.open_stream(rig.payload(messages))
        await consume(stream)
        place = 0 if rig.provider.name == "anthropic" else 3
        await self.expect(rig, tampered(messages, [place], self.merge_texts), self.refused_merged)


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
    async def test_a_partial_answer_is_one_that_the_provider_takes_back(self, rig: Rig, after_chunks: int) -> None:
        rig.says(Reply(thinking="One two three.", text="Four five.", tool_calls=step(1).tool_calls))
        rig.fails(FaultKind.CUT, after_chunks=after_chunks)
        stream = rig.provider.open_stream(rig.ask())
        with pytest.raises(ProviderDisconnected):
            await consume(stream)
        answer = stream.answer
        assert rig.provider.fold_body(stream.record.body) == answer
        assert answer.stop_reason is None
        if answer.native is None:
            assert not any(isinstance(block, ToolCallBlock) for block in answer.blocks)
            return
        assert self.unsigned_thinking(json.loads(answer.native.data)) == []
        messages = [rig.ask().messages[0].data, answer.native.data]
        called = any(isinstance(block, ToolCallBlock) for block in answer.blocks)
        goes_on = rig.provider.user_message([TextBlock(text="Go on.")], {})
        messages.append(answer_calls(rig.provider, answer) if called else goes_on)
        assert (await complete(rig.provider, rig.payload(messages))).stop_reason is not None

    async def test_thinking_that_was_cut_is_shown_and_not_sent_back(self, rig: Rig) -> None:
        rig.says(SPEECH)
        rig.fails(FaultKind.CUT, after_chunks=2)
        stream = rig.provider.open_stream(rig.ask("Tell me."))
        with pytest.raises(ProviderDisconnected):
            await consume(stream)
        (thinking,) = stream.answer.blocks
        assert isinstance(thinking, ThinkingBlock)
        assert thinking.text
        assert thinking.signature is None
        assert stream.answer.native is None


class UnknownContract:
    async def test_what_nobody_has_documented_goes_back_as_it_came(self, rig: Rig) -> None:
        rig.fails(FaultKind.UNKNOWN_PARTS)
        first = rig.ask("Tell me.")
        answer = await complete(rig.provider, first)
        novelties = ("futureContent", "futureHint") if rig.provider.name == "gemini" else ("emulated_n",)
        assert all(novelty in native_of(answer).decode() for novelty in novelties)
        more = rig.provider.user_message([TextBlock(text="Go on.")], {})
        stream = rig.provider.open_stream(rig.payload([first.messages[0].data, native_of(answer), more]))
        await consume(stream)
        assert native_of(answer) in stream.record.request_body
        assert json.loads(native_of(answer)) in _messages(rig.requests()[-1]["body"])

    async def test_a_stored_message_leaves_byte_for_byte(self, rig: Rig) -> None:
        answer = await complete(rig.provider, rig.ask("Tell me."))
        message = b" " + native_of(answer).replace(b'":', b'" : ', 1) + b"\n"
        more = rig.provider.user_message([TextBlock(text=f'{HOLE_LIKE} "@strata:contents"')], {})
        stream = rig.provider.open_stream(rig.payload([rig.ask("Tell me.").messages[0].data, message, more]))
        await consume(stream)
        assert message + b"," + more in stream.record.request_body
        assert HOLE_LIKE in json.dumps(rig.requests()[-1]["body"])

    async def test_numbers_come_back_as_they_were_written(self, rig: Rig) -> None:
        body = load(rig.provider.name, "numbers")
        async with emulating(Replay(pieces=[body])) as url:
            provider = rig.build("key", base_url=url)
            answer = await complete(provider, rig.ask())
            stream = provider.open_stream(
                rig.payload([rig.ask().messages[0].data, native_of(answer), answer_calls(provider, answer)])
            )
            await consume(stream)
            await provider.close()
        assert NUMBERS in stream.record.request_body


class RequestContract:
    @staticmethod
    def texts_of(message: dict[str, Any]) -> list[str]:
        """The texts among the blocks of a message, in order."""
        raise NotImplementedError

    async def test_what_would_be_sent_is_what_is_sent(self, rig: Rig) -> None:
        messages = [rig.ask('A "quoted" Ü\n').messages[0].data, rig.provider.dynamic_message('{"todos":[1.0]}')]
        payload = rig.payload(messages, breakpoints=(0, 1), settings=CallSettings(max_output_tokens=900))
        encoded = await rig.provider.encode_request(payload)
        assert rig.requests() == []
        stream = rig.provider.open_stream(payload)
        await consume(stream)
        assert encoded == stream.record.request_body
        assert encoded == await rig.provider.encode_request(payload)
        assert len(rig.requests()) == 1

    async def test_a_request_is_written_while_others_are_under_way(self, rig: Rig) -> None:
        payloads = [rig.ask(f"Say something about number {n}.") for n in range(8)]
        streams = [rig.provider.open_stream(payload) for payload in payloads]
        encoded, _ = await asyncio.gather(
            asyncio.gather(*(rig.provider.encode_request(payload) for payload in payloads)),
            asyncio.gather(*(consume(stream) for stream in streams)),
        )
        assert encoded == [stream.record.request_body for stream in streams]
        assert len(rig.requests()) == 8

    async def test_a_fold_reads_a_body_from_elsewhere(self, rig: Rig) -> None:
        rig.says(SPEECH)
        stream = rig.provider.open_stream(rig.ask("Tell me."))
        heard = await consume(stream)
        fold = rig.provider.open_fold()
        body = stream.record.body
        pieces = [body[at : at + 50] for at in range(0, len(body), 50)]
        assert [event for piece in pieces for event in fold.feed(piece)] == heard
        fold.finish()
        assert fold.answer == stream.answer

    async def test_the_dynamic_block_stands_before_a_task_and_behind_results(self, rig: Rig) -> None:
        task = rig.provider.user_message([TextBlock(text="Go on.")], {}, DYNAMIC)
        rig.says(step(1), Reply(text="Done."))
        answer = await complete(rig.provider, rig.payload([task]))
        results = [
            ToolResultBlock(tool_call_id=block.id, output=[1.0, None, {"ü": "\ud800"}])
            for block in answer.blocks
            if isinstance(block, ToolCallBlock)
        ]
        response = rig.provider.tool_message(results, answer.blocks, DYNAMIC)
        await complete(rig.provider, rig.payload([task, native_of(answer), response]))
        assert self.texts_of(json.loads(task)) == [DYNAMIC, "Go on."]
        assert self.texts_of(json.loads(response)) == [DYNAMIC]
        assert response.rindex(b"todos") > response.rindex("ü".encode())
        assert {request["status"] for request in rig.requests()} == {200}

    @pytest.mark.parametrize("texts", [[], [""], [" \n"], ["", "\ud83d"], ["\ud83d", "\udc00", "a\x00b"]])
    async def test_every_user_task_is_one_that_the_provider_takes(self, rig: Rig, texts: list[str]) -> None:
        blocks = [TextBlock(text=text) for text in texts]
        for dynamic in (None, DYNAMIC):
            message = rig.provider.user_message(blocks, {}, dynamic)
            assert (await complete(rig.provider, rig.payload([message]))).blocks

    async def test_an_answer_without_its_signatures_is_taken(self, rig: Rig) -> None:
        first = rig.ask("Go.").messages[0].data
        rig.says(step(1, text="I look."), SPEECH)
        called = await complete(rig.provider, rig.payload([first]))
        bare = rig.provider.unsigned_message(native_of(called))
        assert bare is not None
        messages = [first, bare, answer_calls(rig.provider, called)]
        told = await complete(rig.provider, rig.payload(messages))
        bare = rig.provider.unsigned_message(native_of(told))
        assert bare is not None
        assert self.texts_of(json.loads(bare)) == [SPEECH.text]
        messages += [bare, rig.provider.user_message([TextBlock(text="Thanks.")], {})]
        other = rig.another("another-account")
        assert (await complete(other, rig.payload(messages, static_text="You help now and then."))).blocks

    async def test_tools_and_texts_that_are_no_unicode_are_sent_all_the_same(self, rig: Rig) -> None:
        odd = Tool(name="odd", description="\udc00", parameters={"type": "object", "description": "\ud800!"})
        payload = rig.payload([rig.ask().messages[0].data], static_text="You help.\ud83d", tools=(odd,))
        assert (await complete(rig.provider, payload)).blocks
        assert rig.requests()[-1]["status"] == 200


async def tell(rig: Rig, recorded: Recorded) -> None:
    """A recording over the network means what its bytes mean."""
    app = Replay(pieces=[recorded.body[at : at + 700] for at in range(0, len(recorded.body), 700)])
    async with emulating(app) as url:
        provider = rig.build("key", base_url=url)
        stream = provider.open_stream(rig.ask())
        if recorded.failure is None:
            await consume(stream)
            assert (stream.state, stream.answer.stop_reason) == (StreamState.COMPLETE, recorded.stop_reason)
        else:
            with pytest.raises(recorded.failure):
                await consume(stream)
            assert stream.state is StreamState.FAILED
        await provider.close()
    # What follows an error is not read: it could only contradict it.
    assert recorded.body.startswith(stream.record.body)
    assert stream.answer == provider.fold_body(stream.record.body) == provider.fold_body(recorded.body)
    assert len(app.requests) == 1


def _messages(body: dict[str, Any]) -> list[Any]:
    return list(body.get("contents") or body.get("messages") or [])


class ProviderContract(StreamContract, CancelContract, LoopContract, PartialContract, UnknownContract, RequestContract):
    """All of it. Wants a fixture `rig`."""
