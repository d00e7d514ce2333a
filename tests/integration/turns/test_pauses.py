"""Answers that Claude pauses: the server continues them, as further calls of one turn, without a visible seam."""

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
    ConversationDriver,
    assert_all_accepted,
    assert_no_break,
    assert_rebuilds,
    eventually,
    messages_of,
    start_driver,
    text_reply,
    tool_reply,
    withheld_by,
)
from tests.support.emulators import EmulatedProviders
from tests.support.turn_service_driver import read_all, settle, user_task

MODELS = ("claude-fable-5-2", "claude-opus-5")
PAUSE = Fault(kind=FaultKind.PAUSE)


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


async def begin(server: StrataServer, emulated: EmulatedProviders, model: str = MODELS[0]) -> ConversationDriver:
    return await start_driver(server.program, server.tenant.id, emulated, ANTHROPIC, model=model)


async def listen(driver: ConversationDriver, text: str) -> tuple[TurnEnded, list[tuple[int, TurnEvent]]]:
    """Send a task. Returns its events."""
    handle = await driver.program.turn_service.take_turn(driver.tenant_id, user_task(driver.conversation_id, text))
    received = await read_all(handle)
    driver.ended = await handle.wait()
    driver.calm()
    return driver.ended, received


async def assert_read_again(driver: ConversationDriver, received: Sequence[tuple[int, TurnEvent]], seq: int) -> None:
    """The stored bytes give the same events with the same numbers, from any event on."""
    assert [number for number, _ in received] == list(range(1, len(received) + 1))
    await settle(driver.program)
    handle = await driver.program.turn_service.follow_turn(driver.tenant_id, driver.conversation_id, seq)
    assert isinstance(handle, StoredHandle)
    for after in range(len(received) + 1):
        assert await read_all(handle, after) == received[after:]


async def assert_goes_on(driver: ConversationDriver) -> None:
    """The next task is answered, every request was accepted and can be rebuilt, and no prefix broke."""
    ended = await driver.task("And then?", text_reply("That was all."))
    assert ended.turn.state is TurnState.COMPLETE
    requests = driver.emulated.anthropic.requests()
    assert withheld_by((await driver.calls())[-1]) == {}
    assert_all_accepted(requests)
    assert_no_break(await driver.calls())
    assert await assert_rebuilds(driver) == len(requests)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("pauses", [1, 3])
async def test_a_paused_answer_is_continued_as_one_turn(
    strata_server: StrataServer, emulated: EmulatedProviders, model: str, pauses: int
) -> None:
    driver = await begin(strata_server, emulated, model)
    await driver.task("Zero.", text_reply("Yes."))
    emulated.anthropic.queue_replies(*[PAUSE] * pauses, text_reply("At last."))
    ended, received = await listen(driver, "Search for it.")
    turn = ended.turn
    assert (turn.state, turn.stop_reason, turn.attempt) == (TurnState.COMPLETE, StopReason.END_TURN, pauses + 1)
    assert isinstance(turn.blocks[-1], TextBlock)
    assert turn.blocks[-1].text == "At last."
    assert len([block for block in turn.blocks if isinstance(block, TextBlock)]) == pauses + 1

    calls = await driver.program.store.list_calls(driver.tenant_id, driver.conversation_id, turn.seq)
    ends = [call.end for call in calls if call.end is not None]
    assert [end.error_code for end in ends] == [None] * (pauses + 1)
    assert all(end.raw_response for end in ends)
    assert turn.usage == add_usages([end.usage for end in ends])
    assert turn.cost_usd == sum(end.cost_usd or 0 for end in ends)
    notes = [
        warning["attempts"] for call in calls for warning in call.start.warnings if warning["kind"] == "continuation"
    ]
    assert notes == [list(range(1, number)) for number in range(2, pauses + 2)]

    await assert_read_again(driver, received, turn.seq)
    await assert_goes_on(driver)
    *_, answer, _ = messages_of(ANTHROPIC, emulated.anthropic.requests()[-1]["body"])
    assert answer == (await driver.natives())[turn.seq]


