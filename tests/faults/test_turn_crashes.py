"""kill -9 of the server at every step of a turn: real processes, the real database, strict providers.

A server dies at a named point, its leases expire, and another one starts. Then the same holds for every point: the
conversation continues without help, nothing that was acknowledged is missing, nothing is present twice, and the
provider does not receive a request twice.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest

from server.app.providers import FOLDS
from server.conversation.block import TextBlock
from server.conversation.call import OUTCOME_UNKNOWN
from server.emulator.reply import FaultKind, Reply, ToolCall
from server.postgres.store import PostgresStore
from tests.faults.server_fleet import NEVER_SECONDS, WAIT_SECONDS, Fleet
from tests.support.emulators import BOTH
from tests.support.http_driver import ApiClient, StreamedEvent, turns
from tests.support.turn_service_driver import open_conversation
from tests.support.verifying import verify

KILLED = -9
STORY = Reply(thinking="What would be nice?", text="Once upon a time there was a fox who lived by the sea.")
ASKS = Reply(thinking="I have to look.", tool_calls=(ToolCall(name="get_weather", arguments={"city": "Oslo"}),))
TASK = {"input": "Tell me a story."}
ONCE = "once"
ENDS = {"turn.completed", "turn.failed", "turn.cancelled"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """A point, its precondition, and the expected state after it."""

    at: str
    asked: int
    """How often the provider was called by then."""
    accepted: bool = True
    complete: bool = False
    """Whether the answer is complete."""
    keeps_text: bool = False
    """Whether some of its text was durable."""
    nth: int = 1
    faults: tuple[tuple[FaultKind, int], ...] = ()
    """The faults of the provider's answers, each with the number of chunks before it."""
    after_bytes: str = ""
    settings: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.at if self.nth == 1 else f"{self.at}_{self.nth}"


UNFLUSHED: dict[str, Any] = {"flush_seconds": NEVER_SECONDS / 3}
SILENT = (FaultKind.SILENCE, 0)
BUSY = (FaultKind.UNAVAILABLE, 0)
STOPS_SHORT = (FaultKind.SILENCE, 50)
WORD = "emulated"
"""In the text that the emulators improvise, before the point where a faulty answer stops."""
CRASHES = (
    Crash(at="before_accept", asked=0, accepted=False),
    Crash(at="after_accept", asked=0),
    Crash(at="after_load", asked=0),
    Crash(at="before_epoch", asked=0),
    Crash(at="after_epoch", asked=0),
    Crash(at="before_call", asked=0),
    Crash(at="after_begin_call", asked=1, faults=(SILENT,)),
    Crash(at="after_first_event", asked=1, settings=UNFLUSHED),
    Crash(at="after_flush", asked=1, faults=(STOPS_SHORT,), after_bytes=WORD, keeps_text=True),
    Crash(at="after_last_byte", asked=1, settings=UNFLUSHED),
    Crash(at="after_last_byte_flushed", asked=1, complete=True, keeps_text=True),
    Crash(at="before_finish", asked=1, settings=UNFLUSHED),
    Crash(at="after_finish", asked=1, complete=True, keeps_text=True),
    # In the middle of a retry: the first call has failed.
    Crash(at="before_call", nth=2, asked=1, faults=(BUSY,), settings=UNFLUSHED),
    Crash(at="after_end_call", asked=2, faults=(BUSY, SILENT)),
    Crash(at="after_begin_call", nth=2, asked=2, faults=(BUSY, SILENT)),
    Crash(at="after_flush", asked=2, faults=(BUSY, STOPS_SHORT), after_bytes=WORD, keeps_text=True),
)


