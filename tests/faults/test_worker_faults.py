"""The worker when processes die and the database becomes unavailable: real processes, real signals, real
connections.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeAlias
from urllib.parse import parse_qs, urlsplit, urlunsplit

import asyncpg
import pytest
from pgqueuer.adapters.drivers.asyncpg import AsyncpgDriver

import server
from server.jobs.queue import build_queries
from server.postgres.connections import DatabaseOptions, connect
from server.postgres.embedded.service import describe_embedded
from server.postgres.engine import Database
from server.postgres.migrations import migrate_up
from tests.support.fakes.embedded_user import EmbeddedUser, open_base_dir

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"
Start: TypeAlias = Callable[..., "WorkerProcess"]

LIMIT_SECONDS = 40.0
TAKEOVER_SECONDS = 4.0
"""A machine that is busy with other tests must not make a live worker look dead."""
APPLICATION = "strata-worker-under-test"

WORKER_PROGRAM = """
import asyncio, json, logging, sys
from pathlib import Path
from server.jobs.job import Job
from server.jobs.worker import Worker, WorkerOptions
from server.postgres.connections import DatabaseOptions
from server.postgres.engine import Database
from server.postgres.migrations import require_current_schema

url, application, release, options = sys.argv[1:]
database = DatabaseOptions(url=url, application_name=application, connect_seconds=3)

class Lines(logging.Formatter):
    def format(self, record):
        return json.dumps({"event": record.getMessage(), "logger": record.name, "trace": bool(record.exc_info)})

handler = logging.StreamHandler(sys.stdout)
handler.setFormatter(Lines())
logging.basicConfig(level="INFO", handlers=[handler])
log = logging.getLogger("test")

async def work(payload):
    log.info("begun")
    while not Path(release).exists():
        await asyncio.sleep(0.02)
    log.info("ended")

async def main():
    pool = Database(database, on_first_contact=require_current_schema)
    worker = Worker(pool, [Job(name="work", run=work)], options=WorkerOptions(**json.loads(options)))
    await worker.run_until_signal()
    await pool.close()

