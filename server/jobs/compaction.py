"""Compaction as a job: queued when the policy says so, done by any worker, once per conversation at a time."""

import json
import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias

from server.conversation.errors import ConversationNotFound, EpochMoved
from server.jobs.job import Job
from server.jobs.sending import JobSender

NAME: Final = "compaction"
_log = logging.getLogger("strata.jobs")

Compact: TypeAlias = Callable[[str, str], Awaitable[datetime | None]]
"""Compacts a conversation of a tenant. When to look again, where now is not the time."""


class SentCompactions:
    """Implements `server.compaction.watch.CompactionQueue` on the job queue."""

    def __init__(self, sender: JobSender) -> None:
        self._sender = sender

    async def queue_compaction(self, tenant_id: str, conversation_id: str, *, at: datetime | None = None) -> None:
        await send_compaction(self._sender, tenant_id, conversation_id, at=at)


async def send_compaction(
    sender: JobSender, tenant_id: str, conversation_id: str, *, at: datetime | None = None, look: int = 0
) -> None:
    """Queues one, unless the same waits. `look`: how many came before it without a turn in between."""
    payload = json.dumps({"tenant_id": tenant_id, "conversation_id": conversation_id, "look": look}).encode()
    # One that waits for a cold cache must not stand in the way of one that is due, nor a look in that of the next. And
    # one that runs may have looked before what is to be compacted was there: another may wait behind it.
    places = ("now", "next") if at is None else (f"later:{look % 2}",)
    delay = 0.0 if at is None else max(0.0, (at - datetime.now(UTC)).total_seconds())
    for place in places:
        key = f"{NAME}:{conversation_id}:{place}"
        if await sender.send(NAME, payload, tenant_id=tenant_id, dedupe_key=key, delay_seconds=delay):
            return


def compaction_job(compact: Compact, sender: JobSender) -> Job:
    """The job. One that comes too early, since the conversation went on, looks again when it says."""

    async def run(payload: bytes) -> None:
        asked: dict[str, Any] = json.loads(payload)
        tenant_id, conversation_id = asked["tenant_id"], asked["conversation_id"]
        try:
            look_again_at = await compact(tenant_id, conversation_id)
        except ConversationNotFound:
            # Erased since.
            return
        except EpochMoved:
            # A conversation that moves so fast has turns, and each of them asks again.
            _log.info("compaction.overtaken", extra={"conversation_id": conversation_id})
            return
        if look_again_at is not None:
            await send_compaction(sender, tenant_id, conversation_id, at=look_again_at, look=asked["look"] + 1)

    return Job(name=NAME, run=run)