async def test_an_answer_that_is_paused_too_often_ends_as_paused(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    driver = await begin(strata_server, emulated)
    limit = RetryPolicy().max_continuations
    emulated.anthropic.queue_replies(*[PAUSE] * (limit + 3))
    ended, received = await listen(driver, "Search for it.")
    turn = ended.turn
    assert (turn.state, turn.stop_reason, turn.attempt) == (TurnState.COMPLETE, StopReason.PAUSED, limit + 1)
    await assert_read_again(driver, received, turn.seq)
    await assert_goes_on(driver)
    # The open call of the provider's own tool is not sent back: nothing continues it any more.
    sent = json.dumps(messages_of(ANTHROPIC, emulated.anthropic.requests()[-1]["body"]))
    assert sent.count('"server_tool_use"') == sent.count('"web_search_tool_result"') == limit
    repairs = (await driver.calls())[-1].start.repairs
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
async def test_a_failed_continuation_keeps_the_text_before_it(
    strata_server: StrataServer, emulated: EmulatedProviders, kind: FaultKind, state: TurnState
) -> None:
    driver = await begin(strata_server, emulated)
    emulated.anthropic.queue_replies(PAUSE, Fault(kind=kind, after_chunks=2), text_reply("At last, it is there."))
    ended, received = await listen(driver, "Search for it.")
    turn = ended.turn
    assert turn.state is state
    assert any(isinstance(block, TextBlock) for block in turn.blocks)
    calls = await driver.program.store.list_calls(driver.tenant_id, driver.conversation_id, turn.seq)
    assert len(calls) == len(emulated.anthropic.requests())
    assert continued_attempts(calls[-1].start) == (1,)
    await assert_read_again(driver, received, turn.seq)
    emulated.anthropic.state.request_log.clear()
    ended = await driver.task("And then?", text_reply("That was all."))
    assert ended.turn.state is TurnState.COMPLETE
    assert_all_accepted(emulated.anthropic.requests())
    await assert_rebuilds(driver)


async def test_a_cancel_in_a_continuation_keeps_what_had_arrived(
    strata_server: StrataServer, neighbour: Program, emulated: EmulatedProviders
) -> None:
    """Another process that follows the turn gets the same events, across the seam."""
    driver = await begin(strata_server, emulated)
    emulated.anthropic.queue_replies(PAUSE, Fault(kind=FaultKind.SILENCE, after_chunks=3))
    service, tenant = driver.program.turn_service, driver.tenant_id
    handle = await service.take_turn(tenant, user_task(driver.conversation_id, "Search for it."))
    there = await neighbour.turn_service.follow_turn(tenant, driver.conversation_id, handle.seq)
    assert isinstance(there, StoredHandle)
    following = asyncio.create_task(read_all(there))

    async def in_continuation() -> bool:
        chunks = await driver.program.store.list_chunks(tenant, driver.conversation_id, handle.seq, attempt=2)
        return bool(chunks)

    await eventually(in_continuation)
    await neighbour.turn_service.cancel_turn(tenant, driver.conversation_id)
    driver.ended = await handle.wait()
    turn = driver.ended.turn
    assert (turn.state, turn.attempt) == (TurnState.CANCELLED, 2)
    assert len([block for block in turn.blocks if isinstance(block, TextBlock)]) == 2
    live = await read_all(handle)
    assert await following == live
    driver.calm()
    await assert_read_again(driver, live, turn.seq)
    await assert_goes_on(driver)


@pytest.mark.parametrize("model", MODELS)
async def test_a_server_tool_next_to_a_client_tool_continues_with_the_results(
    strata_server: StrataServer, emulated: EmulatedProviders, model: str
) -> None:
    driver = await begin(strata_server, emulated, model)
    both = replace(tool_reply("Oslo"), server_calls=(ToolCall(name="web_search", arguments={"query": "Oslo"}),))
    ended = await driver.task("Search for it.", both)
    assert ended.turn.stop_reason is StopReason.TOOL_USE
    # Text next to the results would end the wait of the provider's own tool.
    await driver.change(context={"todos": ["something new"]})
    ended = await driver.answer(text_reply("Cold."))
    assert ended.turn.state is TurnState.COMPLETE
    *_, called, results = messages_of(ANTHROPIC, emulated.anthropic.requests()[-1]["body"])
    assert [block["type"] for block in called["content"]][-2:] == ["server_tool_use", "tool_use"]
    assert [block["type"] for block in results["content"]] == ["tool_result"]
    answer = (await driver.natives())[ended.turn.seq]
    assert answer["content"][0]["type"] == "web_search_tool_result"
    await assert_goes_on(driver)
    newest = emulated.anthropic.requests()[-1]["body"]["messages"]
    assert "something new" in json.dumps(newest[-1])
    assert called["content"] == messages_of(ANTHROPIC, emulated.anthropic.requests()[-1]["body"])[1]["content"]


@pytest.mark.parametrize("how", ["abandoned", "failed"])
async def test_a_server_tool_that_is_never_continued_is_left_out(
    strata_server: StrataServer, emulated: EmulatedProviders, how: str
) -> None:
    driver = await begin(strata_server, emulated)
    both = replace(tool_reply("Oslo"), server_calls=(ToolCall(name="web_search", arguments={"query": "Oslo"}),))
    await driver.task("Search for it.", both)
    if how == "failed":
        emulated.anthropic.inject_fault(FaultKind.BAD_AUTH)
        ended = await driver.answer()
        assert ended.turn.state is TurnState.FAILED
    ended = await driver.task("Never mind.", text_reply("As you like."), abandons_calls=True)
    assert ended.turn.state is TurnState.COMPLETE
    assert "server_tool_use" not in json.dumps(emulated.anthropic.requests()[-1]["body"])
    assert "server_call_dropped" in [repair["kind"] for repair in (await driver.calls())[-1].start.repairs]
    assert_all_accepted(emulated.anthropic.requests())
    await driver.task("And then?", text_reply("That was all."))
    assert_all_accepted(emulated.anthropic.requests())
    await assert_rebuilds(driver)


async def test_code_continues_in_its_container(strata_server: StrataServer, emulated: EmulatedProviders) -> None:
    driver = await begin(strata_server, emulated)
    runs = ToolCall(name="code_execution", arguments={"code": "weather()"})
    emulated.anthropic.queue_replies(Reply(text="Let me run it for you.", server_calls=(runs,)))
    emulated.anthropic.inject_fault(FaultKind.PAUSE)
    emulated.anthropic.queue_replies(replace(tool_reply("Oslo"), server_calls=(runs,)))
    ended = await driver.task("Run it.")
    assert (ended.turn.attempt, ended.turn.stop_reason) == (2, StopReason.TOOL_USE)
    await driver.answer(text_reply("Cold."))
    await assert_goes_on(driver)
    named = [request["body"].get("container") for request in emulated.anthropic.requests()]
    assert named[0] is None
    assert named[1] is not None
    # In the continuation, with the results, and in the next turn while it exists.
    assert named[1:] == [named[1]] * 3


async def test_results_repeat_the_toolset_of_their_calls(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    driver = await begin(strata_server, emulated)
    calls = tuple(
        ToolCall(name="get_weather", arguments={"city": city}, toolset_name=toolset)
        for city, toolset in (("Oslo", "north"), ("Bergen", ""))
    )
    await driver.task("Ask.", Reply(tool_calls=calls), text_reply("Cold."))
    *_, results = messages_of(ANTHROPIC, emulated.anthropic.requests()[-1]["body"])
    assert [result.get("toolset_name") for result in results["content"]] == ["north", None]
    await assert_goes_on(driver)


async def test_a_continued_answer_is_read_from_its_blocks_if_the_bytes_are_deleted(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    driver = await begin(strata_server, emulated)
    emulated.anthropic.queue_replies(PAUSE, text_reply("At last."))
    ended, received = await listen(driver, "Search for it.")
    async with driver.program.database.connection() as connection:
        await connection.execute("UPDATE calls SET raw_response = NULL")
    await settle(driver.program)
    handle = await driver.program.turn_service.follow_turn(driver.tenant_id, driver.conversation_id, ended.turn.seq)
    later = await read_all(handle)
    assert later[-1][1] == received[-1][1]
    verifier = Verifier(
        PostgresRecordedCalls(driver.program.database), driver.program.providers.by_name, VerifyOptions()
    )
    verified = await verifier.verify([driver.conversation_id])
    assert verified.mismatches == ()
    assert verified.counts.without_bytes_count
    await driver.task("And then?", text_reply("That was all."))
    assert_all_accepted(emulated.anthropic.requests())


@pytest.mark.parametrize(
    ("then", "attempts", "forgotten", "state", "texts"),
    [
        # In the middle of a continuation.
        ([Fault(kind=FaultKind.SILENCE, after_chunks=3)], 2, None, TurnState.INTERRUPTED, 2),
        # Before the continuation was recorded.
        ([Fault(kind=FaultKind.SILENCE)], 2, 2, TurnState.COMPLETE, 1),
        # Before anything of the continuation had arrived.
        ([Fault(kind=FaultKind.SILENCE)], 2, None, TurnState.INTERRUPTED, 1),
        # After a failed continuation.
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
async def test_a_server_that_dies_in_a_continuation_leaves_what_had_arrived(
    strata_server: StrataServer,
    neighbour: Program,
    emulated: EmulatedProviders,
    then: list[Fault],
    attempts: int,
    forgotten: int | None,
    state: TurnState,
    texts: int,
) -> None:
    driver = await begin(strata_server, emulated)
    emulated.anthropic.queue_replies(PAUSE, *then)
    store, tenant, conversation = driver.program.store, driver.tenant_id, driver.conversation_id
    handle = await driver.program.turn_service.take_turn(tenant, user_task(conversation, "Search for it."))
    says_more = bool(then[-1].after_chunks)

    async def is_there() -> bool:
        chunks = await store.list_chunks(tenant, conversation, handle.seq, attempt=attempts)
        calls = await store.list_calls(tenant, conversation, handle.seq)
        # The end of a call that another one continues is stored together with the start of that one.
        ended = all(call.end is not None for call in calls[:-1])
        return len(calls) == attempts and ended and bool(chunks) is says_more

    await eventually(is_there)
    async with driver.program.database.connection() as connection:
        if forgotten is not None:
            await connection.execute("DELETE FROM calls WHERE attempt = $1", forgotten)
    recovery = neighbour.turn_service._recovery  # noqa: SLF001  reason: a lease that runs out cannot be waited for

    async def is_recovered() -> bool:
        async with driver.program.database.connection() as connection:
            await connection.execute("UPDATE conversations SET lease_expires_at = now() - interval '1 second'")
        return await recovery.recover(conversation) == 1

    await eventually(is_recovered)
    driver.calm()
    turn = (await driver.turns())[-1]
    assert isinstance(turn, ModelResponseTurn)
    assert turn.state is state
    assert len([block for block in turn.blocks if isinstance(block, TextBlock)]) == texts
    there = await neighbour.turn_service.follow_turn(tenant, conversation, handle.seq)
    received = await read_all(there)
    for after in range(len(received)):
        assert await read_all(there, after) == received[after:]
    ended = await driver.task("And then?", text_reply("That was all."))
    assert ended.turn.state is TurnState.COMPLETE
    assert_all_accepted(emulated.anthropic.requests())
    await assert_rebuilds(driver)
