"""Any events in any order happen to conversations, and a small model of the expected content is compared with the
store.

Hypothesis chooses the steps; the rules of the machine run on the loop of the server.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from pydantic import SecretStr

from server.app.settings import Settings
from server.app.wiring import Program, open_program
from server.conversation.block import TextBlock, ToolCallBlock
from server.conversation.conversation import ConversationState
from server.conversation.errors import ConversationBusy, ConversationNotFound, HistoryRuleBroken, TurnNotRunning
from server.conversation.event import TurnEnded
from server.conversation.turn import ModelResponseTurn, ToolResponseTurn, Turn, TurnState, UserTaskTurn
from server.emulator.reply import FaultKind, Reply
from server.postgres.engine import Database
from server.turns.request import TurnRequest
from server.turns.service import TurnService
from tests.support.conversation_driver import (
    ConversationDriver,
    assert_all_accepted,
    assert_no_break,
    assert_rebuilds,
    eventually,
    read_events,
    start_driver,
    text_reply,
    tool_reply,
    until_asked,
)
from tests.support.emulators import BOTH, EmulatedProviders
from tests.support.turn_service_driver import settle, tool_results, user_task
from tests.support.wire_proxy import WireProxy, open_proxy

LONG = "One two three four five six seven eight."
SOON = 0.02
"""Seconds between two polls of a running answer."""

Result = TypeVar("Result")
replies = st.sampled_from(
    [text_reply("Fine."), text_reply(LONG), tool_reply("Oslo"), tool_reply("Oslo", "Bergen", "Tromsø")]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A server, another one on the same database that is going to die, the connection of the latter, and the
    providers.
    """

    loop: asyncio.AbstractEventLoop
    program: Program
    doomed: Program
    wire: WireProxy
    tenant_id: str
    emulated: EmulatedProviders


