"""Reports of background jobs: what waits, what runs, what failed lately, and whose it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Protocol

LATELY_HOURS: Final = 24
"""For how long a failure counts."""
JOB_LIMIT: Final = 100_000
"""So many jobs of the queue are looked at. Of a longer one the counts are of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """The jobs of one name."""

    name: str
    waiting_count: int = 0
    """Those that could begin now."""
    running_count: int = 0
    """Also those of a worker that has died, until another one takes them over."""
    later_count: int = 0
    """Those that wait for their time."""
    postponed_count: int = 0
    """Of those that wait, how many were tried before."""
    failed_count: int = 0
    """Those that were given up in the last hours, see `LATELY_HOURS`."""
    oldest_waiting_at: datetime | None = None
    """Since when the first of those that wait could have begun. None where none waits."""
    last_error: str | None = None
    """Why one was given up or postponed last: the code of one of our errors, or the class of another."""
    last_error_at: datetime | None = None


class JobReports(Protocol):
    """Where reports come from. Raises `DatabaseUnavailable`."""

    async def report_jobs(self, tenant_id: str | None) -> Sequence[JobStatus]:
        """By name, those of which there is something to tell. Of one tenant's jobs, or of all with those of nobody."""
        ...


class JobObserver(Protocol):
    """Told about the queue now and then. Neither raises nor waits."""

    def jobs_counted(self, statuses: Sequence[JobStatus]) -> None:
        """The whole queue, as it was just now."""
        ...

    def jobs_unknown(self) -> None:
        """Nobody can say how it is: what was told before is no longer true."""
        ...
