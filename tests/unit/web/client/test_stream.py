"""A stream yields every event once and in order, also if its connection breaks, and sends nothing twice."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.conversation.turn import TurnState
from server.web.client import (
    AnswerMalformed,
    ClientEvent,
    RetryBudget,
    ServerUnreachable,
    StrataClient,
    StrataProblem,
    TextDelta,
    ThinkingDelta,
    Timeouts,
    ToolCallBegin,
    ToolCallDelta,
    ToolCallEnd,
    TurnEnded,
    TurnFailed,
    TurnOptions,
    TurnStarted,
    UnknownEvent,
    UsageReported,
)
from server.web.client.stream import FrameReader, event_from_frame
from tests.support.fakes.scripted_strata import (
    CONVERSATION_ID,
    KEY,
    Answer,
    ScriptedStrata,
    ScriptedTurn,
    answer_events,
    called,
    encode_events,
    failed,
    open_scripted_strata,
    problem,
    status_of,
)
from tests.unit.web.client.conftest import QUICK

TURNS = f"/v1/conversations/{CONVERSATION_ID}/turns"
REPLY = answer_events(2, "Hel", "lo 🌍", thinking="Hm.")
BRIEF = [
    REPLY[0],
    ("text.delta", {"text": "ø"}),
    (
        "turn.completed",
        {"turn": {"seq": 2, "kind": "model_response", "state": "complete"}, "conversation": status_of(2)},
    ),
]
EXPECTED = [event_from_frame(frame) for frame in FrameReader().feed(encode_events(REPLY))]


async def read_all(client: StrataClient, options: TurnOptions | None = None) -> list[ClientEvent]:
    async with client.stream(CONVERSATION_ID, "Hi", options=options) as stream:
        return [event async for event in stream]


async def test_events_are_typed_and_in_order(client: StrataClient, strata: ScriptedStrata) -> None:
    strata.replies.append(lambda _: REPLY)
    async with client.stream(CONVERSATION_ID, "Hi") as stream:
        events = [event async for event in stream]
        ended = await stream.result()
    started, thinking, *texts, usage, last = events
    assert started == TurnStarted(conversation_id=CONVERSATION_ID, input_seq=1, seq=2)
    assert thinking == ThinkingDelta(text="Hm.")
    assert texts == [TextDelta(text="Hel"), TextDelta(text="lo 🌍")]
    assert isinstance(usage, UsageReported)
    assert usage.usage.input_tokens == 1000
    assert last == ended
    assert (ended.turn.text, ended.turn.state, ended.conversation.revision) == ("Hello 🌍", TurnState.COMPLETE, 2)
    assert (stream.seq, stream.last_event_id, stream.replayed) == (2, 6, False)
    assert strata.requests[0].headers["authorization"] == f"Bearer {KEY}"
    assert strata.requests[0].body == {"input": "Hi", "on_busy": "reject"}


async def test_tool_calls_are_streamed_in_pieces(client: StrataClient, strata: ScriptedStrata) -> None:
    call = {"id": "call_1", "name": "get_weather", "arguments": {"city": "Oslo"}}
    strata.replies.append(lambda seq: called(seq, call))
    _, begin, delta, end, ended = await read_all(client)
    assert begin == ToolCallBegin(call_id="call_1", name="get_weather")
    assert delta == ToolCallDelta(call_id="call_1", arguments_json='{"city": "Oslo"}')
    assert end == ToolCallEnd(call_id="call_1", name="get_weather", arguments={"city": "Oslo"})
    assert isinstance(ended, TurnEnded)
    assert ended.conversation.pending_tool_calls == ended.turn.tool_calls


async def test_an_unknown_event_is_passed_on(client: StrataClient, strata: ScriptedStrata) -> None:
    first, *rest = REPLY
    strata.replies.append(lambda _: [first, ("citation.added", {"url": "x"}), *rest])
    assert (await read_all(client))[1] == UnknownEvent(name="citation.added", data={"url": "x"})


async def test_a_cut_at_any_byte_loses_and_repeats_nothing() -> None:
    async with open_scripted_strata() as strata, StrataClient(strata.url, KEY, retry_budget=QUICK) as client:
        strata.replies.append(lambda _: BRIEF)
        whole = await read_all(client)
        assert len(whole) == len(BRIEF)
        for cut in range(strata.seen_bytes):
            strata.turns.clear()
            strata.requests.clear()
            strata.replies.append(lambda _: BRIEF)
            strata.cuts.append(cut)
            assert await read_all(client) == whole, cut
            assert len(strata.turns) == 1
            assert len(strata.requests) in {1, 2}


async def test_events_that_a_server_repeats_are_yielded_once(client: StrataClient, strata: ScriptedStrata) -> None:
    strata.replies.append(lambda _: REPLY)
    strata.cuts.append(400)
    everything = Answer(headers={"content-type": "text/event-stream"}, body=encode_events(REPLY))
    strata.script("GET", f"{TURNS}/2/events", everything)
    assert await read_all(client) == EXPECTED
    assert len(strata.requests) == 2


@settings(max_examples=25)
@given(st.lists(st.integers(0, 900), max_size=8), st.booleans())
async def test_any_number_of_cuts_loses_and_repeats_nothing(cuts: list[int], resets: bool) -> None:  # noqa: FBT001  reason: hypothesis gives it
    async with open_scripted_strata() as strata, StrataClient(strata.url, KEY, retry_budget=QUICK) as client:
        strata.resets = resets
        strata.preface = b": keep-alive\n\n"
        strata.replies.append(lambda _: REPLY)
        strata.cuts.extend(cuts)
        assert await read_all(client) == EXPECTED
        assert len(strata.turns) == 1


async def test_before_the_first_event_the_same_request_is_sent_again(
    client: StrataClient, strata: ScriptedStrata
) -> None:
    strata.replies.append(lambda _: REPLY)
    strata.cuts.append(0)
    assert await read_all(client) == EXPECTED
    first, second = strata.requests
    assert (first.method, second.method) == ("POST", "POST")
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"]
    assert first.body == second.body


async def test_afterwards_only_the_events_after_the_last_are_requested(
    client: StrataClient, strata: ScriptedStrata
) -> None:
    strata.replies.append(lambda _: REPLY)
    head = Answer(headers={"content-type": "text/event-stream; charset=utf-8"}, streams=True).encode()
    strata.cuts.append(len(head) + len("xxx\r\n") + len(encode_events(REPLY[:3])) + 5)
    assert await read_all(client) == EXPECTED
    _, second = strata.requests
    assert (second.method, second.path) == ("GET", f"{TURNS}/2/events")
    assert second.headers["last-event-id"] == "3"


async def test_a_stream_that_ends_properly_but_early_is_resumed_too(
    client: StrataClient, strata: ScriptedStrata
) -> None:
    strata.turns["taken"] = ScriptedTurn(seq=2, body=None, events=REPLY, readable=len(REPLY))
    early = Answer(headers={"content-type": "text/event-stream"}, body=encode_events(REPLY[:3]))
    strata.script("POST", TURNS, early)
    assert await read_all(client) == EXPECTED
    assert strata.requests[1].headers["last-event-id"] == "3"


async def test_every_turn_has_a_unique_key_unless_it_is_given(client: StrataClient, strata: ScriptedStrata) -> None:
    for _ in range(3):
        strata.replies.append(lambda seq: answer_events(seq, "x"))
    await read_all(client)
    await read_all(client)
    await read_all(client, TurnOptions(idempotency_key="mine"))
    keys = [request.headers["idempotency-key"] for request in strata.requests]
    assert len(set(keys)) == 3
    assert keys[2] == "mine"


async def test_a_known_key_is_reported_as_replayed(client: StrataClient, strata: ScriptedStrata) -> None:
    strata.replies.append(lambda _: REPLY)
    options = TurnOptions(idempotency_key="mine")
    await read_all(client, options)
    async with client.stream(CONVERSATION_ID, "Hi", options=options) as stream:
        assert stream.replayed
        assert [event async for event in stream] == EXPECTED


async def test_silence_is_treated_as_a_broken_connection(strata: ScriptedStrata) -> None:
    strata.replies.append(lambda _: REPLY)
    strata.held.clear()
    timeouts = Timeouts(silence_seconds=1)
    async with (
        StrataClient(strata.url, KEY, retry_budget=QUICK, timeouts=timeouts) as client,
        client.stream(CONVERSATION_ID, "Hi") as stream,
    ):
        events = [await anext(stream), await anext(stream)]
        strata.request_came.clear()
        reading = asyncio.create_task(anext(stream))
        await strata.request_came.wait()
        strata.held.set()
        events += [await reading, *[event async for event in stream]]
    assert events == EXPECTED
    assert strata.requests[1].headers["last-event-id"] == "2"


async def test_a_turn_can_be_followed_from_any_event(client: StrataClient, strata: ScriptedStrata) -> None:
    strata.replies.append(lambda _: REPLY)
    await read_all(client)
    for after in range(len(REPLY)):
        async with client.follow(CONVERSATION_ID, 2, after=after) as stream:
            assert [event async for event in stream] == EXPECTED[after:]


async def test_a_followed_turn_survives_cuts_too(client: StrataClient, strata: ScriptedStrata) -> None:
    strata.replies.append(lambda _: REPLY)
    await read_all(client)
    strata.cuts.extend([0, 150, 300, 20])
    async with client.follow(CONVERSATION_ID, 2, after=1) as stream:
        assert [event async for event in stream] == EXPECTED[1:]


async def test_retries_end_if_nothing_new_arrives(strata: ScriptedStrata) -> None:
    strata.replies.append(lambda _: REPLY)
    strata.cuts.extend([200] * 100_000)
    retry_budget = RetryBudget(seconds=0.05, first_wait_seconds=0.001, max_wait_seconds=0.01)
    async with StrataClient(strata.url, KEY, retry_budget=retry_budget) as client:
        with pytest.raises(ServerUnreachable):
            await read_all(client)


async def test_without_retries_the_first_cut_ends_the_stream(strata: ScriptedStrata) -> None:
    strata.replies.append(lambda _: REPLY)
    strata.cuts.append(200)
    async with StrataClient(strata.url, KEY, retry_budget=RetryBudget(seconds=0)) as client:
        with pytest.raises(ServerUnreachable, match="was lost"):
            await read_all(client)
    assert len(strata.requests) == 1


async def test_a_failed_turn_is_an_event_and_the_result_raises(client: StrataClient, strata: ScriptedStrata) -> None:
    strata.replies.append(lambda seq: failed(seq, "Hel"))
    async with client.stream(CONVERSATION_ID, "Hi") as stream:
        events = [event async for event in stream]
        with pytest.raises(TurnFailed) as caught:
            await stream.result()
    assert isinstance(events[-1], TurnEnded)
    assert (caught.value.code, caught.value.status) == ("provider_overloaded", None)
    assert str(caught.value) == "The provider is overloaded. Try again in a moment."
    assert caught.value.ended.turn.text == "Hel"


async def test_a_cancelled_turn_is_no_failure(client: StrataClient, strata: ScriptedStrata) -> None:
    strata.replies.append(lambda seq: answer_events(seq, "Hel", state="cancelled", stop_reason="aborted"))
    assert (await client.send(CONVERSATION_ID, "Hi")).turn.state == TurnState.CANCELLED


async def test_a_refusal_is_raised_on_entering(client: StrataClient, strata: ScriptedStrata) -> None:
    strata.script("POST", TURNS, problem(422, "history_rule_broken", "It would break.", "See `rule`."))
    with pytest.raises(StrataProblem) as caught:
        async with client.stream(CONVERSATION_ID, "Hi"):
            pass
    assert caught.value.code == "history_rule_broken"
    assert len(strata.requests) == 1


async def test_an_answer_that_is_not_a_stream_is_malformed(client: StrataClient, strata: ScriptedStrata) -> None:
    strata.script("POST", TURNS, Answer(headers={"content-type": "text/html"}, body=b"<h1>Welcome</h1>"))
    with pytest.raises(AnswerMalformed):
        await read_all(client)


async def test_an_event_that_cannot_be_read_is_malformed(client: StrataClient, strata: ScriptedStrata) -> None:
    strata.replies.append(lambda _: [("text.delta", {"txet": "x"})])
    with pytest.raises(AnswerMalformed, match=r"event text\.delta"):
        await read_all(client)


async def test_leaving_a_stream_does_not_cancel_the_turn(client: StrataClient, strata: ScriptedStrata) -> None:
    strata.replies.append(lambda _: REPLY)
    strata.held.clear()
    async with client.stream(CONVERSATION_ID, "Hi") as stream:
        await anext(stream)
    strata.held.set()
    async with client.follow(CONVERSATION_ID, 2) as stream:
        assert await stream.result() == EXPECTED[-1]
