"""Two server processes on one database: a turn that runs in one is streamed, awaited and cancelled through the
other.
"""

import asyncio
import math
from collections.abc import AsyncIterator, MutableMapping
from contextlib import AsyncExitStack
from typing import Any

import pytest

from server.emulator.anthropic.app import build_anthropic_app
from server.emulator.exchange import ASGIApp, Receive, Scope, Send
from server.emulator.gemini.app import build_gemini_app
from server.emulator.reply import Reply
from server.emulator.server import emulating
from server.emulator.state import build_state
from server.postgres.notifications import CONVERSATION_CHANNEL, PostgresNotifications
from server.postgres.store import PostgresStore
from tests.contracts.provider_harness import Lines
from tests.faults.server_fleet import WAIT_SECONDS, Fleet
from tests.support.emulators import BOTH, Emulated, EmulatedProviders
from tests.support.http_driver import StreamedEvent, turns
from tests.support.turn_service_driver import open_conversation

STORY = Reply(thinking="What would be nice?", text="Once upon a time there was a fox who lived by the sea.")
TASK = {"input": "Tell me a story."}
HELD_AFTER = 9
"""Chunks: the thinking, and some of the text."""


class Gate:
    """Passes the first chunks of every answer on, and more when it is opened."""

    def __init__(self) -> None:
        self._allowed: float = HELD_AFTER
        self._changed = asyncio.Event()

    def open(self, chunks: float = math.inf) -> None:
        self._allowed += chunks
        self._changed.set()
        self._changed = asyncio.Event()

    def around(self, app: ASGIApp) -> ASGIApp:
        async def gated(scope: Scope, receive: Receive, send: Send) -> None:
            passed = 0

            async def send_gated(message: MutableMapping[str, Any]) -> None:
                nonlocal passed
                passed += message["type"] == "http.response.body"
                while passed > self._allowed:
                    await self._changed.wait()
                await send(message)

            await app(scope, receive, send_gated)

        return gated


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
async def emulated(gate: Gate) -> AsyncIterator[EmulatedProviders]:
    """Both providers, with the gate in front of them."""
    async with AsyncExitStack() as stack:
        sides = {}
        for name, build in (("gemini", build_gemini_app), ("anthropic", build_anthropic_app)):
            lines = Lines()
            state = build_state(script=lines)
            url = await stack.enter_async_context(emulating(gate.around(build(state))))
            sides[name] = Emulated(name=name, url=url, state=state, lines=lines)
        stack.callback(gate.open)
        yield EmulatedProviders(**sides)


@pytest.mark.parametrize("provider", BOTH)
async def test_a_stream_begun_on_one_is_resumed_on_the_other_while_it_runs(
    fleet: Fleet, store: PostgresStore, gate: Gate, provider: str
) -> None:
    conversation = await open_conversation(store, fleet.tenant.id, provider)
    fleet.emulated[provider].queue_replies(STORY)
    one, two = (await fleet.start()).api, (await fleet.start()).api
    async with one.listen("POST", turns(conversation.id), TASK) as (_, events):
        received = await take(events, 3)
    # The first connection is closed, and the answer is far from its end.
    path = f"{turns(conversation.id, 2)}/events"
    async with two.listen("GET", path, last_event_id=str(received[-1][0])) as (answer, events):
        assert answer.status_code == 200
        received += await take(events, 2)
        assert (await two.expect(200, "GET", turns(conversation.id, 2)))["state"] == "running"
        gate.open()
        received += [event async for event in events]
    assert [number for number, _, _ in received] == list(range(1, len(received) + 1))
    assert received[-1][1] == "turn.completed"
    assert "".join(data["text"] for _, name, data in received if name == "text.delta") == STORY.text
    assert await one.read_events("GET", path) == received
    assert await two.read_events("GET", path) == received
    assert len(fleet.emulated[provider].requests()) == 1


