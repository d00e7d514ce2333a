"""Replays whose workers die: every item is done once, and every answer is requested once."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from server.app.settings import Settings
from server.app.wiring import Program, open_program
from server.jobs.queue import JobSender
from server.jobs.replay import queue_replay
from server.replay.rerun.replay import ItemState, Replay, ReplayLimits, ReplayState
from server.replay.rerun.result import Outcome
from tests.faults.server_fleet import Fleet
from tests.support.conversation_driver import (
    ConversationDriver,
    assert_all_accepted,
    start_driver,
    text_reply,
    tool_reply,
)
from tests.support.emulators import EmulatedProviders
from tests.support.replay_driver import arm_again, create_replay, draft_of, items_of, results_of

CONVERSATIONS = 200
PROVIDER = "anthropic"
WAIT_SECONDS = 180.0


@pytest.fixture
async def program(fleet: Fleet, server_settings: Settings, emulated: EmulatedProviders) -> AsyncIterator[Program]:
    """A server that records conversations and has no worker."""
    async with (
        emulated.open(server_settings) as providers,
        open_program(emulated.point(server_settings), providers=providers) as opened,
    ):
        async with fleet.database.connection() as connection:
            await connection.execute("DELETE FROM pgqueuer; DELETE FROM pgqueuer_schedules")
        yield opened


async def test_a_worker_may_die_at_any_point_of_an_item(program: Program, fleet: Fleet) -> None:
    driver = await _record(program, fleet)
    turns = await driver.turns()
    emulated = fleet.emulated[PROVIDER]
    replay = await create_replay(program, fleet.tenant.id, draft_of([driver.conversation_id]))
    asked_before = len(emulated.requests())
    lost_after_asking = 0
    for point in ("after_claim", "after_accept", "after_begin_call", "after_last_byte", "after_finish", "after_result"):
        done = len(await results_of(program, replay))
        arm_again(fleet.emulated, turns[2 * done :])
        worker = await fleet.start_worker(crash_at=point)
        await _queue(fleet, replay)
        assert await worker.ended() == -9
        lost_after_asking += point == "after_last_byte"
        await fleet.let_time_pass()
    arm_again(fleet.emulated, turns[2:])
    await fleet.start_worker()
    await _queue(fleet, replay)
    await _until_done(program, replay)

    results = await results_of(program, replay)
    assert [result.outcome for result in results] == [Outcome.SAME] * 4
    assert len(emulated.requests()) - asked_before == 4 + lost_after_asking
    assert_all_accepted(emulated.requests())
    item = (await items_of(program, replay))[0]
    # The third is not a lost answer, but one whose price was not recorded.
    assert (item.state, item.lost_count) == (ItemState.DONE, 3)


async def test_three_workers_of_which_one_is_killed_twice_do_every_item_once(program: Program, fleet: Fleet) -> None:
    driver = await start_driver(program, fleet.tenant.id, fleet.emulated, PROVIDER)
    await driver.task("First.", text_reply("Cold."))
    last = (await driver.turns())[-1].seq
    forks = [
        await program.store.fork_conversation(fleet.tenant.id, driver.conversation_id, last)
        for _ in range(CONVERSATIONS - 1)
    ]
    draft = draft_of([driver.conversation_id, *(fork.id for fork in forks)], limits=ReplayLimits(parallelism=3))
    replay = await create_replay(program, fleet.tenant.id, draft)
    emulated = fleet.emulated[PROVIDER]
    asked_before = len(emulated.requests())
    workers = [await fleet.start_worker(shutdown_limit_seconds=10) for _ in range(3)]
    await _queue(fleet, replay, slots=3)
    for share in (5, 2):
        await _until_results(program, replay, CONVERSATIONS // share)
        workers[0].kill()
        await workers[0].ended()
        await fleet.let_time_pass()
        workers[0] = await fleet.start_worker()
        await _queue(fleet, replay, slots=3)
    workers[1].stop()
    assert await workers[1].ended() == 0
    await _until_done(program, replay)

    items = await items_of(program, replay)
    assert [item.state for item in items] == [ItemState.DONE] * CONVERSATIONS
    results = await results_of(program, replay)
    assert len(results) == CONVERSATIONS
    asked, lost = len(emulated.requests()) - asked_before, sum(item.lost_count for item in items)
    assert len(results) <= asked <= len(results) + lost
    assert_all_accepted(emulated.requests())
    replay = await program.replays.replays.load_replay(fleet.tenant.id, replay.id)
    assert replay.reserved_tokens == 0
    assert replay.spent_tokens > 0


async def _record(program: Program, fleet: Fleet) -> ConversationDriver:
    """A conversation with four answers."""
    driver = await start_driver(program, fleet.tenant.id, fleet.emulated, PROVIDER)
    await driver.task("First.", tool_reply("Oslo", "Bergen"), text_reply("Cold."), picture=True)
    await driver.task("Second.", text_reply("Wet."))
    await driver.task("Third.", text_reply("Fine."))
    return driver


async def _queue(fleet: Fleet, replay: Replay, slots: int = 1) -> None:
    await queue_replay(JobSender(fleet.database), replay.tenant_id, replay.id, slots)


async def _eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    """Poll; on a busy machine it may take long."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not await condition():  # noqa: ASYNC110  reason: what is waited for is in the database
            await asyncio.sleep(0.05)


async def _until_results(program: Program, replay: Replay, count: int) -> None:
    async def there() -> bool:
        return len(await results_of(program, replay)) >= count

    await _eventually(there)


async def _until_done(program: Program, replay: Replay) -> None:
    async def done() -> bool:
        found = await program.replays.replays.load_replay(replay.tenant_id, replay.id)
        return found.state is ReplayState.DONE

    await _eventually(done)