@pytest.mark.parametrize("provider", BOTH)
@pytest.mark.parametrize("crash", CRASHES, ids=lambda crash: f"{crash}{'_in_a_retry' if crash.asked == 2 else ''}")
async def test_a_server_killed_at_this_point_leaves_a_conversation_that_continues(
    fleet: Fleet, store: PostgresStore, provider: str, crash: Crash
) -> None:
    side = fleet.emulated[provider]
    conversation = await open_conversation(store, fleet.tenant.id, provider)
    for kind, after_chunks in crash.faults:
        side.inject_fault(kind, after_chunks=after_chunks)
    if not crash.faults:
        side.queue_replies(STORY)
    server = await fleet.start(crash_at=crash.at, nth=crash.nth, after_bytes=crash.after_bytes, **crash.settings)
    received = await read_until_cut(server.api, conversation.id, TASK)
    assert await server.ended() == KILLED
    # The call is recorded while it is sent; a process that dies in between may not have sent it.
    asked = {crash.asked - 1, crash.asked} if crash.at == "after_begin_call" else {crash.asked}
    assert len(side.requests()) in asked
    side.state.faults.clear()
    assert not [name for _, name, _ in received if name in ENDS]
    durable = STORY.text if crash.at == "after_finish" or not crash.accepted else await durable_text(fleet, provider)
    assert bool(durable) is crash.keeps_text or not crash.accepted

    healthy = (await fleet.restart()).api
    replayed = await healthy.read_events("POST", turns(conversation.id), TASK, idempotency_key=ONCE)
    assert len(side.requests()) in (asked if crash.accepted else {1})
    whole = crash.complete or not crash.accepted
    assert replayed[-1][1] == ("turn.completed" if whole else "turn.failed")
    await prove_resumed(healthy, conversation.id, received, replayed)
    await prove_kept(healthy, conversation.id, durable, complete=whole)

    # Each call that may be billed has a row, even if its outcome is unknown.
    calls = await store.list_calls(fleet.tenant.id, conversation.id, 2)
    assert len(calls) >= (crash.asked if crash.accepted else 1)
    last = calls[-1] if calls else None
    if last is not None and crash.accepted and not crash.keeps_text and crash.at != "before_call":
        assert last.end is not None
        assert last.end.cost_usd is None
        (note,) = (note for note in last.start.warnings if note["kind"] == OUTCOME_UNKNOWN)
        assert note["estimated_input_tokens"] > 0
        assert note["estimated_cost_usd"] is not None

    after = await healthy.say(conversation.id, "And then?")
    assert (after["turn"]["seq"], after["turn"]["state"]) == (4, "complete")
    await prove_tidy(fleet, healthy, conversation.id, 4)


@pytest.mark.parametrize("provider", BOTH)
class TestKilledFromOutside:
    """Moments that only the peer of a connection can observe."""

    async def test_when_the_request_was_sent_and_nothing_has_arrived(
        self, fleet: Fleet, store: PostgresStore, provider: str
    ) -> None:
        side = fleet.emulated[provider]
        conversation = await open_conversation(store, fleet.tenant.id, provider)
        side.inject_fault(FaultKind.SILENCE)
        server = await fleet.start(**UNFLUSHED)
        listening = asyncio.create_task(read_until_cut(server.api, conversation.id, TASK))
        await until(lambda: len(side.requests()) == 1)
        server.kill()
        received = await listening
        assert await server.ended() == KILLED

        healthy = (await fleet.restart()).api
        replayed = await healthy.read_events("POST", turns(conversation.id), TASK, idempotency_key=ONCE)
        assert [name for _, name, _ in replayed] == ["turn.started", "turn.failed"]
        assert replayed[-1][2]["error"]["code"] == "turn_interrupted"
        assert len(side.requests()) == 1
        await prove_resumed(healthy, conversation.id, received, replayed)
        assert (await healthy.say(conversation.id, "And then?"))["turn"]["state"] == "complete"
        await prove_tidy(fleet, healthy, conversation.id, 4)

    async def test_when_the_end_was_sent(self, fleet: Fleet, store: PostgresStore, provider: str) -> None:
        side = fleet.emulated[provider]
        conversation = await open_conversation(store, fleet.tenant.id, provider)
        side.queue_replies(STORY)
        server = await fleet.start()
        async with server.api.listen("POST", turns(conversation.id), TASK, idempotency_key=ONCE) as (_, events):
            received = [event async for event in _until_the_end(events)]
            server.kill()
        assert await server.ended() == KILLED

        healthy = (await fleet.start()).api
        assert await healthy.read_events("POST", turns(conversation.id), TASK, idempotency_key=ONCE) == received
        last = str(received[-1][0])
        assert (await healthy.ask("GET", f"{turns(conversation.id, 2)}/events", last_event_id=last)).status_code == 204
        assert len(side.requests()) == 1
        await healthy.say(conversation.id, "And then?")
        await prove_tidy(fleet, healthy, conversation.id, 4)


