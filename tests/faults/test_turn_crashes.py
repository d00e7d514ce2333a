"""kill -9 of the server at every step of a turn: real processes, the real database, strict providers.

A server dies at a named point, its time passes, and another one starts. Then the same holds whatever the point was: the
conversation goes on without help, nothing that was acknowledged is missing, nothing is there twice, and the provider is
not asked again for a request that it was asked for.
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
from tests.faults.server_fleet import NEVER_SECONDS, PATIENCE_SECONDS, Fleet
from tests.support.emulators import BOTH
from tests.support.http_driver import Talk, Told, turns
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
    """A point, what has to go before it, and what has to be there after it."""

    at: str
    asked: int
    """How often the provider was asked by then."""
    accepted: bool = True
    complete: bool = False
    """Whether the answer is whole."""
    keeps_text: bool = False
    """Whether some of its text was durable."""
    nth: int = 1
    faults: tuple[tuple[FaultKind, int], ...] = ()
    """What goes wrong with the provider's answers, each after how many chunks."""
    after_bytes: str = ""
    settings: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.at if self.nth == 1 else f"{self.at}_{self.nth}"


UNFLUSHED: dict[str, Any] = {"flush_seconds": NEVER_SECONDS / 3}
SILENT = (FaultKind.SILENCE, 0)
BUSY = (FaultKind.UNAVAILABLE, 0)
STOPS_SHORT = (FaultKind.SILENCE, 50)
WORD = "emulated"
"""In the text that the emulators improvise, and before the place where one stops short."""
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
async def test_a_server_killed_at_this_point_leaves_a_conversation_that_goes_on(
    fleet: Fleet, store: PostgresStore, provider: str, crash: Crash
) -> None:
    side = fleet.emulated[provider]
    conversation = await open_conversation(store, fleet.tenant.id, provider)
    for kind, after_chunks in crash.faults:
        side.fails(kind, after_chunks=after_chunks)
    if not crash.faults:
        side.says(STORY)
    server = await fleet.start(crash_at=crash.at, nth=crash.nth, after_bytes=crash.after_bytes, **crash.settings)
    heard = await hear_until_cut(server.talk, conversation.id, TASK)
    assert await server.ended() == KILLED
    # The call is written down when it leaves; a process that dies over it may not get it out of the door.
    asked = {crash.asked - 1, crash.asked} if crash.at == "after_begin_call" else {crash.asked}
    assert len(side.requests()) in asked
    side.state.faults.clear()
    assert not [name for _, name, _ in heard if name in ENDS]
    durable = STORY.text if crash.at == "after_finish" or not crash.accepted else await durable_text(fleet, provider)
    assert bool(durable) is crash.keeps_text or not crash.accepted

    healthy = (await fleet.restart()).talk
    told = await healthy.hear("POST", turns(conversation.id), TASK, idempotency_key=ONCE)
    assert len(side.requests()) in (asked if crash.accepted else {1})
    whole = crash.complete or not crash.accepted
    assert told[-1][1] == ("turn.completed" if whole else "turn.failed")
    await prove_resumed(healthy, conversation.id, heard, told)
    await prove_kept(healthy, conversation.id, durable, complete=whole)

    # Whether or not anybody knows what became of it, each call that may be billed has a row.
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
    """Where the moment is one that only the other side of a connection sees."""

    async def test_when_the_request_has_left_and_nothing_has_come(
        self, fleet: Fleet, store: PostgresStore, provider: str
    ) -> None:
        side = fleet.emulated[provider]
        conversation = await open_conversation(store, fleet.tenant.id, provider)
        side.fails(FaultKind.SILENCE)
        server = await fleet.start(**UNFLUSHED)
        listening = asyncio.create_task(hear_until_cut(server.talk, conversation.id, TASK))
        await until(lambda: len(side.requests()) == 1)
        server.kill()
        heard = await listening
        assert await server.ended() == KILLED

        healthy = (await fleet.restart()).talk
        told = await healthy.hear("POST", turns(conversation.id), TASK, idempotency_key=ONCE)
        assert [name for _, name, _ in told] == ["turn.started", "turn.failed"]
        assert told[-1][2]["error"]["code"] == "turn_interrupted"
        assert len(side.requests()) == 1
        await prove_resumed(healthy, conversation.id, heard, told)
        assert (await healthy.say(conversation.id, "And then?"))["turn"]["state"] == "complete"
        await prove_tidy(fleet, healthy, conversation.id, 4)

    async def test_when_the_end_was_told(self, fleet: Fleet, store: PostgresStore, provider: str) -> None:
        side = fleet.emulated[provider]
        conversation = await open_conversation(store, fleet.tenant.id, provider)
        side.says(STORY)
        server = await fleet.start()
        async with server.talk.listen("POST", turns(conversation.id), TASK, idempotency_key=ONCE) as (_, events):
            heard = [event async for event in _until_the_end(events)]
            server.kill()
        assert await server.ended() == KILLED

        healthy = (await fleet.start()).talk
        assert await healthy.hear("POST", turns(conversation.id), TASK, idempotency_key=ONCE) == heard
        last = str(heard[-1][0])
        assert (await healthy.ask("GET", f"{turns(conversation.id, 2)}/events", last_event_id=last)).status_code == 204
        assert len(side.requests()) == 1
        await healthy.say(conversation.id, "And then?")
        await prove_tidy(fleet, healthy, conversation.id, 4)


