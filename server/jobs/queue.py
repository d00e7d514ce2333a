"""The job queue in Postgres, on pgqueuer: sending jobs to it, and running jobs from it.

Jobs become entrypoints and schedules of pgqueuer. A schedule does no work itself, it only queues the job. A scheduled
run therefore behaves as any queued one: it is listed in the queue, sends heartbeats, is taken over if its worker dies,
and is postponed if the database is unavailable.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, cast

import pgqueuer
from pgqueuer.adapters.drivers.asyncpg import AsyncpgDriver
from pgqueuer.adapters.persistence.qb import QueryBuilderEnvironment, QueryQueueBuilder, QuerySchedulerBuilder
from pgqueuer.domain.models import Schedule
from pgqueuer.domain.settings import DBSettings
from pgqueuer.ports.driver import Driver
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from server.conversation.errors import StrataError, Unavailable
from server.conversation.shutdown import Shutdown
from server.jobs.job import Job
from server.postgres.engine import Database

TENANT: Final = "tenant_id"
"""The header with the tenant of a job. The reports of `server.postgres` read it."""
_FIRST_DELAY_SECONDS: Final = 1.0
_MAX_DELAY_SECONDS: Final = 300.0
_log = logging.getLogger("strata.jobs")


class JobFailed(Exception):
    """An error as the queue's tables store it: its code or class, and the tenant if the job has one.

    The text of the original error may contain message content; it goes to the log only.
    `server.postgres.inspection.job_reports` reads the stored form.
    """

    def __init__(self, error: Exception, queued: pgqueuer.Job) -> None:
        name = error.code if isinstance(error, StrataError) else type(error).__name__
        tenant_id = (queued.headers or {}).get(TENANT)
        super().__init__(name if tenant_id is None else f"{name} {tenant_id}")


class QueueNames(DBSettings):
    """The table and channel names of our migration.

    By default pgqueuer reads them from the environment, under names as common as CHANNEL, FUNCTION and TRIGGER.
    """

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003  reason: pydantic's signature
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003  reason: as above
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003  reason: as above
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003  reason: as above
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


def build_queries(driver: Driver) -> pgqueuer.Queries:
    """Build pgqueuer's statements for the tables of our migration."""
    names = QueueNames()
    return pgqueuer.Queries(
        driver,
        qbe=QueryBuilderEnvironment(names),
        qbq=QueryQueueBuilder(names),
        qbs=QuerySchedulerBuilder(names),
    )


