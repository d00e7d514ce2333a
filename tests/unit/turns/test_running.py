"""Turns outlive their request, and a stopping process waits for them up to a limit."""

import asyncio
import gc

import pytest

from server.conversation.errors import ShuttingDown
from server.turns.running import DrainReport, RunningTurns


async def test_a_turn_runs_although_it_is_not_awaited() -> None:
    turns, done = RunningTurns(), asyncio.Event()

    async def turn() -> None:
        await asyncio.sleep(0)
        done.set()

    turns.start(turn(), name="turn")
    gc.collect()
    assert turns.count == 1
    await asyncio.wait_for(done.wait(), 5)
    await asyncio.sleep(0)
    assert turns.count == 0


async def test_draining_waits_for_turns_that_finish_in_time() -> None:
    turns, release = RunningTurns(), asyncio.Event()

    async def turn() -> str:
        await release.wait()
        return "finished"

    task = turns.start(turn(), name="turn")
    drain = asyncio.create_task(turns.drain(30))
    await asyncio.sleep(0)
    assert turns.draining
    assert not drain.done()
    release.set()
    assert await drain == DrainReport(finished_count=1, cancelled_count=0)
    assert task.result() == "finished"


async def test_a_turn_that_takes_too_long_is_cancelled_and_may_still_commit() -> None:
    turns, committed = RunningTurns(), []

    async def turn() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            committed.append("what had arrived")

    turns.start(turn(), name="turn")
    await asyncio.sleep(0)
    assert await turns.drain(0) == DrainReport(finished_count=0, cancelled_count=1)
    assert committed == ["what had arrived"]


async def test_no_turn_begins_while_draining() -> None:
    turns = RunningTurns()
    assert await turns.drain(0) == DrainReport(finished_count=0, cancelled_count=0)

    async def turn() -> None:
        pytest.fail("it must not run")

    with pytest.raises(ShuttingDown):
        turns.start(turn(), name="turn")


async def test_a_turn_that_raises_does_not_affect_the_others() -> None:
    turns, done = RunningTurns(), asyncio.Event()

    async def broken() -> None:
        raise ValueError

    async def fine() -> None:
        await asyncio.sleep(0)
        done.set()

    failing = turns.start(broken(), name="broken")
    turns.start(fine(), name="fine")
    assert await turns.drain(5) == DrainReport(finished_count=2, cancelled_count=0)
    assert done.is_set()
    assert isinstance(failing.exception(), ValueError)
