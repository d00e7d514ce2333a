"""The queue's own records: what jobs ran, when, and how they ended. Of use for a while, and then only in the way."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, TypeAlias

from server.jobs.job import Job

Prune: TypeAlias = Callable[[int], Awaitable[Mapping[str, int]]]
"""Removes what is older than so many days. How many rows, by table."""

_DAILY: Final = "41 3 * * *"
_log = logging.getLogger("strata.jobs")


def queue_log_job(days: int, prune: Prune) -> Job:
    """The daily pruning."""

    async def run(_payload: bytes) -> None:
        counts = await prune(days)
        _log.info("queue_log.pruned", extra={"days": days, **{f"{table}_count": n for table, n in counts.items()}})

    return Job(name="queue_log", run=run, cron=_DAILY)
