"""Many clients on one conversation: every one is answered, in order, and disconnected ones are not waited for."""

import asyncio

import pytest

from server.app.settings import Settings
from server.app.wiring import Program
from server.conversation.conversation import OnBusy
from server.conversation.errors import ConversationBusy, QueueFull, ShuttingDown
from server.conversation.store import Accepted, AcceptOutcome, NewInput
from server.conversation.turn import ModelResponseTurn, TurnState, UserTaskTurn
from server.emulator.reply import FaultKind
from server.postgres.store import PostgresStore
from server.turns.handle import TurnHandle
from tests.conftest import StrataServer
from tests.faults.server_fleet import Fleet
from tests.support.builders import accept, answer, user_input
from tests.support.emulators import EmulatedProviders
from tests.support.http_driver import turns
from tests.support.turn_service_driver import open_conversation, read_events, say, text_of, user_task

CLIENTS = 50
WAIT_SECONDS = 30.0


@pytest.fixture
def server_settings(server_settings: Settings) -> Settings:
    return server_settings.model_copy(update={"queue_limit": CLIENTS})


class Crowd:
    """Clients of one conversation, which the first of them occupies until it is cancelled."""

    def __init__(self, server: StrataServer, conversation_id: str, holder: TurnHandle) -> None:
        self._server = server
        self.conversation_id = conversation_id
        self.holder = holder
        self.waiting: list[asyncio.Task[TurnHandle]] = []

    async def enter(self, text: str, on_busy: OnBusy = OnBusy.QUEUE) -> "asyncio.Task[TurnHandle]":
        """Start another one, and wait until it has its ticket."""
        before = await self.tickets()
        asked = user_task(self.conversation_id, text, on_busy=on_busy)
        task = asyncio.create_task(self._server.program.turn_service.take_turn(self._server.tenant.id, asked))
        self.waiting.append(task)
        async with asyncio.timeout(WAIT_SECONDS):
            while await self.tickets() == before and not task.done():  # noqa: ASYNC110  reason: there is no event to wait for
                await asyncio.sleep(0.005)
        return task

    async def tickets(self) -> int:
        async with self._server.program.database.connection() as connection:
            count: int = await connection.fetchval("SELECT count(*) FROM waiting_turns")
        return count

    async def let_in(self) -> None:
        """End the first one."""
        await self._server.program.turn_service.cancel_turn(self._server.tenant.id, self.conversation_id)
        assert (await self.holder.wait()).turn.state is TurnState.CANCELLED

    async def answers(self) -> list[str]:
        """The inputs after the first one, in order; each has its whole answer."""
        async with asyncio.timeout(WAIT_SECONDS):
            for task in self.waiting:
                assert (await (await task).wait()).turn.state is TurnState.COMPLETE
        page = await self._server.program.store.list_turns(self._server.tenant.id, self.conversation_id, limit=100)
        items = list(page.items)
        while page.next_cursor is not None:
            page = await self._server.program.store.list_turns(
                self._server.tenant.id, self.conversation_id, limit=100, cursor=page.next_cursor
            )
            items.extend(page.items)
        assert [turn.seq for turn in items] == list(range(1, len(items) + 1))
        assert all(isinstance(turn, ModelResponseTurn) for turn in items[1::2])
        return [text_of_task(turn) for turn in items[2::2]]


def text_of_task(turn: object) -> str:
    assert isinstance(turn, UserTaskTurn)
    return "".join(getattr(block, "text", "") for block in turn.blocks)


@pytest.fixture
async def crowd(strata_server: StrataServer, emulated: EmulatedProviders) -> Crowd:
    program, tenant = strata_server.program, strata_server.tenant
    conversation = await open_conversation(program.store, tenant.id, "gemini")
    emulated.gemini.inject_fault(FaultKind.SILENCE)
    holder = await program.turn_service.take_turn(tenant.id, user_task(conversation.id, "First."))
    async with asyncio.timeout(WAIT_SECONDS):
        # Cancelled any earlier, it would leave its silence fault to the next request.
        while not emulated.gemini.requests():  # noqa: ASYNC110  reason: there is no event to wait for
            await asyncio.sleep(0.005)
    return Crowd(strata_server, conversation.id, holder)


