"""The worker: does the queue's jobs until it is told to stop, whatever the database does meanwhile.

It has one connection of its own for the queue, since LISTEN needs one; the jobs have theirs. When that connection is
lost, the worker can no longer show that its jobs are alive and others will take them over, so it lets go of them, says
so once, and comes back when the database does.
"""

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, cast

from pgqueuer.adapters.drivers.asyncpg import AsyncpgDriver
from pgqueuer.ports.driver import Driver

from server.conversation.errors import DatabaseUnavailable, StrataError
from server.conversation.shutdown import Shutdown
from server.jobs.job import Job
from server.jobs.queue import JobQueue, quiet_pgqueuer

_GRACE_SECONDS: Final = 5.0
"""How long cancelled jobs have to be put back into the queue."""
_log = logging.getLogger("strata.jobs")


class QueueConnection(Protocol):
    """What the worker itself needs of an asyncpg connection; pgqueuer needs a whole one."""

    def add_termination_listener(self, callback: Callable[[Any], None]) -> None:
        """`callback` is called once the connection is gone."""

    def is_closed(self) -> bool: ...

    def terminate(self) -> None:
        """Ends it without asking the other side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """What a worker is made of."""

    jobs: Sequence[Job]
    connect: Callable[[], Awaitable[QueueConnection]]
    """A new asyncpg connection. Raises `DatabaseUnavailable`."""
    check_schema: Callable[[], Awaitable[None]]
    """Raises `SchemaBehind`, `SchemaAhead` or `DatabaseUnavailable`."""
    translate: Callable[[BaseException], StrataError | None]
    """Tells an outage from a bug: `DatabaseUnavailable` for an error that the database's absence explains."""
    shutdown: Shutdown = field(default_factory=Shutdown)
    """The one that its long jobs look at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Times and numbers. The defaults suit everybody but tests."""

    shutdown_limit_seconds: float = 30.0
    """How long running jobs may go on once the worker is asked to stop. What is left of them goes back to the queue."""
    takeover_seconds: float = 30.0
    """A running job that gave no sign for so long belongs to a dead worker, and another one begins it anew."""
    reconnect_seconds: float = 1.0
    """The pause before each attempt to reach a database that is away."""
    probe_seconds: float = 5.0
    """How often the connection is tried. The first success ends an outage."""
    silence_seconds: float = 60.0
    """A database that answers nothing for so long is away. Longer than its limit for one statement."""
    parallel_jobs: int = 8
    """How many jobs one worker does at once; at least 2."""


class StopRequest:
    """Asked once: running jobs may finish. Asked twice: at once."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurried = asyncio.Event()

    def ask(self) -> None:
        """For a signal handler."""
        if self.asked.is_set():
            self.hurried.set()
        self.asked.set()


async def run_worker(parts: WorkerParts, options: WorkerOptions) -> None:
    """Until SIGINT or SIGTERM comes, and then until the running jobs have ended; a second signal cuts that short.

    Raises `SchemaBehind` or `SchemaAhead` where the database is not at this release's revision.
    """
    stop = StopRequest()
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, stop.ask)
    try:
        await Worker(parts, options).run(stop)
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


class Worker:
    """One worker. Any number of them may share a database: a job runs in one of them."""

    def __init__(self, parts: WorkerParts, options: WorkerOptions) -> None:
        self._parts = parts
        self._options = options
        self._outage = _Outage()
        self._schema_checked = False

    async def run(self, stop: StopRequest) -> None:
        """See `run_worker`."""
        _log.info("worker.started", extra={"jobs": [job.name for job in self._parts.jobs]})
        while not stop.asked.is_set():
            try:
                await self._work(await self._connect(), stop)
            except DatabaseUnavailable as error:
                self._outage.begin(error)
                await _comes(stop.asked, self._options.reconnect_seconds)
        _log.info("worker.stopped")

    async def _connect(self) -> QueueConnection:
        if not self._schema_checked:
            await self._parts.check_schema()
            # Once: a later release may migrate under a running worker, and keeps its schema usable for this one.
            self._schema_checked = True
        return await self._parts.connect()

    async def _work(self, connection: QueueConnection, stop: StopRequest) -> None:
        """Until the worker is to stop. Raises `DatabaseUnavailable` when the connection is lost."""
        driver = AsyncpgDriver(cast("Any", connection))
        queue = JobQueue(driver, self._parts.jobs, self._parts.shutdown)
        running = asyncio.create_task(
            queue.run(takeover_seconds=self._options.takeover_seconds, parallel_jobs=self._options.parallel_jobs)
        )
        watching = asyncio.create_task(self._watch(connection, driver))
        asked = asyncio.create_task(stop.asked.wait())
        hurried = asyncio.create_task(stop.hurried.wait())
        with quiet_pgqueuer(lambda error: self._explain(connection, error) is not None):
            try:
                await asyncio.wait({running, watching, asked}, return_when=asyncio.FIRST_COMPLETED)
                queue.stop()
                if asked.done():
                    await asyncio.wait(
                        {running, watching, hurried},
                        timeout=self._options.shutdown_limit_seconds,
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                self._raise_failure(connection, watching, running)
            finally:
                queue.interrupt()
                await asyncio.wait({running}, timeout=_GRACE_SECONDS)
                await _cancel(running, watching, asked, hurried)
                connection.terminate()

    def _raise_failure(self, connection: QueueConnection, *tasks: "asyncio.Task[None]") -> None:
        """What ended one of the tasks, in our words where it has to do with the database."""
        for task in tasks:
            error = task.exception() if task.done() else None
            if error is not None:
                explanation = self._explain(connection, error)
                if explanation is None or explanation is error:
                    raise error
                raise explanation from error

    def _explain(self, connection: QueueConnection, error: BaseException | None) -> StrataError | None:
        """Why the database has to do with it, or None: then it is a bug."""
        if isinstance(error, DatabaseUnavailable):
            return error
        if connection.is_closed():
            return DatabaseUnavailable("The database connection was lost.")
        translated = None if error is None else self._parts.translate(error)
        return translated if isinstance(translated, DatabaseUnavailable) else None

    async def _watch(self, connection: QueueConnection, driver: Driver) -> None:
        """Raises when the connection is gone or silent: pgqueuer would find out with its next statement, or never."""
        gone = asyncio.Event()
        connection.add_termination_listener(lambda _: gone.set())
        while not await _comes(gone, self._options.probe_seconds) and not connection.is_closed():
            try:
                async with asyncio.timeout(self._options.silence_seconds):
                    await driver.fetch("SELECT 1")
            except TimeoutError:
                connection.terminate()
                raise DatabaseUnavailable("The database does not answer in time.") from None
            self._outage.end()
        raise DatabaseUnavailable("The database connection was lost.")


class _Outage:
    """One line when the database goes, one when it is back, however many attempts lie between."""

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


async def _comes(event: asyncio.Event, seconds: float) -> bool:
    """Whether the event comes within so many seconds."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


async def _cancel(*tasks: "asyncio.Task[Any]") -> None:
    """Ends them. What they raise now is only a consequence of what is known already."""
    for task in tasks:
        task.cancel()
    done, pending = await asyncio.wait(tasks, timeout=_GRACE_SECONDS)
    for task in done:
        if not task.cancelled():
            task.exception()
    if pending:
        _log.warning("worker.jobs_abandoned")
