"""Compaction as a job: queued when the policy decides so, done by any worker, once per conversation at a time."""

import json
import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias

from server.conversation.errors import ConversationNotFound, EpochMoved
from server.jobs.job import Job
from server.jobs.queue import JobSender

NAME: Final = "compaction"
_log = logging.getLogger("strata.jobs")

Compact: TypeAlias = Callable[[str, str], Awaitable[datetime | None]]
"""Compacts a conversation of a tenant. Returns when to look again, if it is too early now."""


class SentCompactions:
    """Implements `server.compaction.watch.CompactionQueue` on the job queue."""

    def __init__(self, sender: JobSender) -> None:
        self._sender = sender

    async def queue_compaction(self, tenant_id: str, conversation_id: str, *, at: datetime | None = None) -> None:
        await send_compaction(self._sender, tenant_id, conversation_id, at=at)


async def send_compaction(
    sender: JobSender, tenant_id: str, conversation_id: str, *, at: datetime | None = None, look: int = 0
) -> None:
    """Queue a compaction unless the same one waits. `look`: how many looks came before it without a turn in between."""
    payload = json.dumps({"tenant_id": tenant_id, "conversation_id": conversation_id, "look": look}).encode()
    # One that waits for a cold cache must not block one that is due, nor one look the next. A compaction that runs may
    # have read the conversation before its last turn: another one may wait for it to end.
    slots = ("now", "next") if at is None else (f"later:{look % 2}",)
    delay = 0.0 if at is None else max(0.0, (at - datetime.now(UTC)).total_seconds())
    for slot in slots:
        key = f"{NAME}:{conversation_id}:{slot}"
        if await sender.send(NAME, payload, tenant_id=tenant_id, dedupe_key=key, delay_seconds=delay):
            return


def compaction_job(compact: Compact, sender: JobSender) -> Job:
    """Build the job. If it comes too early, because the conversation went on, it is queued again for later."""

    async def run(payload: bytes) -> None:
        request: dict[str, Any] = json.loads(payload)
        tenant_id, conversation_id = request["tenant_id"], request["conversation_id"]
        try:
            look_again_at = await compact(tenant_id, conversation_id)
        except ConversationNotFound:
            return  # erased meanwhile
        except EpochMoved:
            # The conversation had a turn meanwhile, and each turn queues a compaction if one is due.
            _log.info("compaction.overtaken", extra={"conversation_id": conversation_id})
            return
        if look_again_at is not None:
            await send_compaction(sender, tenant_id, conversation_id, at=look_again_at, look=request["look"] + 1)

    return Job(name=NAME, run=run)
