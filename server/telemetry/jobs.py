"""The job queue for operators, as metrics. Implements `server.inspection.job_report.JobObserver`.

The numbers are those of the whole database, whichever process tells them, as it has last seen them.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, Gauge

from server.inspection.job_report import JobStatus
from server.telemetry.limits import NameSet

_NAMES: Final = 40


class JobMetrics:
    """Gauges by job."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._names = NameSet(others=_NAMES)
        self._waiting = Gauge(
            "strata_jobs_waiting", "Jobs of the whole queue that could begin now.", ("job",), registry=registry
        )
        self._oldest = Gauge(
            "strata_jobs_oldest_waiting_seconds",
            "For how long the first of them could have begun.",
            ("job",),
            registry=registry,
        )

    def jobs_counted(self, statuses: Sequence[JobStatus]) -> None:
        self.jobs_unknown()
        for status in statuses:
            name = self._names.admit(status.name)
            self._waiting.labels(name).inc(status.waiting_count)
            self._oldest.labels(name).set_function(partial(_age_seconds, status.oldest_waiting_at))

    def jobs_unknown(self) -> None:
        self._waiting.clear()
        self._oldest.clear()


def _age_seconds(since: datetime | None) -> float:
    """Clocks of several machines may run apart: never below zero."""
    return 0.0 if since is None else max(0.0, (datetime.now(UTC) - since).total_seconds())
