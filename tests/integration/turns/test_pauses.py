"""Answers that Claude pauses: the server continues them, as further calls of one turn, and nothing shows the seams."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from server.app.settings import Settings
from server.app.wiring import Program, open_program
from server.conversation.block import TextBlock
from server.conversation.event import TurnEnded, TurnEvent
from server.conversation.turn import ModelResponseTurn, StopReason, TurnState
from server.conversation.usage import add_usages
from server.emulator.reply import Fault, FaultKind, Reply, ToolCall
from server.postgres.replay.recorded_calls import PostgresRecordedCalls
from server.providers.choice import ANTHROPIC
from server.providers.continuation import continued_attempts
from server.providers.retry_policy import RetryPolicy
from server.replay.verify.verifier import Verifier, VerifyOptions
from server.turns.stored import StoredHandle
from tests.conftest import StrataServer
from tests.support.conversation_driver import (
    Walk,
    asks,
    assert_all_accepted,
    assert_no_break,
    assert_rebuilds,
    begin_walk,
    eventually,
    messages_of,
    tells,
    withheld_by,
)
from tests.support.emulators import EmulatedProviders
from tests.support.turn_service_driver import read_all, settle, user_task

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


@pytest.mark.parametrize("model", MODELS)
async def test_a_server_tool_beside_a_client_tool_goes_on_with_the_results(
    strata_server: StrataServer, emulated: EmulatedProviders, model: str
) -> None:
    walk = await begin(strata_server, emulated, model)
    both = replace(asks("Oslo"), server_calls=(ToolCall(name="web_search", arguments={"query": "Oslo"}),))
    ended = await walk.task("Search for it.", both)
    assert ended.turn.stop_reason is StopReason.TOOL_USE
    # Text beside the results would end the wait of the provider's own tool.
    await walk.change(context={"todos": ["something new"]})
    ended = await walk.answer(tells("Cold."))
    assert ended.turn.state is TurnState.COMPLETE
    *_, called, results = messages_of(ANTHROPIC, emulated.anthropic.requests()[-1]["body"])
    assert [block["type"] for block in called["content"]][-2:] == ["server_tool_use", "tool_use"]
    assert [block["type"] for block in results["content"]] == ["tool_result"]
    answer = (await walk.natives())[ended.turn.seq]
    assert answer["content"][0]["type"] == "web_search_tool_result"
    await assert_goes_on(walk)
    newest = emulated.anthropic.requests()[-1]["body"]["messages"]
    assert "something new" in json.dumps(newest[-1])
    assert called["content"] == messages_of(ANTHROPIC, emulated.anthropic.requests()[-1]["body"])[1]["content"]


@pytest.mark.parametrize("how", ["abandoned", "failed"])
async def test_a_server_tool_that_never_goes_on_is_left_out(
    strata_server: StrataServer, emulated: EmulatedProviders, how: str
) -> None:
    walk = await begin(strata_server, emulated)
    both = replace(asks("Oslo"), server_calls=(ToolCall(name="web_search", arguments={"query": "Oslo"}),))
    await walk.task("Search for it.", both)
    if how == "failed":
        emulated.anthropic.fails(FaultKind.BAD_AUTH)
        ended = await walk.answer()
        assert ended.turn.state is TurnState.FAILED
    ended = await walk.task("Never mind.", tells("As you like."), abandons_calls=True)
    assert ended.turn.state is TurnState.COMPLETE
    assert "server_tool_use" not in json.dumps(emulated.anthropic.requests()[-1]["body"])
    assert "server_call_dropped" in [repair["kind"] for repair in (await walk.calls())[-1].start.repairs]
    assert_all_accepted(emulated.anthropic.requests())
    await walk.task("And then?", tells("That was all."))
    assert_all_accepted(emulated.anthropic.requests())
    await assert_rebuilds(walk)


async def test_code_goes_on_in_its_container(strata_server: StrataServer, emulated: EmulatedProviders) -> None:
    walk = await begin(strata_server, emulated)
    runs = ToolCall(name="code_execution", arguments={"code": "weather()"})
    emulated.anthropic.says(Reply(text="Let me run it for you.", server_calls=(runs,)))
    emulated.anthropic.fails(FaultKind.PAUSE)
    emulated.anthropic.says(replace(asks("Oslo"), server_calls=(runs,)))
    ended = await walk.task("Run it.")
    assert (ended.turn.attempt, ended.turn.stop_reason) == (2, StopReason.TOOL_USE)
    await walk.answer(tells("Cold."))
    await assert_goes_on(walk)
    named = [request["body"].get("container") for request in emulated.anthropic.requests()]
    assert named[0] is None
    assert named[1] is not None
    # In the continuation, with the results, and in the next turn while it is there.
    assert named[1:] == [named[1]] * 3


async def test_results_repeat_the_toolset_of_their_calls(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    walk = await begin(strata_server, emulated)
    calls = tuple(
        ToolCall(name="get_weather", arguments={"city": city}, toolset_name=toolset)
        for city, toolset in (("Oslo", "north"), ("Bergen", ""))
    )
    await walk.task("Ask.", Reply(tool_calls=calls), tells("Cold."))
    *_, results = messages_of(ANTHROPIC, emulated.anthropic.requests()[-1]["body"])
    assert [result.get("toolset_name") for result in results["content"]] == ["north", None]
    await assert_goes_on(walk)


async def test_what_was_continued_is_told_from_its_blocks_when_the_bytes_are_gone(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    walk = await begin(strata_server, emulated)
    emulated.anthropic.says(PAUSE, tells("At last."))
    ended, heard = await listen(walk, "Search for it.")
    async with walk.program.database.connection() as connection:
        await connection.execute("UPDATE calls SET raw_response = NULL")
    await settle(walk.program)
    handle = await walk.program.turn_service.follow_turn(walk.tenant_id, walk.conversation_id, ended.turn.seq)
    later = await read_all(handle)
    assert later[-1][1] == heard[-1][1]
    verifier = Verifier(PostgresRecordedCalls(walk.program.database), walk.program.providers.by_name, VerifyOptions())
    verified = await verifier.verify([walk.conversation_id])
    assert verified.mismatches == ()
    assert verified.counts.without_bytes_count
    await walk.task("And then?", tells("That was all."))
    assert_all_accepted(emulated.anthropic.requests())


@pytest.mark.parametrize(
    ("then", "attempts", "forgotten", "state", "texts"),
    [
        # In the middle of a continuation.
        ([Fault(kind=FaultKind.SILENCE, after_chunks=3)], 2, None, TurnState.INTERRUPTED, 2),
        # Before the continuation was written down.
        ([Fault(kind=FaultKind.SILENCE)], 2, 2, TurnState.COMPLETE, 1),
        # While nothing of the continuation had come.
        ([Fault(kind=FaultKind.SILENCE)], 2, None, TurnState.INTERRUPTED, 1),
        # After a continuation that had failed.
        (
            [Fault(kind=FaultKind.RATE_LIMITED, retry_after_seconds=0), Fault(kind=FaultKind.SILENCE)],
            3,
            3,
            TurnState.INTERRUPTED,
            1,
        ),
    ],
    ids=["in the middle", "before it", "at its start", "after a failure"],
)
async def test_a_server_that_dies_over_a_continuation_leaves_what_had_arrived(
    strata_server: StrataServer,
    neighbour: Program,
    emulated: EmulatedProviders,
    then: list[Fault],
    attempts: int,
    forgotten: int | None,
    state: TurnState,
    texts: int,
) -> None:
    walk = await begin(strata_server, emulated)
    emulated.anthropic.says(PAUSE, *then)
    store, tenant, conversation = walk.program.store, walk.tenant_id, walk.conversation_id
    handle = await walk.program.turn_service.take_turn(tenant, user_task(conversation, "Search for it."))
    says_more = bool(then[-1].after_chunks)

    async def is_there() -> bool:
        chunks = await store.list_chunks(tenant, conversation, handle.seq, attempt=attempts)
        calls = await store.list_calls(tenant, conversation, handle.seq)
        # The end of a call that another one continues is written beside that one's beginning.
        ended = all(call.end is not None for call in calls[:-1])
        return len(calls) == attempts and ended and bool(chunks) is says_more

    await eventually(is_there)
    async with walk.program.database.connection() as connection:
        if forgotten is not None:
            await connection.execute("DELETE FROM calls WHERE attempt = $1", forgotten)
    recovery = neighbour.turn_service._recovery  # noqa: SLF001  reason: a lease that runs out cannot be waited for

    async def is_recovered() -> bool:
        async with walk.program.database.connection() as connection:
            await connection.execute("UPDATE conversations SET lease_expires_at = now() - interval '1 second'")
        return await recovery.recover(conversation) == 1

    await eventually(is_recovered)
    walk.calm()
    turn = (await walk.turns())[-1]
    assert isinstance(turn, ModelResponseTurn)
    assert turn.state is state
    assert len([block for block in turn.blocks if isinstance(block, TextBlock)]) == texts
    there = await neighbour.turn_service.follow_turn(tenant, conversation, handle.seq)
    heard = await read_all(there)
    for after in range(len(heard)):
        assert await read_all(there, after) == heard[after:]
    ended = await walk.task("And then?", tells("That was all."))
    assert ended.turn.state is TurnState.COMPLETE
    assert_all_accepted(emulated.anthropic.requests())
    await assert_rebuilds(walk)
