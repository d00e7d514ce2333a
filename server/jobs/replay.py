"""Jobs that run replays. Each job is a slot: it runs items of one replay, one after the other, in any worker.

No more items run at the same time than the replay allows, however many slots are queued, because an additional slot
cannot claim an item. A slot may therefore be queued again at any time. A periodic job does so for replays that have
items and too few slots.
"""

import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeAlias

from server.jobs.job import Job
from server.jobs.queue import JobSender

NAME: Final = "replay"
TICK_NAME: Final = "replay_tick"
MAX_SLOTS: Final = 4
"""Slots per process: items run for a long time, and other jobs of the process must not wait for them."""
MAX_BESIDE: Final = 2
"""Additional slots for replays without a slot in the process, so that a slow replay does not delay all others."""
_EVERY_FEW_SECONDS: Final = "* * * * * */10"
_log = logging.getLogger("strata.jobs")

RunItems: TypeAlias = Callable[[str], Awaitable[int]]
"""Runs items of a replay until there is none left for this process, and returns their number."""
FindWork: TypeAlias = Callable[[], Awaitable[Sequence[tuple[str, str, int]]]]
"""Returns the replays with items that no process runs: tenant, replay, and the number of possible slots."""


async def queue_replay(sender: JobSender, tenant_id: str, replay_id: str, slot_count: int) -> None:
    """Queue the slots of a replay. Slots that are queued already are not queued twice."""
    # The slot of a worker that died stays occupied for a while, so another one is queued instead.
    left = slot_count
    for slot in range(2 * slot_count):
        payload = json.dumps({"replay_id": replay_id, "slot": slot}).encode()
        key = f"{NAME}:{replay_id}:{slot}"
        left -= await sender.send(NAME, payload, tenant_id=tenant_id, dedupe_key=key)
        if not left:
            return


def replay_job(run_items: RunItems, *, max_slots: int = MAX_SLOTS, max_beside: int = MAX_BESIDE) -> Job:
    """Build the job of a slot. A slot that exceeds the limits of the process ends at once and is queued again later."""
    running: Counter[str] = Counter()

    async def run(payload: bytes) -> None:
        replay_id: str = json.loads(payload)["replay_id"]
        limit = max_slots if running[replay_id] else max_slots + max_beside
        if running.total() >= limit:
            return
        running[replay_id] += 1
        try:
            count = await run_items(replay_id)
        finally:
            running.subtract([replay_id])
            if not running[replay_id]:
                del running[replay_id]
        if count:
            _log.info("replay.slot_ended", extra={"replay_id": replay_id, "item_count": count})

    return Job(name=NAME, run=run)


def replay_tick_job(find_work: FindWork, sender: JobSender) -> Job:
    """Build the periodic job that queues slots for replays whose workers have died or stopped."""

    async def run(_payload: bytes) -> None:
        for tenant_id, replay_id, slot_count in await find_work():
            await queue_replay(sender, tenant_id, replay_id, slot_count)

    return Job(name=TICK_NAME, run=run, cron=_EVERY_FEW_SECONDS)
