"""Slots of replays in one process."""

import asyncio
import json

from server.jobs.replay import replay_job


async def test_a_slow_replay_leaves_room_for_the_first_slot_of_others_and_all_leave_room_for_other_jobs() -> None:
    ran: list[str] = []
    over = asyncio.Event()

    async def run_items(replay_id: str) -> int:
        ran.append(replay_id)
        await over.wait()
        return 1

    job = replay_job(run_items, max_slots=2, max_beside=2)

    async def work(replay_id: str) -> None:
        await job.run(json.dumps({"replay_id": replay_id}).encode())

    async def begin(replay_id: str) -> "asyncio.Task[None]":
        task = asyncio.create_task(work(replay_id))
        await asyncio.sleep(0)
        return task

    begun = [await begin(replay_id) for replay_id in ("slow", "slow", "slow", "other", "other", "third", "fourth")]
    assert ran == ["slow", "slow", "other", "third"]
    over.set()
    await asyncio.gather(*begun)
    await (await begin("slow"))
    assert ran[4:] == ["slow"]