@pytest.mark.parametrize("provider", BOTH)
class TestAToolLoop:
    async def test_calls_of_an_answer_that_no_client_received_are_pending_and_can_be_answered(
        self, fleet: Fleet, store: PostgresStore, provider: str
    ) -> None:
        for point in ("after_last_byte_flushed", "after_finish"):
            conversation = await open_conversation(store, fleet.tenant.id, provider)
            fleet.emulated[provider].queue_replies(ASKS, STORY)
            server = await fleet.start(crash_at=point)
            await read_until_cut(server.api, conversation.id, TASK)
            assert await server.ended() == KILLED
            healthy = (await fleet.restart()).api
            replayed = await healthy.read_events("POST", turns(conversation.id), TASK, idempotency_key=ONCE)
            calls = replayed[-1][2]["conversation"]["pending_tool_calls"]
            assert [call["name"] for call in calls] == ["get_weather"]
            after = await healthy.expect(200, "POST", turns(conversation.id), results_of(calls))
            assert after["turn"]["state"] == "complete"
            await prove_tidy(fleet, healthy, conversation.id, 4)

    @pytest.mark.parametrize("point", ["before_accept", "after_accept", "before_call", "before_finish", "after_finish"])
    async def test_continues_after_a_crash_with_its_results(
        self, fleet: Fleet, store: PostgresStore, provider: str, point: str
    ) -> None:
        side = fleet.emulated[provider]
        conversation = await open_conversation(store, fleet.tenant.id, provider)
        side.queue_replies(ASKS, STORY)
        server = await fleet.start(crash_at=point, nth=2, **UNFLUSHED)
        asked = await server.api.expect(200, "POST", turns(conversation.id), TASK)
        results = results_of(asked["conversation"]["pending_tool_calls"])
        received = await read_until_cut(server.api, conversation.id, results)
        assert await server.ended() == KILLED
        asked_count = len(side.requests())

        healthy = (await fleet.restart()).api
        pending = (await healthy.expect(200, "GET", f"/v1/conversations/{conversation.id}"))["pending_tool_calls"]
        assert len(pending) == (point == "before_accept")
        replayed = await healthy.read_events("POST", turns(conversation.id), results, idempotency_key=ONCE)
        whole = point in {"before_accept", "after_finish"}
        assert replayed[-1][1] == ("turn.completed" if whole else "turn.failed")
        assert len(side.requests()) == asked_count + (point == "before_accept")
        await prove_resumed(healthy, conversation.id, received, replayed, seq=4)
        after = await healthy.say(conversation.id, "And then?")
        assert (after["turn"]["seq"], after["turn"]["state"]) == (6, "complete")
        await prove_tidy(fleet, healthy, conversation.id, 6)


