"""Retention: the raw bytes of providers' answers go when their time is over; what was said stays."""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, TypeAlias

from server.jobs.job import Job

Sweep: TypeAlias = Callable[[int], Awaitable[Mapping[str, int]]]
"""Removes what is older than so many days. How many rows it changed, by table."""

_DAILY: Final = "17 3 * * *"
"""At night for those near Greenwich, and not on the hour, when everybody else's jobs run."""
_log = logging.getLogger("strata.jobs")


def retention_job(days: int, sweep: Sweep) -> Job:
    """The daily sweep. With 0 days everything is kept: nothing is scheduled, and a sweep that was queued under another
    setting does nothing.
    """

    async def run(_payload: bytes) -> None:
        if days == 0:
            return
        began = time.monotonic()
        counts = await sweep(days)
        _log.info(
            "retention.swept",
            extra={
                "days": days,
                "seconds": round(time.monotonic() - began, 3),
                **{f"{table}_count": count for table, count in counts.items()},
            },
        )

    return Job(name="retention", run=run, cron=_DAILY if days else None)