class JobSender:
    """Puts jobs into the queue."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def send(
        self, name: str, payload: bytes, *, tenant_id: str, dedupe_key: str, delay_seconds: float = 0.0
    ) -> bool:
        """Queue a job unless one with the same key waits or runs. Returns whether it was queued.

        `tenant_id` is shown in the reports about the queue. Raises `DatabaseUnavailable`.
        """
        async with self._database.connection() as connection:
            queued = await build_queries(AsyncpgDriver(cast("Any", connection))).enqueue(
                name,
                payload,
                execute_after=timedelta(seconds=delay_seconds) if delay_seconds else None,
                dedupe_key=dedupe_key,
                on_conflict="skip",
                headers={TENANT: tenant_id},
            )
        return queued[0] is not None


class JobQueue:
    """The queue on one connection. It cannot be used after the connection is lost."""

    def __init__(self, driver: Driver, jobs: Iterable[Job], shutdown: Shutdown | None = None) -> None:
        """`shutdown` is requested when the queue stops; long jobs check it between their steps."""
        self._shutdown = shutdown or Shutdown()
        self._queries = build_queries(driver)
        self._queue = pgqueuer.PgQueuer(driver, channel=QueueNames().channel, queries=self._queries)
        self._running: set[asyncio.Task[Any]] = set()
        for job in jobs:
            self._queue.entrypoint(job.name, accepts_context=False)(self._entrypoint(job))
            if job.cron is not None:
                self._queue.schedule(job.name, job.cron, accepts_context=False)(self._schedule(job))

    async def verify(self) -> None:
        """Raise `RuntimeError` if the tables are not what this release of pgqueuer needs."""
        await self._queue.qm.verify_structure()

    async def run(self, *, takeover_seconds: float, parallel_jobs: int) -> None:
        """Run jobs until the queue is stopped and its running jobs have ended. A new schedule is due at once.

        Errors of the driver are raised unchanged.
        """
        self._shutdown.requested.clear()
        # pgqueuer itself would wait for the first time that the cron expression gives.
        await self._queries.insert_schedule(dict.fromkeys(self._queue.sm.registry, timedelta(0)))
        takeover = timedelta(seconds=takeover_seconds)
        await self._queue.run(
            dequeue_timeout=takeover / 2,
            heartbeat_timeout=takeover,
            batch_size=parallel_jobs // 2,
            max_concurrent_tasks=parallel_jobs,
        )

    def stop(self) -> None:
        """Start no more jobs, and request long-running jobs to end."""
        self._shutdown.requested.set()
        self._queue.shutdown.set()

    def interrupt(self) -> None:
        """Stop, and cancel the running jobs so that they go back to the queue.

        Cancelling `run` instead is not enough: pgqueuer waits for its jobs and records a cancelled one as finished.
        """
        self.stop()
        for task in self._running:
            task.cancel()

    def _entrypoint(self, job: Job) -> Callable[[pgqueuer.Job], Awaitable[None]]:
        async def run(queued: pgqueuer.Job) -> None:
            with job_errors(queued), self._interruptible():
                await job.run(queued.payload or b"")

        return run

    def _schedule(self, job: Job) -> Callable[[Schedule], Awaitable[None]]:
        async def enqueue(_schedule: Schedule) -> None:
            # Skipped if one waits or runs already.
            await self._queries.enqueue(job.name, None, dedupe_key=f"scheduled:{job.name}", on_conflict="skip")

        return enqueue

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Let `interrupt` cancel this task within the block, but not pgqueuer's own steps before and after the job."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("A job runs in a task.")
        self._running.add(task)
        try:
            yield
        finally:
            self._running.discard(task)


class job_errors:  # noqa: N801  reason: used as a statement
    """Translate what a job raises into a retry or a failure of pgqueuer."""

    def __init__(self, queued: pgqueuer.Job) -> None:
        self._queued = queued

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        earlier = self._queued.attempts
        fields = {"job": self._queued.entrypoint, "job_id": self._queued.id, "attempt": earlier + 1}
        match error:
            case asyncio.CancelledError():
                # The worker stops or has lost its connection to the queue.
                _log.info("job.interrupted", extra=fields)
                raise pgqueuer.RetryRequested(reason="interrupted") from None
            case Unavailable():
                delay = retry_delay_seconds(earlier)
                _log.warning("job.postponed", extra={**fields, "code": error.code, "delay_seconds": delay})
                raise pgqueuer.RetryRequested(delay=timedelta(seconds=delay), reason=error.code) from None
            case Exception():
                _log.error("job.failed", extra=fields, exc_info=error)
                raise JobFailed(error, self._queued) from None
            case _:
                pass


def retry_delay_seconds(earlier_attempts: int) -> float:
    """Return the exponential delay before the next attempt."""
    return min(_FIRST_DELAY_SECONDS * 2.0 ** min(earlier_attempts, 16), _MAX_DELAY_SECONDS)


@contextmanager
def quiet_pgqueuer(is_outage: Callable[[BaseException | None], bool]) -> Iterator[None]:
    """Within the block, drop those records of pgqueuer's logger that repeat ours.

    pgqueuer logs a traceback for each of its tasks that an outage ends, and for each job that fails.
    """

    def is_new(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return record.levelno >= logging.WARNING and not isinstance(error, JobFailed) and not is_outage(error)

    logger = logging.getLogger("pgqueuer")
    logger.addFilter(is_new)
    try:
        yield
    finally:
        logger.removeFilter(is_new)