class TestOthers:
    @pytest.mark.parametrize("point", ["after_take_over", "before_finish", "after_finish"])
    async def test_a_recovery_that_dies_is_taken_over_by_another_process(
        self, fleet: Fleet, store: PostgresStore, point: str
    ) -> None:
        side = fleet.emulated.anthropic
        conversation = await open_conversation(store, fleet.tenant.id, "anthropic")
        side.inject_fault(FaultKind.SILENCE, after_chunks=STOPS_SHORT[1])
        server = await fleet.start(crash_at="after_flush", after_bytes=WORD)
        received = await read_until_cut(server.api, conversation.id, TASK)
        assert await server.ended() == KILLED
        durable = await durable_text(fleet, "anthropic")
        assert WORD in durable
        recovering = await fleet.start(crash_at=point, lease_seconds=1)
        await fleet.let_time_pass()
        assert await recovering.ended() == KILLED

        healthy = (await fleet.restart()).api
        replayed = await healthy.read_events("POST", turns(conversation.id), TASK, idempotency_key=ONCE)
        assert replayed[-1][1] == "turn.failed"
        assert len(side.requests()) == 1
        await prove_resumed(healthy, conversation.id, received, replayed)
        await prove_kept(healthy, conversation.id, durable, complete=False)
        await healthy.say(conversation.id, "And then?")
        await prove_tidy(fleet, healthy, conversation.id, 4)

    async def test_a_server_that_dies_while_a_turn_waits_in_its_queue_admits_the_others(
        self, fleet: Fleet, store: PostgresStore
    ) -> None:
        side = fleet.emulated.gemini
        conversation = await open_conversation(store, fleet.tenant.id, "gemini")
        side.inject_fault(FaultKind.SILENCE)
        healthy = (await fleet.start()).api
        running = asyncio.create_task(healthy.ask("POST", turns(conversation.id), TASK))
        await until(lambda: len(side.requests()) == 1)
        dying = await fleet.start(crash_at="after_ticket")
        queued = {"input": "I wait.", "on_busy": "queue"}
        assert await read_until_cut(dying.api, conversation.id, queued) == []
        assert await dying.ended() == KILLED
        second = asyncio.create_task(
            healthy.expect(200, "POST", turns(conversation.id), {**queued, "input": "Me too."})
        )
        await healthy.expect(200, "POST", f"/v1/conversations/{conversation.id}/cancel")
        assert (await running).json()["turn"]["state"] == "cancelled"
        # The ticket of the dead one is still before it, until it expires.
        assert (await healthy.ask("POST", turns(conversation.id), TASK)).status_code == 409
        assert not second.done()
        await fleet.let_time_pass()
        assert (await second)["turn"]["seq"] == 4
        replayed = await healthy.read_events("POST", turns(conversation.id), queued, idempotency_key=ONCE)
        assert replayed[0][2]["seq"] == 6
        await prove_tidy(fleet, healthy, conversation.id, 6)

    async def test_the_cost_of_a_retried_call_counts_after_a_crash_too(
        self, fleet: Fleet, store: PostgresStore
    ) -> None:
        side = fleet.emulated.anthropic
        conversation = await open_conversation(store, fleet.tenant.id, "anthropic")
        # Claude reports the input tokens before anything else.
        side.inject_fault(FaultKind.OVERLOADED_MID_STREAM)
        side.inject_fault(FaultKind.SILENCE)
        server = await fleet.start(crash_at="after_begin_call", nth=2)
        await read_until_cut(server.api, conversation.id, TASK)
        assert await server.ended() == KILLED
        healthy = (await fleet.restart()).api
        replayed = await healthy.read_events("POST", turns(conversation.id), TASK, idempotency_key=ONCE)
        assert replayed[-1][2]["turn"]["usage"]["fresh_input_tokens"] > 0
        await prove_tidy(fleet, healthy, conversation.id, 2)

    async def test_a_turn_is_recovered_after_the_real_lease(self, fleet: Fleet, store: PostgresStore) -> None:
        """As above, with a lease that really expires while a listener and a writer wait for it."""
        side = fleet.emulated.anthropic
        conversation = await open_conversation(store, fleet.tenant.id, "anthropic")
        side.inject_fault(FaultKind.SILENCE, after_chunks=STOPS_SHORT[1])
        server = await fleet.start(crash_at="after_flush", after_bytes=WORD, lease_seconds=3)
        received = await read_until_cut(server.api, conversation.id, TASK)
        assert await server.ended() == KILLED
        healthy = (await fleet.start(lease_seconds=3)).api
        events = f"{turns(conversation.id, 2)}/events"
        after = {"last_event_id": str(received[-1][0])} if received else {}
        resumed, again, next_one = await asyncio.gather(
            healthy.read_events("GET", events, **after),
            healthy.ask("POST", turns(conversation.id), TASK, idempotency_key=ONCE),
            healthy.expect(200, "POST", turns(conversation.id), {"input": "And then?", "on_busy": "queue"}),
        )
        assert [name for _, name, _ in resumed if name in ENDS] == ["turn.failed"]
        assert again.json()["turn"]["state"] == "interrupted"
        assert next_one["turn"]["seq"] == 4
        assert len(side.requests()) == 2
        await prove_tidy(fleet, healthy, conversation.id, 4)


async def read_until_cut(api: ApiClient, conversation_id: str, body: dict[str, Any]) -> list[StreamedEvent]:
    """Read the events of a turn until its server dies."""
    received: list[StreamedEvent] = []
    # Keep-alives would make a server that never ends look alive.
    with suppress(httpx2.TransportError):
        async with (
            asyncio.timeout(WAIT_SECONDS),
            api.listen("POST", turns(conversation_id), body, idempotency_key=ONCE) as (answer, events),
        ):
            assert answer.status_code == 200
            async for event in events:
                received.append(event)  # noqa: PERF401  reason: the events before the cut are needed
    return received


