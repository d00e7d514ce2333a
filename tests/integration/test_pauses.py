"""Answers that Claude pauses: the server continues them, as further calls of one turn, and nothing shows the seams."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence

import pytest

from server.block import TextBlock
from server.continuation import continued_attempts
from server.emulator.reply import Fault, FaultKind
from server.provider_choice import ANTHROPIC
from server.retry_policy import RetryPolicy
from server.settings import Settings
from server.stored_turn import StoredHandle
from server.turn import StopReason, TurnState
from server.turn_event import TurnEnded, TurnEvent
from server.usage import add_usages
from server.wiring import Program, open_program
from tests.conftest import StrataServer
from tests.emulated import EmulatedProviders
from tests.turn_talk import read_all, settle, user_task
from tests.turn_walk import (
    Walk,
    assert_all_accepted,
    assert_no_break,
    assert_rebuilds,
    begin_walk,
    eventually,
    messages_of,
    tells,
    withheld_by,
)

MODELS = ("claude-fable-5-2", "claude-opus-5")
PAUSE = Fault(kind=FaultKind.PAUSE)


@pytest.fixture
async def neighbour(
    strata_server: StrataServer,  # noqa: ARG001  reason: it makes the tenant, after the tables were emptied
    server_settings: Settings,
    emulated: EmulatedProviders,
) -> AsyncIterator[Program]:
    """Another server on the same database."""
    async with (
        emulated.open(server_settings) as providers,
        open_program(emulated.point(server_settings), providers=providers) as program,
    ):
        yield program


async def begin(server: StrataServer, emulated: EmulatedProviders, model: str = MODELS[0]) -> Walk:
    return await begin_walk(server.program, server.tenant.id, emulated, ANTHROPIC, model=model)


async def listen(walk: Walk, text: str) -> tuple[TurnEnded, list[tuple[int, TurnEvent]]]:
    """A task, and its events as they come."""
    handle = await walk.program.turn_service.take_turn(walk.tenant_id, user_task(walk.conversation_id, text))
    heard = await read_all(handle)
    walk.ended = await handle.wait()
    walk.calm()
    return walk.ended, heard


async def assert_read_again(walk: Walk, heard: Sequence[tuple[int, TurnEvent]], seq: int) -> None:
    """The stored bytes give the same events under the same numbers, from any event on."""
    assert [number for number, _ in heard] == list(range(1, len(heard) + 1))
    await settle(walk.program)
    handle = await walk.program.turn_service.follow_turn(walk.tenant_id, walk.conversation_id, seq)
    assert isinstance(handle, StoredHandle)
    for after in range(len(heard) + 1):
        assert await read_all(handle, after) == heard[after:]


async def assert_goes_on(walk: Walk) -> None:
    """The next task is answered, every request was accepted and can be made again, and no prefix broke."""
    ended = await walk.task("And then?", tells("That was all."))
    assert ended.turn.state is TurnState.COMPLETE
    requests = walk.emulated.anthropic.requests()
    assert withheld_by((await walk.calls())[-1]) == {}
    assert_all_accepted(requests)
    assert_no_break(await walk.calls())
    assert await assert_rebuilds(walk) == len(requests)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("pauses", [1, 3])
async def test_a_paused_answer_is_continued_as_one_turn(
    strata_server: StrataServer, emulated: EmulatedProviders, model: str, pauses: int
) -> None:
    walk = await begin(strata_server, emulated, model)
    await walk.task("Zero.", tells("Yes."))
    emulated.anthropic.says(*[PAUSE] * pauses, tells("At last."))
    ended, heard = await listen(walk, "Search for it.")
    turn = ended.turn
    assert (turn.state, turn.stop_reason, turn.attempt) == (TurnState.COMPLETE, StopReason.END_TURN, pauses + 1)
    assert isinstance(turn.blocks[-1], TextBlock)
    assert turn.blocks[-1].text == "At last."
    assert len([block for block in turn.blocks if isinstance(block, TextBlock)]) == pauses + 1

    calls = await walk.program.store.list_calls(walk.tenant_id, walk.conversation_id, turn.seq)
    ends = [call.end for call in calls if call.end is not None]
    assert [end.error_code for end in ends] == [None] * (pauses + 1)
    assert all(end.raw_response for end in ends)
    assert turn.usage == add_usages([end.usage for end in ends])
    assert turn.cost_usd == sum(end.cost_usd or 0 for end in ends)
    notes = [
        warning["attempts"] for call in calls for warning in call.start.warnings if warning["kind"] == "continuation"
    ]
    assert notes == [list(range(1, number)) for number in range(2, pauses + 2)]

    await assert_read_again(walk, heard, turn.seq)
    await assert_goes_on(walk)
    *_, answer, _ = messages_of(ANTHROPIC, emulated.anthropic.requests()[-1]["body"])
    assert answer == (await walk.natives())[turn.seq]


async def test_an_answer_that_is_paused_too_often_ends_as_paused(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    walk = await begin(strata_server, emulated)
    limit = RetryPolicy().max_continuations
    emulated.anthropic.says(*[PAUSE] * (limit + 3))
    ended, heard = await listen(walk, "Search for it.")
    turn = ended.turn
    assert (turn.state, turn.stop_reason, turn.attempt) == (TurnState.COMPLETE, StopReason.PAUSED, limit + 1)
    await assert_read_again(walk, heard, turn.seq)
    await assert_goes_on(walk)
    # What the provider's own tool had not answered is not sent back: nothing continues it any more.
    sent = json.dumps(messages_of(ANTHROPIC, emulated.anthropic.requests()[-1]["body"]))
    assert sent.count('"server_tool_use"') == sent.count('"web_search_tool_result"') == limit
    repairs = (await walk.calls())[-1].start.repairs
    assert {"kind": "server_call_dropped", "seq": turn.seq, "ids": []} in repairs


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        (FaultKind.OVERLOADED, TurnState.COMPLETE),
        (FaultKind.EMPTY_STREAM, TurnState.COMPLETE),
        (FaultKind.CUT, TurnState.FAILED),
        (FaultKind.OVERLOADED_MID_STREAM, TurnState.FAILED),
        (FaultKind.BAD_AUTH, TurnState.FAILED),
        (FaultKind.REFUSAL, TurnState.COMPLETE),
    ],
)
async def test_a_continuation_that_fails_leaves_what_was_said_before_it(
    strata_server: StrataServer, emulated: EmulatedProviders, kind: FaultKind, state: TurnState
) -> None:
    walk = await begin(strata_server, emulated)
    emulated.anthropic.says(PAUSE, Fault(kind=kind, after_chunks=2), tells("At last, it is there."))
    ended, heard = await listen(walk, "Search for it.")
    turn = ended.turn
    assert turn.state is state
    assert any(isinstance(block, TextBlock) for block in turn.blocks)
    calls = await walk.program.store.list_calls(walk.tenant_id, walk.conversation_id, turn.seq)
    assert len(calls) == len(emulated.anthropic.requests())
    assert continued_attempts(calls[-1].start) == (1,)
    await assert_read_again(walk, heard, turn.seq)
    emulated.anthropic.state.request_log.clear()
    ended = await walk.task("And then?", tells("That was all."))
    assert ended.turn.state is TurnState.COMPLETE
    assert_all_accepted(emulated.anthropic.requests())
    await assert_rebuilds(walk)


async def test_a_cancel_in_a_continuation_keeps_what_had_arrived(
    strata_server: StrataServer, neighbour: Program, emulated: EmulatedProviders
) -> None:
    """Another process that follows the turn hears the same, across the seam."""
    walk = await begin(strata_server, emulated)
    emulated.anthropic.says(PAUSE, Fault(kind=FaultKind.SILENCE, after_chunks=3))
    service, tenant = walk.program.turn_service, walk.tenant_id
    handle = await service.take_turn(tenant, user_task(walk.conversation_id, "Search for it."))
    there = await neighbour.turn_service.follow_turn(tenant, walk.conversation_id, handle.seq)
    assert isinstance(there, StoredHandle)
    following = asyncio.create_task(read_all(there))

    async def in_continuation() -> bool:
        chunks = await walk.program.store.list_chunks(tenant, walk.conversation_id, handle.seq, attempt=2)
        return bool(chunks)

    await eventually(in_continuation)
    await neighbour.turn_service.cancel_turn(tenant, walk.conversation_id)
    walk.ended = await handle.wait()
    turn = walk.ended.turn
    assert (turn.state, turn.attempt) == (TurnState.CANCELLED, 2)
    assert len([block for block in turn.blocks if isinstance(block, TextBlock)]) == 2
    live = await read_all(handle)
    assert await following == live
    walk.calm()
    await assert_read_again(walk, live, turn.seq)
    await assert_goes_on(walk)