@pytest.mark.parametrize("provider", BOTH)
class TestAToolLoop:
    async def test_calls_of_an_answer_that_nobody_heard_are_pending_and_can_be_answered(
        self, fleet: Fleet, store: PostgresStore, provider: str
    ) -> None:
        for point in ("after_last_byte_flushed", "after_finish"):
            conversation = await open_conversation(store, fleet.tenant.id, provider)
            fleet.emulated[provider].says(ASKS, STORY)
            server = await fleet.start(crash_at=point)
            await hear_until_cut(server.talk, conversation.id, TASK)
            assert await server.ended() == KILLED
            healthy = (await fleet.restart()).talk
            told = await healthy.hear("POST", turns(conversation.id), TASK, idempotency_key=ONCE)
            calls = told[-1][2]["conversation"]["pending_tool_calls"]
            assert [call["name"] for call in calls] == ["get_weather"]
            after = await healthy.expect(200, "POST", turns(conversation.id), results_of(calls))
            assert after["turn"]["state"] == "complete"
            await prove_tidy(fleet, healthy, conversation.id, 4)

    @pytest.mark.parametrize("point", ["before_accept", "after_accept", "before_call", "before_finish", "after_finish"])
    async def test_goes_on_after_a_crash_with_its_results(
        self, fleet: Fleet, store: PostgresStore, provider: str, point: str
    ) -> None:
        side = fleet.emulated[provider]
        conversation = await open_conversation(store, fleet.tenant.id, provider)
        side.says(ASKS, STORY)
        server = await fleet.start(crash_at=point, nth=2, **UNFLUSHED)
        asked = await server.talk.expect(200, "POST", turns(conversation.id), TASK)
        results = results_of(asked["conversation"]["pending_tool_calls"])
        heard = await hear_until_cut(server.talk, conversation.id, results)
        assert await server.ended() == KILLED
        asked_count = len(side.requests())

        healthy = (await fleet.restart()).talk
        pending = (await healthy.expect(200, "GET", f"/v1/conversations/{conversation.id}"))["pending_tool_calls"]
        assert len(pending) == (point == "before_accept")
        told = await healthy.hear("POST", turns(conversation.id), results, idempotency_key=ONCE)
        whole = point in {"before_accept", "after_finish"}
        assert told[-1][1] == ("turn.completed" if whole else "turn.failed")
        assert len(side.requests()) == asked_count + (point == "before_accept")
        await prove_resumed(healthy, conversation.id, heard, told, seq=4)
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
        side.fails(FaultKind.SILENCE, after_chunks=STOPS_SHORT[1])
        server = await fleet.start(crash_at="after_flush", after_bytes=WORD)
        heard = await hear_until_cut(server.talk, conversation.id, TASK)
        assert await server.ended() == KILLED
        durable = await durable_text(fleet, "anthropic")
        assert WORD in durable
        recovering = await fleet.start(crash_at=point, lease_seconds=1)
        await fleet.let_time_pass()
        assert await recovering.ended() == KILLED

        healthy = (await fleet.restart()).talk
        told = await healthy.hear("POST", turns(conversation.id), TASK, idempotency_key=ONCE)
        assert told[-1][1] == "turn.failed"
        assert len(side.requests()) == 1
        await prove_resumed(healthy, conversation.id, heard, told)
        await prove_kept(healthy, conversation.id, durable, complete=False)
        await healthy.say(conversation.id, "And then?")
        await prove_tidy(fleet, healthy, conversation.id, 4)

    async def test_a_server_that_dies_while_a_turn_waits_in_it_lets_the_others_in(
        self, fleet: Fleet, store: PostgresStore
    ) -> None:
        side = fleet.emulated.gemini
        conversation = await open_conversation(store, fleet.tenant.id, "gemini")
        side.fails(FaultKind.SILENCE)
        healthy = (await fleet.start()).talk
        running = asyncio.create_task(healthy.ask("POST", turns(conversation.id), TASK))
        await until(lambda: len(side.requests()) == 1)
        dying = await fleet.start(crash_at="after_ticket")
        queued = {"input": "I wait.", "on_busy": "queue"}
        assert await hear_until_cut(dying.talk, conversation.id, queued) == []
        assert await dying.ended() == KILLED
        second = asyncio.create_task(
            healthy.expect(200, "POST", turns(conversation.id), {**queued, "input": "Me too."})
        )
        await healthy.expect(200, "POST", f"/v1/conversations/{conversation.id}/cancel")
        assert (await running).json()["turn"]["state"] == "cancelled"
        # The dead one is still before it, until its ticket lapses.
        assert (await healthy.ask("POST", turns(conversation.id), TASK)).status_code == 409
        assert not second.done()
        await fleet.let_time_pass()
        assert (await second)["turn"]["seq"] == 4
        told = await healthy.hear("POST", turns(conversation.id), queued, idempotency_key=ONCE)
        assert told[0][2]["seq"] == 6
        await prove_tidy(fleet, healthy, conversation.id, 6)

    async def test_what_a_call_cost_that_another_followed_counts_after_a_crash_too(
        self, fleet: Fleet, store: PostgresStore
    ) -> None:
        side = fleet.emulated.anthropic
        conversation = await open_conversation(store, fleet.tenant.id, "anthropic")
        # Claude says what the input takes before it says anything else.
        side.fails(FaultKind.OVERLOADED_MID_STREAM)
        side.fails(FaultKind.SILENCE)
        server = await fleet.start(crash_at="after_begin_call", nth=2)
        await hear_until_cut(server.talk, conversation.id, TASK)
        assert await server.ended() == KILLED
        healthy = (await fleet.restart()).talk
        told = await healthy.hear("POST", turns(conversation.id), TASK, idempotency_key=ONCE)
        assert told[-1][2]["turn"]["usage"]["fresh_input_tokens"] > 0
        await prove_tidy(fleet, healthy, conversation.id, 2)

    async def test_nobody_has_to_help_time_to_pass(self, fleet: Fleet, store: PostgresStore) -> None:
        """As above, with a lease that really runs out while a listener and a writer wait for it."""
        side = fleet.emulated.anthropic
        conversation = await open_conversation(store, fleet.tenant.id, "anthropic")
        side.fails(FaultKind.SILENCE, after_chunks=STOPS_SHORT[1])
        server = await fleet.start(crash_at="after_flush", after_bytes=WORD, lease_seconds=3)
        heard = await hear_until_cut(server.talk, conversation.id, TASK)
        assert await server.ended() == KILLED
        healthy = (await fleet.start(lease_seconds=3)).talk
        events = f"{turns(conversation.id, 2)}/events"
        after = {"last_event_id": str(heard[-1][0])} if heard else {}
        resumed, again, next_one = await asyncio.gather(
            healthy.hear("GET", events, **after),
            healthy.ask("POST", turns(conversation.id), TASK, idempotency_key=ONCE),
            healthy.expect(200, "POST", turns(conversation.id), {"input": "And then?", "on_busy": "queue"}),
        )
        assert [name for _, name, _ in resumed if name in ENDS] == ["turn.failed"]
        assert again.json()["turn"]["state"] == "interrupted"
        assert next_one["turn"]["seq"] == 4
        assert len(side.requests()) == 2
        await prove_tidy(fleet, healthy, conversation.id, 4)