asyncio.run(main())
"""


class WorkerProcess:
    """A worker in a separate process, whose one job runs until the release file exists."""

    def __init__(self, url: str, directory: Path, number: int, **options: float) -> None:
        quick = {
            "takeover_seconds": TAKEOVER_SECONDS,
            "reconnect_seconds": 0.1,
            "probe_seconds": 0.2,
            "silence_seconds": 1.0,
        }
        self._file = directory / f"worker-{number}.log"
        with self._file.open("w") as output:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    WORKER_PROGRAM,
                    url,
                    APPLICATION,
                    str(directory / "release"),
                    json.dumps(quick | options),
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": str(Path(server.__file__).parents[1])},
            )

    def events(self) -> list[str]:
        return [json.loads(line)["event"] for line in self._file.read_text().splitlines() if line.startswith("{")]

    async def wait_for_log(self, event: str, times: int = 1) -> None:
        await eventually(lambda: _is(self.events().count(event) >= times), self._file.read_text)

    async def ends(self) -> int:
        await eventually(lambda: _is(self.process.poll() is not None), self._file.read_text)
        return int(self.process.returncode)

    def output(self) -> str:
        return self._file.read_text()


async def eventually(condition: Callable[[], Awaitable[bool]], story: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while True:
        if await condition():
            return
        assert time.monotonic() < deadline, f"it did not come true in time\n{story()}"
        await asyncio.sleep(0.05)


async def _is(value: bool) -> bool:  # noqa: FBT001  reason: makes a condition of it
    return value


@pytest.fixture
async def connection(database: Database) -> AsyncIterator[Connection]:
    """A connection to a database with an empty queue."""
    connection = await connect(database.options)
    await connection.execute("DELETE FROM pgqueuer; DELETE FROM pgqueuer_log; DELETE FROM pgqueuer_schedules")
    yield connection
    await connection.close()


@pytest.fixture
def release(tmp_path: Path) -> Callable[[], None]:
    """Let the jobs end: those that run, and those to come."""
    return (tmp_path / "release").touch


@pytest.fixture
def start(database_options: DatabaseOptions, tmp_path: Path) -> Iterator[Start]:
    workers: list[WorkerProcess] = []

    def start(url: str = database_options.url, **options: float) -> WorkerProcess:
        workers.append(WorkerProcess(url, tmp_path, len(workers), **options))
        return workers[-1]

    yield start
    for worker in workers:
        worker.process.kill()
        worker.process.wait(LIMIT_SECONDS)


async def enqueue(connection: Connection) -> None:
    await build_queries(AsyncpgDriver(connection)).enqueue("work", b"")


async def queue_is_empty(connection: Connection) -> bool:
    return not await connection.fetchval("SELECT count(*) FROM pgqueuer")


async def outcomes(connection: Connection) -> list[str]:
    return [
        row["status"]
        for row in await connection.fetch("SELECT status FROM pgqueuer_log WHERE status <> 'queued' ORDER BY id")
    ]


class TestProcesses:
    async def test_the_job_of_a_killed_worker_is_taken_over(
        self, connection: Connection, start: Start, release: Callable[[], None]
    ) -> None:
        first = start()
        await enqueue(connection)
        await first.wait_for_log("begun")
        second = start()
        await second.wait_for_log("worker.started")
        first.process.kill()

        await second.wait_for_log("begun")
        release()
        await second.wait_for_log("ended")
        await eventually(lambda: queue_is_empty(connection))

        assert "ended" not in first.events()
        assert await outcomes(connection) == ["picked", "picked", "successful"]

    async def test_a_running_job_is_not_taken_over(
        self, connection: Connection, start: Start, release: Callable[[], None]
    ) -> None:
        first = start()
        await enqueue(connection)
        await first.wait_for_log("begun")
        second = start()
        # Its heartbeats continue for longer than the other one would tolerate silence.
        for _ in range(3):
            await beats_again(connection)
        release()
        await first.wait_for_log("ended")
        await eventually(lambda: queue_is_empty(connection))

        assert "begun" not in second.events()
        assert await outcomes(connection) == ["picked", "successful"]

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    async def test_a_signal_lets_the_running_job_finish(
        self, connection: Connection, start: Start, release: Callable[[], None], number: signal.Signals
    ) -> None:
        worker = start()
        await enqueue(connection)
        await worker.wait_for_log("begun")
        worker.process.send_signal(number)
        await beats_again(connection)
        assert worker.process.poll() is None
        release()

        assert await worker.ends() == 0
        assert worker.events()[-2:] == ["ended", "worker.stopped"]
        assert await outcomes(connection) == ["picked", "successful"]
        assert "Traceback" not in worker.output()

    async def test_a_second_signal_requeues_the_job_at_once(self, connection: Connection, start: Start) -> None:
        worker = start(shutdown_limit_seconds=3600)
        await enqueue(connection)
        await worker.wait_for_log("begun")
        worker.process.send_signal(signal.SIGINT)
        # A signal that arrives while another is pending is lost, so one of many has to be the second.
        while worker.process.poll() is None:
            with suppress(ProcessLookupError):
                worker.process.send_signal(signal.SIGINT)
            await asyncio.sleep(0.05)

        assert await connection.fetchval("SELECT status FROM pgqueuer") == "queued"
        assert "ended" not in worker.events()

    async def test_an_idle_worker_stops_at_once(self, connection: Connection, start: Start) -> None:
        worker = start(shutdown_limit_seconds=3600)
        await eventually(lambda: _is_connected(connection))
        worker.process.send_signal(signal.SIGTERM)

        assert await worker.ends() == 0
        await eventually(lambda: _is_gone(connection))


class TestDatabase:
    async def test_a_lost_connection_is_replaced_and_its_job_is_repeated(
        self, connection: Connection, start: Start, release: Callable[[], None]
    ) -> None:
        worker = start()
        await enqueue(connection)
        await worker.wait_for_log("begun")
        await cut_connections(connection)

        await worker.wait_for_log("worker.database_recovered")
        await worker.wait_for_log("begun", times=2)
        release()
        await worker.wait_for_log("ended")
        await eventually(lambda: queue_is_empty(connection))

        assert worker.events().count("worker.database_lost") == 1
        assert "Traceback" not in worker.output()
        assert '"logger": "pgqueuer"' not in worker.output()

    async def test_each_outage_is_logged_once(self, connection: Connection, start: Start) -> None:
        worker = start()

        async def is_lost(times: int) -> bool:
            # A connection that is cut while the worker still opens it is opened again, and is not an outage.
            if worker.events().count("worker.database_lost") < times:
                await cut_connections(connection)
                return False
            return True

        for outage in (1, 2, 3):
            await eventually(partial(is_lost, outage), worker.output)
            await worker.wait_for_log("worker.database_recovered", times=outage)

        outages = [event for event in worker.events() if event.startswith("worker.database_")]
        assert outages[:6] == ["worker.database_lost", "worker.database_recovered"] * 3
        assert worker.process.poll() is None

    async def test_a_database_that_is_not_available_yet_is_waited_for(
        self, connection: Connection, start: Start, proxy: "Proxy", release: Callable[[], None]
    ) -> None:
        release()
        proxy.refuses = True
        worker = start(proxy.url)
        await enqueue(connection)
        await eventually(lambda: _is(proxy.attempts >= 5))
        assert worker.events() == ["worker.started", "worker.database_lost"]

        proxy.refuses = False
        await worker.wait_for_log("ended")
        await worker.wait_for_log("worker.database_recovered")

        assert worker.events().count("worker.database_lost") == 1

    async def test_a_silent_database_is_disconnected(
        self, connection: Connection, start: Start, proxy: "Proxy", release: Callable[[], None]
    ) -> None:
        worker = start(proxy.url)
        await enqueue(connection)
        await worker.wait_for_log("begun")
        proxy.flowing.clear()
        await worker.wait_for_log("worker.database_lost")
        proxy.cut()
        proxy.flowing.set()

        await worker.wait_for_log("begun", times=2)
        release()
        await worker.wait_for_log("ended")

        assert worker.process.poll() is None
        assert worker.events().count("worker.database_lost") == 1

    async def test_postgres_may_be_killed_while_it_runs(self, tmp_path: Path, release: Callable[[], None]) -> None:
        with open_base_dir() as base:
            user = EmbeddedUser(base / "data")
            try:
                options = DatabaseOptions(url=await asyncio.to_thread(user.url))
                await migrate_up(options)
                worker = WorkerProcess(options.url, tmp_path, 0)
                try:
                    await enqueue_in(options)
                    await worker.wait_for_log("begun")
                    pid = describe_embedded(base / "data").pid
                    assert pid is not None
                    os.kill(pid, signal.SIGKILL)

                    await worker.wait_for_log("worker.database_recovered")
                    await worker.wait_for_log("begun", times=2)
                    release()
                    await worker.wait_for_log("ended")
                    assert worker.events().count("worker.database_lost") == 1
                finally:
                    worker.process.kill()
                    worker.process.wait(LIMIT_SECONDS)
            finally:
                user.end()


async def enqueue_in(options: DatabaseOptions) -> None:
    connection = await connect(options)
    await enqueue(connection)
    await connection.close()


async def cut_connections(connection: Connection) -> None:
    await connection.execute(
        """
        SELECT pg_terminate_backend(pid) FROM pg_stat_activity
        WHERE application_name = $1 AND datname = current_database()
        """,
        APPLICATION,
    )


async def _is_connected(connection: Connection) -> bool:
    return bool(
        await connection.fetchval(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1 AND datname = current_database()",
            APPLICATION,
        )
    )


async def _is_gone(connection: Connection) -> bool:
    return not await _is_connected(connection)


async def beats_again(connection: Connection) -> None:
    """Wait for the next heartbeat of the running job."""
    beat = await connection.fetchval("SELECT heartbeat FROM pgqueuer")

    async def has_beaten() -> bool:
        return bool(await connection.fetchval("SELECT heartbeat > $1 FROM pgqueuer", beat))

    await eventually(has_beaten)


class Proxy:
    """A proxy between a worker and the database that can simulate any network fault."""

    def __init__(self, target: str) -> None:
        self._target = urlsplit(target)
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.flowing = asyncio.Event()
        self.flowing.set()
        self.refuses = False
        self.attempts = 0

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._pass, "127.0.0.1", 0)

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.flowing.set()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        assert self._server is not None
        port = self._server.sockets[0].getsockname()[1]
        user = self._target.netloc.rpartition("@")[0]
        return urlunsplit(self._target._replace(netloc=f"{user}@127.0.0.1:{port}", query=""))

    def cut(self) -> None:
        for writer in self._writers:
            writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.attempts += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        if not self.refuses:
            upstream, onward = await self._connect()
            self._writers.add(onward)
            await asyncio.gather(self._pump(reader, onward), self._pump(upstream, writer))
        writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host = parse_qs(self._target.query).get("host", [self._target.hostname or "127.0.0.1"])[0]
        port = int(parse_qs(self._target.query).get("port", [str(self._target.port or 5432)])[0])
        if host.startswith("/"):
            return await asyncio.open_unix_connection(f"{host}/.s.PGSQL.{port}")
        return await asyncio.open_connection(host, port)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await source.read(65536):
                await self.flowing.wait()
                sink.write(data)
                await sink.drain()
        sink.close()


@pytest.fixture
async def proxy(database_options: DatabaseOptions) -> AsyncIterator[Proxy]:
    proxy = Proxy(database_options.url)
    await proxy.open()
    yield proxy
    await proxy.close()