async def test_fifty_clients_are_answered_in_the_order_of_their_arrival(crowd: Crowd) -> None:
    texts = [f"Number {number}." for number in range(CLIENTS)]
    for text in texts:
        await crowd.enter(text)
    assert await crowd.tickets() == CLIENTS
    await crowd.let_in()
    assert await crowd.answers() == texts
    assert await crowd.tickets() == 0


async def test_fifty_concurrent_clients_over_two_servers_are_all_answered(fleet: Fleet, store: PostgresStore) -> None:
    conversation = await open_conversation(store, fleet.tenant.id, "anthropic")
    apis = [(await fleet.start()).api for _ in range(2)]
    asked = [
        apis[number % 2].expect(200, "POST", turns(conversation.id), {"input": f"Number {number}.", "on_busy": "queue"})
        for number in range(CLIENTS)
    ]
    answers = await asyncio.gather(*asked)
    assert sorted(given["turn"]["seq"] for given in answers) == list(range(2, 2 * CLIENTS + 1, 2))
    assert {given["turn"]["state"] for given in answers} == {"complete"}
    assert len(fleet.emulated.anthropic.requests()) == CLIENTS
    page = await apis[0].expect(200, "GET", f"{turns(conversation.id)}?limit=100")
    assert [turn["seq"] for turn in page["data"]] == list(range(1, 2 * CLIENTS + 1))
    inputs = {block["text"] for turn in page["data"][::2] for block in turn["blocks"]}
    assert inputs == {f"Number {number}." for number in range(CLIENTS)}
    # Each client got the answer to its own input.
    for number, given in enumerate(answers):
        assert page["data"][given["turn"]["seq"] - 2]["blocks"][0]["text"] == f"Number {number}."


async def test_a_full_queue_refuses_further_clients(
    crowd: Crowd, strata_server: StrataServer, server_settings: Settings
) -> None:
    program, tenant = strata_server.program, strata_server.tenant
    tickets = [
        await program.store.enter_queue(tenant.id, crowd.conversation_id, limit=CLIENTS, seconds=60)
        for _ in range(server_settings.queue_limit)
    ]
    late = await crowd.enter("Late.")
    with pytest.raises(QueueFull):
        await late
    for ticket in tickets:
        await program.store.leave_queue(crowd.conversation_id, ticket)
    crowd.waiting.clear()
    await crowd.enter("Now.")
    await crowd.let_in()
    assert await crowd.answers() == ["Now."]


async def test_a_dead_waiter_is_waited_for_only_until_its_ticket_expires(
    crowd: Crowd, strata_server: StrataServer
) -> None:
    program, tenant = strata_server.program, strata_server.tenant
    await program.store.enter_queue(tenant.id, crowd.conversation_id, limit=CLIENTS, seconds=2)
    task = await crowd.enter("Behind the dead.")
    await crowd.let_in()
    with pytest.raises(ConversationBusy):
        await program.turn_service.take_turn(tenant.id, user_task(crowd.conversation_id, "Me."))
    assert not task.done()
    assert await crowd.answers() == ["Behind the dead."]


async def test_a_client_that_does_not_wait_is_refused_while_others_wait(
    crowd: Crowd, strata_server: StrataServer
) -> None:
    program, tenant = strata_server.program, strata_server.tenant
    ticket = await program.store.enter_queue(tenant.id, crowd.conversation_id, limit=CLIENTS, seconds=60)
    await crowd.let_in()
    with pytest.raises(ConversationBusy):
        await program.turn_service.take_turn(tenant.id, user_task(crowd.conversation_id, "Me."))
    await program.store.leave_queue(crowd.conversation_id, ticket)
    after = await say(program.turn_service, tenant.id, user_task(crowd.conversation_id, "Me."))
    assert text_of(after)