async def hear_until_cut(talk: Talk, conversation_id: str, body: dict[str, Any]) -> list[Told]:
    """What comes of a turn before its server dies."""
    heard: list[Told] = []
    # Keep-alives would let a server that goes on for ever look alive for ever.
    with suppress(httpx2.TransportError):
        async with (
            asyncio.timeout(PATIENCE_SECONDS),
            talk.listen("POST", turns(conversation_id), body, idempotency_key=ONCE) as (answer, events),
        ):
            assert answer.status_code == 200
            async for event in events:
                heard.append(event)  # noqa: PERF401  reason: what came before the cut counts
    return heard


async def prove_resumed(
    healthy: Talk, conversation_id: str, heard: list[Told], told: list[Told], *, seq: int = 2
) -> None:
    """Whoever was cut off hears the rest, and the end exactly once; whoever comes anew hears the same as before."""
    last = heard[-1][0] if heard else 0
    events = f"{turns(conversation_id, seq)}/events"
    assert await healthy.hear("GET", events) == told
    resumed = await healthy.hear("GET", events, last_event_id=str(last))
    assert [name for _, name, _ in resumed if name in ENDS] == [told[-1][1]]
    assert resumed[-1][1:] == told[-1][1:]
    assert [number for number, _, _ in resumed] == list(range(last + 1, last + 1 + len(resumed)))
    # What both have heard, they have heard alike: a number never means two things.
    both = min(len(heard), len(told) - 1)
    assert heard[:both] == told[:both]
    if told[-1][1] == "turn.completed":
        assert heard + resumed == told


