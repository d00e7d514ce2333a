"""Where pgqueuer begins: jobs become its entrypoints and schedules.

A schedule does no work itself, it only queues the job. So a scheduled run has all that a queued one has: it is seen in
the queue, beats while it runs, is taken over when its worker dies, and is postponed when the database is away.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import pgqueuer
from pgqueuer.adapters.persistence.qb import QueryBuilderEnvironment, QueryQueueBuilder, QuerySchedulerBuilder
from pgqueuer.domain.models import Schedule
from pgqueuer.domain.settings import DBSettings
from pgqueuer.ports.driver import Driver
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from server.conversation.errors import StrataError, Unavailable
from server.conversation.shutdown import Shutdown
from server.jobs.job import Job

TENANT: Final = "tenant_id"
"""The header that says whose a job is. The reports of `server.postgres` look for it."""
_FIRST_DELAY_SECONDS: Final = 1.0
_LONGEST_DELAY_SECONDS: Final = 300.0
_log = logging.getLogger("strata.jobs")


class JobFailed(Exception):
    """What the queue's tables learn of an error: its name, and whose job it was where it was somebody's.

    Its text may hold content, and is in the log. `server.postgres.inspection.job_reports` reads this one.
    """

    def __init__(self, error: Exception, queued: pgqueuer.Job) -> None:
        name = error.code if isinstance(error, StrataError) else type(error).__name__
        tenant_id = (queued.headers or {}).get(TENANT)
        super().__init__(name if tenant_id is None else f"{name} {tenant_id}")


class QueueNames(DBSettings):
    """The names that the migration made, and no others.

    pgqueuer reads them from the environment, also under names as common as CHANNEL, FUNCTION and TRIGGER.
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
    """The statements of pgqueuer, on the tables of our migration."""
    names = QueueNames()
    return pgqueuer.Queries(
        driver,
        qbe=QueryBuilderEnvironment(names),
        qbq=QueryQueueBuilder(names),
        qbs=QuerySchedulerBuilder(names),
    )


class JobQueue:
    """The queue on one connection, as long as that lasts."""

    def __init__(self, driver: Driver, jobs: Iterable[Job], shutdown: Shutdown | None = None) -> None:
        """`shutdown` is up whenever no job is begun any more."""
        self._shutdown = shutdown or Shutdown()
        self._queries = build_queries(driver)
        self._queue = pgqueuer.PgQueuer(driver, channel=QueueNames().channel, queries=self._queries)
        self._running: set[asyncio.Task[Any]] = set()
        for job in jobs:
            self._queue.entrypoint(job.name, accepts_context=False)(self._entrypoint(job))
            if job.cron is not None:
                self._queue.schedule(job.name, job.cron, accepts_context=False)(self._schedule(job))

    async def verify(self) -> None:
        """Raises `RuntimeError` where the tables are not what this release of pgqueuer needs."""
        await self._queue.qm.verify_structure()

    async def run(self, *, takeover_seconds: float, parallel_jobs: int) -> None:
        """Until it is stopped and its jobs have ended. Schedules that were never seen before are due at once.

        Raises what the driver raises.
        """
        self._shutdown.requested.clear()
        # pgqueuer itself would wait for the first time that the expression names.
        await self._queries.insert_schedule(dict.fromkeys(self._queue.sm.registry, timedelta(0)))
        takeover = timedelta(seconds=takeover_seconds)
        await self._queue.run(
            dequeue_timeout=takeover / 2,
            heartbeat_timeout=takeover,
            batch_size=parallel_jobs // 2,
            max_concurrent_tasks=parallel_jobs,
        )

    def stop(self) -> None:
        """No job is begun any more, and those that take long are asked to come to an end."""
        self._shutdown.requested.set()
        self._queue.shutdown.set()

    def interrupt(self) -> None:
        """The same, and the running jobs go back to the queue.

        Cancelling `run` would not do: pgqueuer waits for its jobs, and takes a cancelled one for finished.
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
            # One waiting or running is enough.
            await self._queries.enqueue(job.name, None, dedupe_key=f"scheduled:{job.name}", on_conflict="skip")

        return enqueue

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Only here: what pgqueuer does before and after a job must not be cut off."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("A job runs in a task.")
        self._running.add(task)
        try:
            yield
        finally:
            self._running.discard(task)


class job_errors:  # noqa: N801  reason: reads as a statement where it is used
    """Turns what a job raises into what pgqueuer has to do about it."""

    def __init__(self, queued: pgqueuer.Job) -> None:
        self._queued = queued

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        earlier = self._queued.attempts
        fields = {"job": self._queued.entrypoint, "job_id": self._queued.id, "attempt": earlier + 1}
        match error:
            case asyncio.CancelledError():
                # The worker stops, or has lost the queue.
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
    """Twice as long after each attempt, within limits."""
    return min(_FIRST_DELAY_SECONDS * 2.0 ** min(earlier_attempts, 16), _LONGEST_DELAY_SECONDS)


@contextmanager
def quiet_pgqueuer(is_outage: Callable[[BaseException | None], bool]) -> Iterator[None]:
    """Within the block pgqueuer's own log keeps to what we do not say ourselves.

    It writes a traceback for each of its tasks that an outage ends, and one for each job that fails.
    """

    def has_news(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return record.levelno >= logging.WARNING and not isinstance(error, JobFailed) and not is_outage(error)

    logger = logging.getLogger("pgqueuer")
    logger.addFilter(has_news)
    try:
        yield
    finally:
        logger.removeFilter(has_news)