async def test_a_superseding_turn_goes_before_waiting_ones(crowd: Crowd) -> None:
    await crowd.enter("One.")
    await crowd.enter("Two.")
    await crowd.enter("At once.", OnBusy.SUPERSEDE)
    assert (await crowd.holder.wait()).turn.state is TurnState.CANCELLED
    assert await crowd.answers() == ["At once.", "One.", "Two."]


async def test_a_superseding_turn_ends_what_ran_when_it_came_and_not_a_newer_one(
    crowd: Crowd, strata_server: StrataServer
) -> None:
    store, tenant = strata_server.program.store, strata_server.tenant
    knocks: asyncio.Queue[NewInput] = asyncio.Queue()
    let_in = asyncio.Event()

    async def accept_later(turn: NewInput) -> AcceptOutcome:
        knocks.put_nowait(turn)
        if not let_in.is_set():
            raise ConversationBusy
        return await store.accept_turn(tenant.id, turn)

    queue = strata_server.program.turn_service._queue  # noqa: SLF001  reason: two at once cannot be timed from outside
    older = asyncio.create_task(
        queue.wait_in(tenant.id, user_input(crowd.conversation_id, "Older."), OnBusy.SUPERSEDE, accept_later)
    )
    assert (await crowd.holder.wait()).turn.state is TurnState.CANCELLED
    ticket = await store.enter_queue(tenant.id, crowd.conversation_id, limit=1, seconds=60, first=True)
    newer = await accept(store, tenant.id, user_input(crowd.conversation_id, "Newer.", ticket=ticket))
    while not knocks.empty():
        knocks.get_nowait()
    async with asyncio.timeout(WAIT_SECONDS):
        await knocks.get()
        await knocks.get()
    assert await store.append_chunks(newer.lease, [], lease_seconds=60) is False
    await store.finish_turn(newer.lease, answer())
    let_in.set()
    outcome = await older
    assert isinstance(outcome, Accepted)
    assert outcome.seq == 5
    await store.finish_turn(outcome.lease, answer())
    assert await crowd.tickets() == 0


async def test_a_stopping_server_ends_waiting_requests(crowd: Crowd, strata_server: StrataServer) -> None:
    for text in ("One.", "Two."):
        await crowd.enter(text)
    draining = asyncio.create_task(strata_server.program.running_turns.drain(WAIT_SECONDS))
    async with asyncio.timeout(WAIT_SECONDS):
        for task in crowd.waiting:
            with pytest.raises(ShuttingDown):
                await task
    assert await crowd.tickets() == 0
    await crowd.let_in()
    report = await draining
    assert report.cancelled_count == 0


async def test_a_waiter_whose_ticket_expired_gets_another(
    strata_server: StrataServer, emulated: EmulatedProviders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.turns.queue._KEEP_SECONDS", 0.0)
    program, tenant = strata_server.program, strata_server.tenant
    conversation = await open_conversation(program.store, tenant.id, "gemini")
    emulated.gemini.inject_fault(FaultKind.SILENCE, after_chunks=3)
    holder = await program.turn_service.take_turn(tenant.id, user_task(conversation.id))
    await read_events(holder, 2)
    waiting = asyncio.create_task(
        program.turn_service.take_turn(tenant.id, user_task(conversation.id, "Next.", on_busy=OnBusy.QUEUE))
    )
    first = await _ticket_after(program, 0)
    async with program.database.connection() as connection:
        await connection.execute("DELETE FROM waiting_turns")
    assert await _ticket_after(program, first) > first
    await program.turn_service.cancel_turn(tenant.id, conversation.id)
    assert (await (await waiting).wait()).turn.state is TurnState.COMPLETE


async def _ticket_after(program: Program, known: int) -> int:
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            async with program.database.connection() as connection:
                ticket: int | None = await connection.fetchval("SELECT max(ticket) FROM waiting_turns")
            if ticket is not None and ticket > known:
                return ticket
            await asyncio.sleep(0.01)