async def prove_resumed(
    healthy: ApiClient,
    conversation_id: str,
    received: list[StreamedEvent],
    replayed: list[StreamedEvent],
    *,
    seq: int = 2,
) -> None:
    """A resumed stream has the rest, and the end exactly once; a new stream has the same events as before."""
    last = received[-1][0] if received else 0
    events = f"{turns(conversation_id, seq)}/events"
    assert await healthy.read_events("GET", events) == replayed
    resumed = await healthy.read_events("GET", events, last_event_id=str(last))
    assert [name for _, name, _ in resumed if name in ENDS] == [replayed[-1][1]]
    assert resumed[-1][1:] == replayed[-1][1:]
    assert [number for number, _, _ in resumed] == list(range(last + 1, last + 1 + len(resumed)))
    # Events in both are equal: a number never has two meanings.
    both = min(len(received), len(replayed) - 1)
    assert received[:both] == replayed[:both]
    if replayed[-1][1] == "turn.completed":
        assert received + resumed == replayed


async def prove_kept(healthy: ApiClient, conversation_id: str, text: str, *, complete: bool) -> None:
    """The input is stored as sent, and the durable part of the answer."""
    task = await healthy.expect(200, "GET", turns(conversation_id, 1))
    assert [block["text"] for block in task["blocks"]] == [TASK["input"]]
    answer = await healthy.expect(200, "GET", turns(conversation_id, 2))
    assert answer["state"] == ("complete" if complete else "interrupted")
    stored_text = "".join(block["text"] for block in answer["blocks"] if block["type"] == "text")
    assert stored_text == text


async def durable_text(fleet: Fleet, provider: str) -> str:
    """The text in the bytes that a dead server has left."""
    async with fleet.database.connection() as connection:
        rows = await connection.fetch("SELECT data FROM call_chunks ORDER BY attempt, byte_offset")
    fold = FOLDS[provider]()
    list(fold.feed(b"".join(row["data"] for row in rows)))
    return "".join(block.text for block in fold.answer.blocks if isinstance(block, TextBlock))


async def prove_tidy(fleet: Fleet, healthy: ApiClient, conversation_id: str, last_seq: int) -> None:
    """Every number exists once, the key has one turn, nothing is locked or incomplete, and everything can be
    verified.
    """
    page = await healthy.expect(200, "GET", f"{turns(conversation_id)}?limit=100")
    assert [turn["seq"] for turn in page["data"]] == list(range(1, last_seq + 1))
    async with fleet.database.connection() as connection:
        keyed = await connection.fetch(
            "SELECT count(*) FROM turns WHERE idempotency_key = $1 GROUP BY conversation_id", ONCE
        )
        assert {row["count"] for row in keyed} == {1}
        left = await connection.fetchrow(
            """
            SELECT (SELECT count(*) FROM conversations WHERE lease_token IS NOT NULL) AS leases,
                (SELECT count(*) FROM waiting_turns WHERE expires_at > now()) AS tickets,
                (SELECT count(*) FROM call_chunks) AS chunks,
                (SELECT count(*) FROM calls WHERE ended_at IS NULL) AS open_calls,
                (SELECT count(*) FROM turns t WHERE t.kind = 'model_response' AND t.fresh_input_tokens <> (
                    SELECT coalesce(sum(c.fresh_input_tokens), 0) FROM calls c
                    WHERE c.conversation_id = t.conversation_id AND c.turn_seq = t.seq
                )) AS miscounted
            """
        )
    assert left is not None
    assert dict(left) == {"leases": 0, "tickets": 0, "chunks": 0, "open_calls": 0, "miscounted": 0}
    assert (await verify(fleet.database, [conversation_id])).mismatches == ()


def results_of(calls: list[dict[str, Any]]) -> dict[str, Any]:
    return {"tool_results": [{"tool_call_id": call["id"], "output": {"celsius": 4}} for call in calls]}


async def until(condition: Callable[[], bool]) -> None:
    """Poll until the condition holds. The emulators run in this process and must not be blocked."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():  # noqa: ASYNC110  reason: there is no event to wait for
            await asyncio.sleep(0.01)


async def _until_the_end(events: AsyncIterator[StreamedEvent]) -> AsyncIterator[StreamedEvent]:
    async for event in events:
        yield event
        if event[1] in ENDS:
            return
