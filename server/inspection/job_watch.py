"""The watch over the job queue: looks at it now and then, so that whoever asks for metrics need not."""

import asyncio
from collections.abc import Sequence
from typing import Final

from server.conversation.errors import StrataError
from server.inspection.job_report import JobObserver, JobReports, JobStatus

_PAUSE_SECONDS: Final = 15.0


class JobWatch:
    """Counts all jobs of the queue, those of names that have none included."""

    def __init__(
        self,
        reports: JobReports,
        observer: JobObserver,
        *,
        names: Sequence[str],
        pause_seconds: float = _PAUSE_SECONDS,
    ) -> None:
        self._reports = reports
        self._observer = observer
        self._names = names
        self._pause_seconds = pause_seconds

    async def watch(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(self._pause_seconds)
            await self.look()

    async def look(self) -> None:
        """One look."""
        try:
            found = await self._reports.report_jobs(None)
        except StrataError:
            # The server's readiness says what is wrong with the database. Old numbers would say that nothing is.
            self._observer.jobs_unknown()
            return
        known = {status.name for status in found}
        idle = [JobStatus(name=name) for name in self._names if name not in known]
        self._observer.jobs_counted([*found, *idle])