async def prove_kept(healthy: Talk, conversation_id: str, text: str, *, complete: bool) -> None:
    """The input as it was sent, and of the answer what was durable."""
    task = await healthy.expect(200, "GET", turns(conversation_id, 1))
    assert [block["text"] for block in task["blocks"]] == [TASK["input"]]
    answer = await healthy.expect(200, "GET", turns(conversation_id, 2))
    assert answer["state"] == ("complete" if complete else "interrupted")
    said = "".join(block["text"] for block in answer["blocks"] if block["type"] == "text")
    assert said == text


async def durable_text(fleet: Fleet, provider: str) -> str:
    """What the bytes say that a dead server has left behind."""
    async with fleet.database.connection() as connection:
        rows = await connection.fetch("SELECT data FROM call_chunks ORDER BY attempt, byte_offset")
    fold = FOLDS[provider]()
    list(fold.feed(b"".join(row["data"] for row in rows)))
    return "".join(block.text for block in fold.answer.blocks if isinstance(block, TextBlock))


async def prove_tidy(fleet: Fleet, healthy: Talk, conversation_id: str, last_seq: int) -> None:
    """Every number once, one turn for the key, and nothing held or half-written: all of it can be proven."""
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
    """Until it holds. The emulators live in this process and must be let live."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110  reason: nothing tells
            await asyncio.sleep(0.01)


async def _until_the_end(events: AsyncIterator[Told]) -> AsyncIterator[Told]:
    async for event in events:
        yield event
        if event[1] in ENDS:
            return