@pytest.mark.parametrize("listens", [False, True])
async def test_growth_is_announced_only_while_the_other_listens(
    fleet: Fleet, store: PostgresStore, gate: Gate, *, listens: bool
) -> None:
    conversation = await open_conversation(store, fleet.tenant.id, "gemini")
    fleet.emulated["gemini"].queue_replies(STORY)
    payloads: list[str] = []

    async def stored_bytes() -> int:
        chunks = await store.list_chunks(fleet.tenant.id, conversation.id, 2, attempt=1)
        return sum(len(chunk.data) for chunk in chunks)

    async def wait_for_checkpoint(after: int) -> int:
        async with asyncio.timeout(WAIT_SECONDS):
            while (stored := await stored_bytes()) <= after:  # noqa: ASYNC110  reason: nothing announces it
                await asyncio.sleep(0.01)
        return stored

    async with PostgresNotifications(fleet.options) as listener, AsyncExitStack() as stack:
        listener.listen(CONVERSATION_CHANNEL, on_payload=payloads.append, on_gap=lambda: None)
        await asyncio.wait_for(listener.wait_until_listening(), WAIT_SECONDS)
        one, two = (await fleet.start()).api, (await fleet.start()).api
        await one.expect(202, "POST", turns(conversation.id), TASK, prefer="respond-async")
        stored = await wait_for_checkpoint(after=0)
        if listens:
            path = f"{turns(conversation.id, 2)}/events"
            _, events = await stack.enter_async_context(two.listen("GET", path))
            await take(events, 3)
        gate.open(chunks=1)
        await wait_for_checkpoint(after=stored)
        gate.open()
        # Notifications arrive in the order of the commits, so that of the end is the last one.
        async with asyncio.timeout(WAIT_SECONDS):
            while not any(payload.endswith("e") for payload in payloads):  # noqa: ASYNC110  reason: as above
                await asyncio.sleep(0.01)
    assert any(payload.endswith("g") for payload in payloads) is listens


@pytest.mark.parametrize("provider", BOTH)
async def test_a_turn_of_one_is_cancelled_through_the_other(
    fleet: Fleet, store: PostgresStore, gate: Gate, provider: str
) -> None:
    conversation = await open_conversation(store, fleet.tenant.id, provider)
    fleet.emulated[provider].queue_replies(STORY)
    one, two = (await fleet.start()).api, (await fleet.start()).api
    async with one.listen("POST", turns(conversation.id), TASK) as (_, events):
        received = await take(events, 3)
        cancelled = await two.expect(200, "POST", f"/v1/conversations/{conversation.id}/cancel", {"turn_seq": 2})
        received += [event async for event in events]
    assert cancelled["turn"]["state"] == "cancelled"
    assert received[-1][1:] == ("turn.cancelled", cancelled)
    assert await two.read_events("GET", f"{turns(conversation.id, 2)}/events") == received
    gate.open()
    assert (await two.say(conversation.id, "Go on."))["turn"]["state"] == "complete"


@pytest.mark.parametrize("provider", BOTH)
async def test_a_request_repeated_on_the_other_waits_for_the_turn_of_the_first(
    fleet: Fleet, store: PostgresStore, gate: Gate, provider: str
) -> None:
    conversation = await open_conversation(store, fleet.tenant.id, provider)
    fleet.emulated[provider].queue_replies(STORY)
    one, two = (await fleet.start()).api, (await fleet.start()).api
    begun = await one.expect(202, "POST", turns(conversation.id), TASK, idempotency_key="once", prefer="respond-async")
    assert begun["turn"] == {"seq": 2, "kind": "model_response", "state": "running"}
    waiting = [
        asyncio.create_task(api.ask("POST", turns(conversation.id), TASK, idempotency_key="once")) for api in (one, two)
    ]
    assert (await two.ask("POST", turns(conversation.id), {"input": "Me too."})).status_code == 409
    gate.open()
    here, there = await asyncio.gather(*waiting)
    assert here.json() == there.json()
    assert there.headers["idempotency-replayed"] == "true"
    assert there.json()["turn"]["state"] == "complete"
    assert len(fleet.emulated[provider].requests()) == 1


async def test_a_turn_that_rarely_writes_still_renews_its_lease(fleet: Fleet, store: PostgresStore) -> None:
    conversation = await open_conversation(store, fleet.tenant.id, "gemini")
    one = (await fleet.start(lease_seconds=8, flush_seconds=60)).api
    await one.expect(202, "POST", turns(conversation.id), TASK, prefer="respond-async")
    expiry = "SELECT lease_expires_at FROM conversations"
    async with fleet.database.connection() as connection, asyncio.timeout(WAIT_SECONDS):
        first = await connection.fetchval(expiry)
        assert first is not None
        while (now := await connection.fetchval(expiry)) == first:  # noqa: ASYNC110  reason: there is no event to wait for
            await asyncio.sleep(0.05)
    assert now is not None
    assert now > first


async def take(events: AsyncIterator[StreamedEvent], count: int) -> list[StreamedEvent]:
    """The next events."""
    async with asyncio.timeout(WAIT_SECONDS):
        return [await anext(events) for _ in range(count)]
