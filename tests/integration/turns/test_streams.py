"""Streams of turns: from any event, in any process, while they run and long after."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.app.settings import Settings
from server.app.wiring import Program, open_program
from server.conversation.errors import ConversationNotFound, TurnNotFound
from server.conversation.event import TextDelta, TurnEnded, TurnEvent
from server.conversation.turn import TurnState
from server.emulator.reply import FaultKind, Reply, ToolCall
from server.turns.live import LiveHandle, LiveTurn
from server.turns.stored import StoredHandle
from tests.conftest import StrataServer
from tests.support.emulators import BOTH, EmulatedProviders
from tests.support.turn_service_driver import (
    WAIT_SECONDS,
    drain,
    open_conversation,
    read_all,
    read_events,
    say,
    settle,
    user_task,
)

STORY = Reply(
    thinking="What would be nice?",
    text="Once upon a time there was a fox who lived by the sea and never said a word.",
    tool_calls=(ToolCall(name="get_weather", arguments={"city": "Oslo"}),),
)


@pytest.fixture
async def neighbour(
    strata_server: StrataServer,  # noqa: ARG001  reason: it creates the tenant, after the tables were emptied
    server_settings: Settings,
    emulated: EmulatedProviders,
) -> AsyncIterator[Program]:
    """Another server on the same database."""
    async with (
        emulated.open(server_settings) as providers,
        open_program(emulated.point(server_settings), providers=providers) as program,
    ):
        yield program


@pytest.mark.parametrize("provider", BOTH)
class TestReadingAgain:
    async def test_gives_the_same_events_with_the_same_numbers(
        self, strata_server: StrataServer, neighbour: Program, emulated: EmulatedProviders, provider: str
    ) -> None:
        program, tenant = strata_server.program, strata_server.tenant
        conversation = await open_conversation(program.store, tenant.id, provider)
        emulated[provider].queue_replies(STORY)
        live = await read_all(await program.turn_service.take_turn(tenant.id, user_task(conversation.id)))
        await settle(program)
        for elsewhere in (program, neighbour):
            handle = await elsewhere.turn_service.follow_turn(tenant.id, conversation.id, 2)
            assert isinstance(handle, StoredHandle)
            for after in range(len(live) + 1):
                assert await read_all(handle, after) == live[after:]

    @pytest.mark.parametrize(
        "kind",
        [FaultKind.CUT, FaultKind.OVERLOADED_MID_STREAM, FaultKind.EARLY_END, FaultKind.MALFORMED_JSON],
    )
    async def test_gives_the_same_events_of_a_failed_turn(
        self, strata_server: StrataServer, emulated: EmulatedProviders, provider: str, kind: FaultKind
    ) -> None:
        program, tenant = strata_server.program, strata_server.tenant
        conversation = await open_conversation(program.store, tenant.id, provider)
        emulated[provider].queue_replies(STORY)
        emulated[provider].inject_fault(kind, after_chunks=5)
        live = await read_all(await program.turn_service.take_turn(tenant.id, user_task(conversation.id)))
        ended = live[-1][1]
        assert isinstance(ended, TurnEnded)
        assert ended.turn.state is TurnState.FAILED
        await settle(program)
        handle = await program.turn_service.follow_turn(tenant.id, conversation.id, 2)
        assert await read_all(handle) == live

    async def test_works_when_the_bytes_are_deleted(
        self, strata_server: StrataServer, emulated: EmulatedProviders, provider: str
    ) -> None:
        program, tenant = strata_server.program, strata_server.tenant
        conversation = await open_conversation(program.store, tenant.id, provider)
        emulated[provider].queue_replies(STORY)
        live = await read_all(await program.turn_service.take_turn(tenant.id, user_task(conversation.id)))
        async with program.database.connection() as connection:
            await connection.execute("UPDATE calls SET raw_response = NULL")
        await settle(program)
        later = await read_all(await program.turn_service.follow_turn(tenant.id, conversation.id, 2))
        assert later[-1][1] == live[-1][1]
        assert _text_of(later) == _text_of(live)


@pytest.mark.parametrize("provider", BOTH)
class TestAnotherProcess:
    async def test_follows_a_running_turn_to_its_end(
        self, strata_server: StrataServer, neighbour: Program, emulated: EmulatedProviders, provider: str
    ) -> None:
        program, tenant = strata_server.program, strata_server.tenant
        conversation = await open_conversation(program.store, tenant.id, provider)
        emulated[provider].queue_replies(STORY)
        emulated[provider].inject_fault(FaultKind.SILENCE, after_chunks=6)
        handle = await program.turn_service.take_turn(tenant.id, user_task(conversation.id))
        there = await neighbour.turn_service.follow_turn(tenant.id, conversation.id, handle.seq)
        assert isinstance(there, StoredHandle)
        reader = there.read()
        received: list[tuple[int, TurnEvent]] = []
        while len(received) < 3:
            events = await reader.next(WAIT_SECONDS)
            assert events
            received.extend(events)
        listening = asyncio.create_task(drain(reader))
        await neighbour.turn_service.cancel_turn(tenant.id, conversation.id)
        received.extend(await listening)
        assert received == await read_all(handle)
        ended = received[-1][1]
        assert isinstance(ended, TurnEnded)
        assert ended.turn.state is TurnState.CANCELLED

    async def test_continues_from_any_event(
        self, strata_server: StrataServer, neighbour: Program, emulated: EmulatedProviders, provider: str
    ) -> None:
        program, tenant = strata_server.program, strata_server.tenant
        conversation = await open_conversation(program.store, tenant.id, provider)
        emulated[provider].queue_replies(STORY)
        emulated[provider].inject_fault(FaultKind.SLOW)
        handle = await program.turn_service.take_turn(tenant.id, user_task(conversation.id))
        there = await neighbour.turn_service.follow_turn(tenant.id, conversation.id, handle.seq)
        readers = [asyncio.create_task(read_all(there, after)) for after in range(4)]
        # Slow means seconds between chunks; half of the answer is enough here.
        await read_events(handle, 3)
        await program.turn_service.cancel_turn(tenant.id, conversation.id)
        live = await read_all(handle)
        for after, reading in enumerate(readers):
            assert await reading == live[after:]

    async def test_a_duplicate_there_attaches_to_the_turn_here(
        self, strata_server: StrataServer, neighbour: Program, emulated: EmulatedProviders, provider: str
    ) -> None:
        program, tenant = strata_server.program, strata_server.tenant
        conversation = await open_conversation(program.store, tenant.id, provider)
        emulated[provider].inject_fault(FaultKind.SILENCE, after_chunks=3)
        request = user_task(conversation.id, idempotency_key="once")
        here = await program.turn_service.take_turn(tenant.id, request)
        there = await neighbour.turn_service.take_turn(tenant.id, request)
        assert there.duplicate
        waiting = asyncio.create_task(there.wait())
        await neighbour.turn_service.cancel_turn(tenant.id, conversation.id)
        assert await waiting == await here.wait()
        assert len(emulated[provider].requests()) <= 1


class TestReadersOfOneTurn:
    async def test_share_what_was_read_while_any_of_them_reads(
        self, strata_server: StrataServer, emulated: EmulatedProviders
    ) -> None:
        program, tenant = strata_server.program, strata_server.tenant
        conversation = await open_conversation(program.store, tenant.id, "gemini")
        emulated["gemini"].queue_replies(STORY)
        live = await read_all(await program.turn_service.take_turn(tenant.id, user_task(conversation.id)))
        await settle(program)
        handle = await program.turn_service.follow_turn(tenant.id, conversation.id, 2)
        first, second = handle.read(), handle.read(1)
        assert first.encodings is second.encodings
        mark = first.encodings[1] = b"as encoded by the first"
        assert await drain(first) == live
        assert second.encodings[1] is mark
        assert await drain(second) == live[1:]
        del first, second
        assert not handle.read().encodings

    @given(steps=st.lists(st.integers(min_value=0, max_value=6), max_size=4))
    async def test_one_that_leaves_at_any_moment_does_not_affect_the_others(
        self, steps: list[int], strata_server: StrataServer, emulated: EmulatedProviders
    ) -> None:
        program, tenant = strata_server.program, strata_server.tenant
        conversation = await open_conversation(program.store, tenant.id, "anthropic")
        emulated["anthropic"].queue_replies(STORY)
        live = await read_all(await program.turn_service.take_turn(tenant.id, user_task(conversation.id)))
        await settle(program)
        handle = await program.turn_service.follow_turn(tenant.id, conversation.id, 2)
        staying = handle.read()
        for step in steps:
            leaving = asyncio.create_task(drain(handle.read(1)))
            for _ in range(step):
                await asyncio.sleep(0.0005)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
        assert await drain(staying) == live


class TestWhatCannotBeFollowed:
    async def test_unknown_numbers_input_and_other_tenants(self, strata_server: StrataServer) -> None:
        program, tenant = strata_server.program, strata_server.tenant
        conversation = await open_conversation(program.store, tenant.id, "gemini")
        await say(program.turn_service, tenant.id, user_task(conversation.id))
        for seq in (0, 1, 3, 4, 2**70, -1):
            with pytest.raises(TurnNotFound):
                await program.turn_service.follow_turn(tenant.id, conversation.id, seq)
        other = await program.key_ring.create_tenant("other")
        with pytest.raises(ConversationNotFound):
            await program.turn_service.follow_turn(other.id, conversation.id, 2)


class TestTheLiveTurn:
    @given(
        events=st.lists(st.text(max_size=3), max_size=20),
        readers=st.lists(st.integers(min_value=0, max_value=25), min_size=1, max_size=5),
        data=st.data(),
    )
    async def test_every_reader_gets_every_event_after_its_position_once(
        self, events: list[str], readers: list[int], data: st.DataObject
    ) -> None:
        live = LiveTurn(tenant_id="t", conversation_id="c", input_seq=1, seq=2)
        handle = LiveHandle(live=live)
        open_readers = [handle.read(after) for after in readers]
        received: list[list[tuple[int, TurnEvent]]] = [[] for _ in readers]
        for text in events:
            live.append([TextDelta(text=text)])
            chosen = data.draw(st.integers(min_value=0, max_value=len(readers) - 1))
            received[chosen].extend(await open_readers[chosen].next(0) or ())
        whole = list(enumerate(live.events, start=1))
        for after, reader, got in zip(readers, open_readers, received, strict=True):
            got.extend(await reader.next(0) or ())
            assert got == whole[after:]


def _text_of(events: list[tuple[int, TurnEvent]]) -> str:
    return "".join(event.text for _, event in events if isinstance(event, TextDelta))
