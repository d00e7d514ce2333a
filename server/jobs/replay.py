"""Replays as jobs: slots, each of which runs items one after the other, in any worker of any machine.

However many slots are queued, no more items run at the same time than the replay allows: whoever claims one too many
gets none. So a slot may be queued again at any time, and a tick does it for replays that have items and too few slots.
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
"""In one process: replays take long, and its other jobs must get their turn."""
MAX_BESIDE: Final = 2
"""More than these, for replays that have none there yet: one that is slow must not keep all others waiting."""
_EVERY_FEW_SECONDS: Final = "* * * * * */10"
_log = logging.getLogger("strata.jobs")

RunItems: TypeAlias = Callable[[str], Awaitable[int]]
"""Runs items of a replay until there is none left for this process. How many."""
FindWork: TypeAlias = Callable[[], Awaitable[Sequence[tuple[str, str, int]]]]
"""Replays with items that nobody runs: tenant, replay, and how many slots they could have."""


class SentReplays:
    """Implements `server.replay.rerun.queue.ReplayQueue` on the job queue."""

    def __init__(self, sender: JobSender) -> None:
        self._sender = sender

    async def queue_replay(self, tenant_id: str, replay_id: str, *, slot_count: int) -> None:
        # The slot of a worker that died is taken for a while: another one goes in its place.
        left = slot_count
        for slot in range(2 * slot_count):
            payload = json.dumps({"replay_id": replay_id, "slot": slot}).encode()
            key = f"{NAME}:{replay_id}:{slot}"
            left -= await self._sender.send(NAME, payload, tenant_id=tenant_id, dedupe_key=key)
            if not left:
                return


def replay_job(run_items: RunItems, *, max_slots: int = MAX_SLOTS, max_beside: int = MAX_BESIDE) -> Job:
    """A slot. One too many for this process ends at once, and the tick gives it to another."""
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
    """Queues slots for replays whose workers have died or stopped, or that nobody has queued."""
    queue = SentReplays(sender)

    async def run(_payload: bytes) -> None:
        for tenant_id, replay_id, slot_count in await find_work():
            await queue.queue_replay(tenant_id, replay_id, slot_count=slot_count)

    return Job(name=TICK_NAME, run=run, cron=_EVERY_FEW_SECONDS)
