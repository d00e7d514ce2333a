"""A process that was considered dead resumes while another one runs its item: it does no harm."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from server.app.wiring import Program
from server.postgres.engine import Database
from server.postgres.store import PostgresStore
from server.replay.rerun.items import ReplayItems
from server.replay.rerun.replay import ItemState, Replay, ReplayState
from server.replay.rerun.result import Outcome
from tests.conftest import StrataServer
from tests.support.conversation_driver import assert_all_accepted, start_driver, text_reply, tool_reply
from tests.support.emulators import EmulatedProviders
from tests.support.replay_driver import arm_again, create_replay, draft_of, items_of, results_of, shadow_turns


class SleepyStore(PostgresStore):
    """A store that blocks before the nth step of a kind."""

    def __init__(self, database: Database, point: str, nth: int) -> None:
        super().__init__(database)
        self._point = point
        self._left = nth
        self.sleeps = asyncio.Event()
        self.wakes = asyncio.Event()

    async def accept_turn(self, *arguments: Any, **options: Any) -> Any:
        await self._reach("accept_turn")
        return await super().accept_turn(*arguments, **options)

    async def finish_turn(self, *arguments: Any, **options: Any) -> Any:
        await self._reach("finish_turn")
        return await super().finish_turn(*arguments, **options)

    async def list_expired_leases(self, *arguments: Any, **options: Any) -> Any:
        await self._reach("list_expired_leases")
        return await super().list_expired_leases(*arguments, **options)

    async def _reach(self, point: str) -> None:
        self._left -= point == self._point
        if point == self._point and not self._left:
            self.sleeps.set()
            await self.wakes.wait()


@pytest.mark.parametrize(
    ("sleeps_at", "heir_sleeps_at", "asked_again"),
    [
        ("accept_turn", None, 0),
        ("accept_turn", "accept_turn", 0),
        ("finish_turn", None, 1),
        ("finish_turn", "list_expired_leases", 0),
    ],
)
async def test_a_process_that_resumes_after_its_item_was_taken_over_does_no_harm(
    strata_server: StrataServer,
    emulated: EmulatedProviders,
    replay_store: Database,
    sleeps_at: str,
    heir_sleeps_at: str | None,
    asked_again: int,
) -> None:
    program = strata_server.program
    driver = await start_driver(program, strata_server.tenant.id, emulated, "gemini")
    await driver.task("First.", tool_reply("Oslo"), text_reply("Cold."))
    await driver.task("Second.", text_reply("Wet."))
    turns = await driver.turns()
    arm_again(emulated, turns)
    asked_before = len(emulated.gemini.requests())
    replay = await create_replay(program, driver.tenant_id, draft_of([driver.conversation_id]))

    sleeper = SleepyStore(replay_store, sleeps_at, 3)
    first = asyncio.create_task(_items(program, sleeper).run_all(replay.id))
    await sleeper.sleeps.wait()
    await _let_time_pass(program.database)
    if asked_again:
        arm_again(emulated, turns[4:])
    heir = SleepyStore(replay_store, heir_sleeps_at or "", 1)
    second = asyncio.create_task(_items(program, heir).run_all(replay.id))
    if heir_sleeps_at is None:
        await second
        sleeper.wakes.set()
        await first
    else:
        await heir.sleeps.wait()
        sleeper.wakes.set()
        await first
        heir.wakes.set()
        await second

    await _assert_done_once(program, replay)
    assert len(emulated.gemini.requests()) - asked_before == 3 + asked_again
    assert [turn.blocks for turn in await shadow_turns(program, replay)] == [turn.blocks for turn in turns]
    assert_all_accepted(emulated.gemini.requests())


async def test_a_worker_without_its_queue_stores_the_answer_that_has_arrived(
    strata_server: StrataServer, emulated: EmulatedProviders, replay_store: Database
) -> None:
    """The database may be back in a moment, and the answer has been billed."""
    program = strata_server.program
    driver = await start_driver(program, strata_server.tenant.id, emulated, "gemini")
    await driver.task("First.", tool_reply("Oslo"), text_reply("Cold."))
    await driver.task("Second.", text_reply("Wet."))
    arm_again(emulated, await driver.turns())
    asked_before = len(emulated.gemini.requests())
    replay = await create_replay(program, driver.tenant_id, draft_of([driver.conversation_id]))
    sleeper = SleepyStore(replay_store, "finish_turn", 2)
    running = asyncio.create_task(_items(program, sleeper).run_all(replay.id))
    await sleeper.sleeps.wait()
    running.cancel()
    await asyncio.sleep(0.01)
    sleeper.wakes.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    await program.replays.items.run_all(replay.id)

    await _assert_done_once(program, replay)
    assert len(emulated.gemini.requests()) - asked_before == 3
    assert [item.lost_count for item in await items_of(program, replay)] == [0]


def _items(program: Program, replay_store: PostgresStore) -> ReplayItems:
    return replace(program.replays.items, replay_store=replay_store)


async def _let_time_pass(database: Database) -> None:
    async with database.connection() as connection:
        await connection.execute("UPDATE replay_items SET lease_expires_at = now() WHERE state = 'running'")


async def _assert_done_once(program: Program, replay: Replay) -> None:
    assert [item.state for item in await items_of(program, replay)] == [ItemState.DONE]
    assert [result.outcome for result in await results_of(program, replay)] == [Outcome.SAME] * 3
    ended = await program.replays.replays.load_replay(replay.tenant_id, replay.id)
    assert (ended.state, ended.reserved_tokens) == (ReplayState.DONE, 0)
