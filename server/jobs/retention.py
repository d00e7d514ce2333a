"""Daily deletion of old data: raw bytes of provider responses, and the queue's own records of finished jobs."""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, TypeAlias

from server.jobs.job import Job

Sweep: TypeAlias = Callable[[int], Awaitable[Mapping[str, int]]]
"""Deletes what is older than the given number of days. Returns the number of changed rows by table."""

# Not on the hour, when many other scheduled jobs start.
_RETENTION_CRON: Final = "17 3 * * *"
_QUEUE_LOG_CRON: Final = "41 3 * * *"
_log = logging.getLogger("strata.jobs")


def retention_job(days: int, sweep: Sweep) -> Job:
    """Build the job that removes raw response bytes; turns are kept.

    With 0 days nothing is scheduled, and a run that was queued under another setting does nothing.
    """

    async def run(_payload: bytes) -> None:
        if days == 0:
            return
        began = time.monotonic()
        counts = await sweep(days)
        _log.info(
            "retention.swept",
            extra={"days": days, "seconds": round(time.monotonic() - began, 3), **_count_fields(counts)},
        )

    return Job(name="retention", run=run, cron=_RETENTION_CRON if days else None)


def queue_log_job(days: int, prune: Sweep) -> Job:
    """Build the job that prunes the queue's records of finished jobs."""

    async def run(_payload: bytes) -> None:
        _log.info("queue_log.pruned", extra={"days": days, **_count_fields(await prune(days))})

    return Job(name="queue_log", run=run, cron=_QUEUE_LOG_CRON)


def _count_fields(counts: Mapping[str, int]) -> dict[str, int]:
    return {f"{table}_count": count for table, count in counts.items()}
