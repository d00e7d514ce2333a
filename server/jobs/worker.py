"""The worker: runs the queue's jobs until it is stopped, across outages of the database.

It has one connection of its own for the queue, because LISTEN needs one; the jobs use the pool. When that connection is
lost, the worker can no longer send heartbeats for its jobs and other workers will take them over. It therefore cancels
them, logs the outage once, and continues when the database is available again.
"""

import asyncio
import logging
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, cast

from pgqueuer.adapters.drivers.asyncpg import AsyncpgDriver
from pgqueuer.ports.driver import Driver

from server.conversation.errors import DatabaseUnavailable, StrataError
from server.conversation.shutdown import Shutdown
from server.jobs.job import Job
from server.jobs.queue import JobQueue, quiet_pgqueuer
from server.postgres.connections import Connection, connect, translate
from server.postgres.engine import Database

_GRACE_SECONDS: Final = 5.0
"""How long cancelled jobs have to be put back into the queue."""
_log = logging.getLogger("strata.jobs")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Times and limits. Only tests and the setting of the shutdown limit need other values than these."""

    shutdown_limit_seconds: float = 30.0
    """How long running jobs may take after a stop is requested. Jobs that take longer go back to the queue."""
    takeover_seconds: float = 30.0
    """A running job without a heartbeat for this long is taken over by another worker and starts again."""
    reconnect_seconds: float = 1.0
    """The pause between attempts to reach an unavailable database."""
    probe_seconds: float = 5.0
    """How often the connection is tested. The first success ends an outage."""
    silence_seconds: float = 60.0
    """A database that does not answer for this long is unavailable. Longer than its limit for one statement."""
    parallel_jobs: int = 8
    """How many jobs one worker runs at once; at least 2."""


class StopRequest:
    """A request to stop. The first lets running jobs finish; a second one cancels them."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.forced = asyncio.Event()

    def request(self) -> None:
        """Request a stop. May be called by a signal handler."""
        if self.requested.is_set():
            self.forced.set()
        self.requested.set()


class Worker:
    """One worker. Any number of them may share a database: a queued job runs in one of them."""

    def __init__(
        self,
        database: Database,
        jobs: Sequence[Job],
        *,
        shutdown: Shutdown | None = None,
        options: WorkerOptions | None = None,
    ) -> None:
        """`database` checks the schema on its first connection. `shutdown` is requested when jobs should end."""
        self._database = database
        self._jobs = jobs
        self._shutdown = shutdown or Shutdown()
        self._options = options or WorkerOptions()
        self._outage = _Outage()
        self._schema_checked = False

    async def run_until_signal(self) -> None:
        """Run until SIGINT or SIGTERM, then until the running jobs have ended; a second signal cancels them.

        Raises `SchemaBehind` or `SchemaAhead` if the database is not at this release's revision.
        """
        stop = StopRequest()
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, stop.request)
        try:
            await self.run(stop)
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    async def run(self, stop: StopRequest) -> None:
        """Run until `stop` is requested, then until the running jobs have ended. Raises as `run_until_signal` does."""
        _log.info("worker.started", extra={"jobs": [job.name for job in self._jobs]})
        while not stop.requested.is_set():
            try:
                await self._work(await self._connect(), stop)
            except DatabaseUnavailable as error:
                self._outage.begin(error)
                await _is_set_within(stop.requested, self._options.reconnect_seconds)
        _log.info("worker.stopped")

    async def _connect(self) -> Connection:
        if not self._schema_checked:
            async with self._database.connection():
                # Once: a later release may migrate while this worker runs, and keeps the schema usable for it.
                self._schema_checked = True
        return await connect(self._database.options)

    async def _work(self, connection: Connection, stop: StopRequest) -> None:
        """Run jobs until the worker stops. Raises `DatabaseUnavailable` when the connection is lost."""
        driver = AsyncpgDriver(cast("Any", connection))
        queue = JobQueue(driver, self._jobs, self._shutdown)
        running = asyncio.create_task(
            queue.run(takeover_seconds=self._options.takeover_seconds, parallel_jobs=self._options.parallel_jobs)
        )
        watching = asyncio.create_task(self._watch(connection, driver))
        requested = asyncio.create_task(stop.requested.wait())
        forced = asyncio.create_task(stop.forced.wait())
        with quiet_pgqueuer(lambda error: _find_outage(connection, error) is not None):
            try:
                await asyncio.wait({running, watching, requested}, return_when=asyncio.FIRST_COMPLETED)
                queue.stop()
                if requested.done():
                    await asyncio.wait(
                        {running, watching, forced},
                        timeout=self._options.shutdown_limit_seconds,
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                _raise_failure(connection, watching, running)
            finally:
                queue.interrupt()
                await asyncio.wait({running}, timeout=_GRACE_SECONDS)
                await _cancel(running, watching, requested, forced)
                connection.terminate()

    async def _watch(self, connection: Connection, driver: Driver) -> None:
        """Raise when the connection is lost or silent. pgqueuer would notice with its next statement, or never."""
        lost = asyncio.Event()
        connection.add_termination_listener(lambda _: lost.set())
        while not await _is_set_within(lost, self._options.probe_seconds) and not connection.is_closed():
            try:
                async with asyncio.timeout(self._options.silence_seconds):
                    await driver.fetch("SELECT 1")
            except TimeoutError:
                connection.terminate()
                raise DatabaseUnavailable("The database does not answer in time.") from None
            self._outage.end()
        raise DatabaseUnavailable("The database connection was lost.")


class _Outage:
    """Logs one line when the database is lost and one when it is back, and none for the attempts in between."""

    def __init__(self) -> None:
        self._began: float | None = None

    def begin(self, error: StrataError) -> None:
        if self._began is None:
            self._began = time.monotonic()
            _log.warning("worker.database_lost", extra={"reason": error.message})

    def end(self) -> None:
        if self._began is not None:
            _log.info("worker.database_recovered", extra={"seconds": round(time.monotonic() - self._began, 3)})
            self._began = None


def _raise_failure(connection: Connection, *tasks: "asyncio.Task[None]") -> None:
    """Raise the error that ended one of the tasks; `DatabaseUnavailable` if an outage caused it."""
    for task in tasks:
        error = task.exception() if task.done() else None
        if error is not None:
            outage = _find_outage(connection, error)
            if outage is None or outage is error:
                raise error
            raise outage from error


def _find_outage(connection: Connection, error: BaseException | None) -> DatabaseUnavailable | None:
    """Return the outage that caused the error, or None if the error is a bug."""
    if isinstance(error, DatabaseUnavailable):
        return error
    if connection.is_closed():
        return DatabaseUnavailable("The database connection was lost.")
    translated = None if error is None else translate(error)
    return translated if isinstance(translated, DatabaseUnavailable) else None


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


async def _cancel(*tasks: "asyncio.Task[Any]") -> None:
    """Cancel the tasks and ignore what they raise: the error that counts has been found before."""
    for task in tasks:
        task.cancel()
    done, pending = await asyncio.wait(tasks, timeout=_GRACE_SECONDS)
    for task in done:
        if not task.cancelled():
            task.exception()
    if pending:
        _log.warning("worker.jobs_abandoned")
