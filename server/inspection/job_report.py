"""The state of background jobs, for operators."""

from dataclasses import dataclass
from datetime import datetime
from typing import Final

FAILURE_HOURS: Final = 24
"""Failures older than this are not reported."""
MAX_JOBS: Final = 100_000
"""Maximum number of queued jobs that a report reads. If the queue is longer, the counts cover these only."""


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