@pytest.fixture
async def world(
    database: Database,
    server_settings: Settings,
    emulated: EmulatedProviders,
) -> AsyncIterator[World]:
    hasty = emulated.point(server_settings).model_copy(update={"flush_seconds": SOON})
    async with (
        emulated.open(server_settings) as providers,
        open_proxy(database.options.url) as wire,
        open_program(hasty, providers=providers) as program,
        open_program(hasty.model_copy(update={"database_url": SecretStr(wire.url())}), providers=providers) as doomed,
    ):
        tenant = await program.key_ring.create_tenant("acme")
        yield World(
            loop=asyncio.get_running_loop(),
            program=program,
            doomed=doomed,
            wire=wire,
            tenant_id=tenant.id,
            emulated=emulated,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Known:
    """The expected content of one conversation."""

    driver: ConversationDriver
    provider: str
    """The provider of the next task."""
    recorded: list[tuple[type, TurnState, str]] = field(default_factory=list)
    """For each turn its kind, its end, and its text; for a turn that did not complete, the text that it should have
    had.
    """
    pending: tuple[str, ...] = ()
    asked: str = ""
    """The provider of the pending calls."""
    revision: int = 0
    seen: list[Turn] = field(default_factory=list)
    """The turns at the last check: they never change."""


class TurnMachine(RuleBasedStateMachine):
    """One example: some conversations of one tenant."""

    world: World
    conversations = Bundle("conversations")

    def __init__(self) -> None:
        super().__init__()
        self._known: list[Known] = []
        self._gone: list[str] = []
        self._count = 0
        # A failed example may have left something behind.
        self._calm()
        for name in BOTH:
            self.world.emulated[name].state.request_log.clear()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self.world.loop.run_until_complete(asyncio.wait_for(work, 60))

    # --- what may happen

    @rule(target=conversations, provider=st.sampled_from(BOTH))
    def begin(self, provider: str) -> Known:
        driver = self.run(start_driver(self.world.program, self.world.tenant_id, self.world.emulated, provider))
        known = Known(driver=driver, provider=provider)
        self._known.append(known)
        return known

    @rule(known=conversations, reply=replies, picture=st.booleans())
    def send(self, known: Known, reply: Reply, *, picture: bool) -> None:
        text = self._text()
        if known.pending:
            self._refused(user_task(known.driver.conversation_id, text))
        else:
            ended = self.run(known.driver.task(text, reply, picture=picture))
            self._note(known, UserTaskTurn, text, ended, reply)

    @rule(known=conversations, reply=replies)
    def abandon(self, known: Known, reply: Reply) -> None:
        text = self._text()
        ended = self.run(known.driver.task(text, reply, abandons_calls=True))
        self._note(known, UserTaskTurn, text, ended, reply)

    @rule(known=conversations, reply=replies)
    def answer(self, known: Known, reply: Reply) -> None:
        if not known.pending:
            self._refused(tool_results(known.driver.conversation_id, ["call_of_nobody"]))
            return
        # In any order.
        ended = self.run(known.driver.answer_calls(known.pending[::-1], reply))
        self._note(known, ToolResponseTurn, "", ended, reply)

    @rule(known=conversations)
    def answer_in_part(self, known: Known) -> None:
        self._refused(tool_results(known.driver.conversation_id, known.pending[1:]), missing=known.pending[:1])

    @rule(known=conversations)
    def answer_a_stranger(self, known: Known) -> None:
        self._refused(tool_results(known.driver.conversation_id, [*known.pending, "call_of_nobody"]))

    @rule(known=conversations, reply=replies, events=st.integers(0, 4))
    def cancel(self, known: Known, reply: Reply, events: int) -> None:
        text, kind = self._next_input(known)
        ended = self.run(self._cancel(known, self._request(known, text), reply, events))
        # A short answer may have been complete before it could be cancelled.
        self._note(known, kind, text, ended, reply, states={TurnState.CANCELLED, TurnState.COMPLETE})

    @rule(known=conversations)
    def cancel_nothing(self, known: Known) -> None:
        with pytest.raises(TurnNotRunning):
            self.run(self.world.program.turn_service.cancel_turn(self.world.tenant_id, known.driver.conversation_id))

    @rule(known=conversations, reply=replies, chunks=st.integers(1, 6))
    def fail(self, known: Known, reply: Reply, chunks: int) -> None:
        text, kind = self._next_input(known)
        self._spoil(FaultKind.CUT, reply, chunks)
        ended = self.run(_say(self.world.program.turn_service, self.world.tenant_id, self._request(known, text)))
        self._note(known, kind, text, ended, reply, states={TurnState.FAILED, TurnState.COMPLETE})

    @rule(known=conversations, reply=replies, events=st.integers(0, 4), flushed=st.booleans())
    def crash(self, known: Known, reply: Reply, events: int, *, flushed: bool) -> None:
        text, kind = self._next_input(known)
        ended = self.run(self._crash(known, self._request(known, text), reply, events, flushed=flushed))
        self._note(known, kind, text, ended, reply, states={TurnState.INTERRUPTED, TurnState.COMPLETE})

    @rule(target=conversations, known=conversations, data=st.data())
    def fork(self, known: Known, data: st.DataObject) -> Any:
        if not known.recorded:
            return multiple()
        at_seq = data.draw(st.integers(1, len(known.recorded)), label="at_seq")
        forked = Known(driver=self.run(known.driver.fork(at_seq)), provider=known.provider)
        forked.recorded = known.recorded[:at_seq]
        forked.seen = [_without_revision(turn) for turn in known.seen[:at_seq]]
        last = known.seen[at_seq - 1]
        if not isinstance(last, ModelResponseTurn):
            forked.recorded.append((ModelResponseTurn, TurnState.CANCELLED, ""))
        elif last.state is TurnState.COMPLETE:
            forked.pending, forked.asked = _calls_of(last), last.provider
        self._known.append(forked)
        return forked

    @rule(known=consumes(conversations))
    def delete(self, known: Known) -> None:
        store, tenant_id, conversation_id = self.world.program.store, self.world.tenant_id, known.driver.conversation_id
        planned = self.run(store.erase_conversation(tenant_id, conversation_id, dry_run=True))
        assert planned.rows.get("turns", 0) == len(known.recorded)
        assert self.run(store.erase_conversation(tenant_id, conversation_id)).rows == planned.rows
        self._known.remove(known)
        self._gone.append(conversation_id)

    @rule(known=conversations, todo=st.text(max_size=10))
    def edit_context(self, known: Known, todo: str) -> None:
        self.run(known.driver.change(context={"todos": [todo]}))
        known.revision += 1

    @rule(known=conversations, provider=st.sampled_from(BOTH), tone=st.sampled_from(["friendly", "gruff"]))
    def edit_assistant(self, known: Known, provider: str, tone: str) -> None:
        self.run(known.driver.switch(provider, description=f"Is {tone}."))
        known.provider = provider
        known.revision += 1

    # --- what must hold

    @invariant()
    def check(self) -> None:
        """After every step everything expected is present, unchanged, and nothing else."""
        for name in BOTH:
            assert_all_accepted(self.world.emulated[name].requests())
            self.world.emulated[name].state.request_log.clear()
        for known in self._known:
            self.run(self._check_one(known))
        for conversation_id in self._gone:
            with pytest.raises(ConversationNotFound):
                self.run(self.world.program.store.load_conversation(self.world.tenant_id, conversation_id))
            with pytest.raises(ConversationNotFound):
                self.run(self.world.program.store.list_turns(self.world.tenant_id, conversation_id))

    def teardown(self) -> None:
        for known in self._known:
            self.run(assert_rebuilds(known.driver))
            assert_no_break(self.run(known.driver.calls()))

    async def _check_one(self, known: Known) -> None:
        turns = await known.driver.turns()
        assert [turn.seq for turn in turns] == list(range(1, len(known.recorded) + 1))
        assert turns[: len(known.seen)] == known.seen
        for turn, (kind, state, text) in zip(turns, known.recorded, strict=True):
            assert type(turn) is kind
            assert _state_of(turn) is state
            recorded = _text_of(turn)
            assert recorded == text if state is TurnState.COMPLETE else text.startswith(recorded)
        known.seen = turns
        conversation = await self.world.program.store.load_conversation(
            self.world.tenant_id, known.driver.conversation_id
        )
        assert conversation.revision == known.revision
        assert conversation.next_seq == len(known.recorded) + 1
        assert conversation.pending_call_ids == known.pending
        assert tuple(call.id for call in conversation.pending_calls) == known.pending
        waits = ConversationState.AWAITING_TOOLS if known.pending else ConversationState.IDLE
        assert conversation.state is waits

    # --- how it is done

    def _text(self) -> str:
        self._count += 1
        return f"Task {self._count}."

    def _next_input(self, known: Known) -> tuple[str, type]:
        """The pending results, or otherwise a task."""
        return ("", ToolResponseTurn) if known.pending else (self._text(), UserTaskTurn)

    def _request(self, known: Known, text: str) -> TurnRequest:
        if known.pending:
            return tool_results(known.driver.conversation_id, known.pending)
        return user_task(known.driver.conversation_id, text)

    def _refused(self, request: TurnRequest, missing: tuple[str, ...] = ()) -> None:
        with pytest.raises(HistoryRuleBroken) as refused:
            self.run(self.world.program.turn_service.take_turn(self.world.tenant_id, request))
        reported = refused.value.details["missing_ids"]
        assert isinstance(reported, list)
        assert set(missing) <= set(reported)

    def _note(
        self,
        known: Known,
        kind: type,
        text: str,
        ended: TurnEnded,
        reply: Reply,
        states: frozenset[TurnState] | set[TurnState] = frozenset({TurnState.COMPLETE}),
    ) -> None:
        """A turn was taken: update the model."""
        asked = known.asked if kind is ToolResponseTurn else known.provider
        assert ended.turn.provider == asked
        assert ended.turn.state in states
        calls = _calls_of(ended.turn) if ended.turn.state is TurnState.COMPLETE else ()
        if ended.turn.state is TurnState.COMPLETE:
            assert len(calls) == len(reply.tool_calls)
        known.recorded += [(kind, TurnState.COMPLETE, text), (ModelResponseTurn, ended.turn.state, reply.text)]
        known.pending, known.asked = calls, asked
        known.revision += 2
        self._calm()

    def _spoil(self, kind: FaultKind, reply: Reply, chunks: int) -> None:
        for name in BOTH:
            self.world.emulated[name].queue_replies(reply)
            self.world.emulated[name].inject_fault(kind, after_chunks=chunks)

    def _calm(self) -> None:
        for name in BOTH:
            self.world.emulated[name].lines.turns.clear()
            self.world.emulated[name].state.faults.clear()

    async def _cancel(self, known: Known, request: TurnRequest, reply: Reply, events: int) -> TurnEnded:
        service, tenant_id = self.world.program.turn_service, self.world.tenant_id
        self._spoil(FaultKind.SILENCE, reply, events + 2 if events else 0)
        handle = await service.take_turn(tenant_id, request)
        with pytest.raises(ConversationBusy):
            await service.take_turn(tenant_id, user_task(known.driver.conversation_id, "Me too."))
        await until_asked(self.world.emulated)
        await read_events(handle, min(events, 2))
        await service.cancel_turn(tenant_id, known.driver.conversation_id)
        return await handle.wait()

    async def _is_flushed(self, conversation_id: str, seq: int) -> bool:
        """Whether some of the answer is durable."""
        return bool(await self.world.program.store.list_chunks(self.world.tenant_id, conversation_id, seq, attempt=1))

    async def _crash(
        self, known: Known, request: TurnRequest, reply: Reply, events: int, *, flushed: bool
    ) -> TurnEnded:
        """One server takes the turn and falls silent for ever; the other one recovers it."""
        world, conversation_id = self.world, known.driver.conversation_id
        self._spoil(FaultKind.SILENCE, reply, events + 2 if events else 0)
        handle = await world.doomed.turn_service.take_turn(world.tenant_id, request)
        await until_asked(self.world.emulated)
        await read_events(handle, min(events, 2))
        if flushed and events:
            await eventually(lambda: self._is_flushed(conversation_id, handle.seq))
        world.wire.swallow()
        await eventually(lambda: self._is_recovered(conversation_id))
        # What the dead had under way arrives too late, and must not be written.
        world.wire.flow()
        await _kill(world.doomed)
        return await (await world.program.turn_service.follow_turn(world.tenant_id, conversation_id, handle.seq)).wait()

    async def _is_recovered(self, conversation_id: str) -> bool:
        """Whoever comes after the lease has run out ends the turn; this one wants nothing else."""
        program, tenant_id = self.world.program, self.world.tenant_id
        await program.store.expire_leases(self.world.doomed.owner)
        try:
            await program.turn_service.take_turn(tenant_id, tool_results(conversation_id, ["call_of_nobody"]))
        except HistoryRuleBroken:
            return True
        except ConversationBusy:
            # A last heartbeat was still running.
            return False
        raise AssertionError


async def _kill(program: Program) -> None:
    for task in asyncio.all_tasks():
        if task.get_name() == "turn":
            task.cancel()
    await settle(program)


async def _say(service: TurnService, tenant_id: str, request: TurnRequest) -> TurnEnded:
    return await (await service.take_turn(tenant_id, request)).wait()


def _state_of(turn: Turn) -> TurnState:
    return turn.state if isinstance(turn, ModelResponseTurn) else TurnState.COMPLETE


def _text_of(turn: Turn) -> str:
    return "".join(block.text for block in turn.blocks if isinstance(block, TextBlock))


def _calls_of(turn: ModelResponseTurn) -> tuple[str, ...]:
    return tuple(block.id for block in turn.blocks if isinstance(block, ToolCallBlock))


def _without_revision(turn: Turn) -> Turn:
    return replace(turn, revision=None) if isinstance(turn, ModelResponseTurn) else turn


def test_in_any_sequence_nothing_is_lost_and_nothing_is_refused(world: World) -> None:
    machine = type("Machine", (TurnMachine,), {"world": world})
    run_state_machine_as_test(machine, settings=settings(max_examples=20, stateful_step_count=15))
