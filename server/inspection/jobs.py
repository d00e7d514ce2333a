"""The state of background jobs, for operators, and values that are polled in the background for metrics."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Generic, TypeVar

from server.conversation.errors import StrataError

FAILURE_HOURS: Final = 24
"""Failures older than this are not reported."""
MAX_JOBS: Final = 100_000
"""Maximum number of queued jobs that a report reads. If the queue is longer, the counts cover these only."""
_PAUSE_SECONDS: Final = 15.0

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """The jobs of one name."""

    name: str
    waiting_count: int = 0
    """Jobs that could start now."""
    running_count: int = 0
    """Includes the jobs of a worker that has died, until another worker takes them over."""
    later_count: int = 0
    """Jobs that are scheduled for a later time."""
    postponed_count: int = 0
    """Queued jobs that were tried before."""
    failed_count: int = 0
    """Jobs that were given up in the last `FAILURE_HOURS`."""
    oldest_waiting_at: datetime | None = None
    """Since when the oldest waiting job could have started. None if no job is waiting."""
    last_error: str | None = None
    """Why a job was last given up or postponed: an error code, or the name of an exception class."""
    last_error_at: datetime | None = None


class Watch(Generic[Value]):
    """Polls one value. It is None if the database did not answer the last time: an old value would be wrong."""

    def __init__(
        self,
        load: Callable[[], Awaitable[Value]],
        publish: Callable[[Value | None], None] | None = None,
        *,
        pause_seconds: float = _PAUSE_SECONDS,
    ) -> None:
        """`publish` is called after each poll."""
        self.value: Value | None = None
        self._load = load
        self._publish = publish
        self._pause_seconds = pause_seconds

    async def run(self) -> None:
        """Poll until cancelled, for the first time after a pause."""
        while True:
            await asyncio.sleep(self._pause_seconds)
            await self.poll()

    async def poll(self) -> None:
        """Load the value once."""
        try:
            self.value = await self._load()
        except StrataError:
            self.value = None
        if self._publish is not None:
            self._publish(self.value)


async def report_all_jobs(
    report_jobs: Callable[[str | None], Awaitable[Sequence[JobStatus]]], names: Sequence[str]
) -> Sequence[JobStatus]:
    """Report the jobs of all tenants, including the names that have none. `report_jobs` is that of an inspector."""
    found = await report_jobs(None)
    known = {status.name for status in found}
    return [*found, *(JobStatus(name=name) for name in names if name not in known)]
