"""The worker on a real queue. Faults of its process and its database are in tests/faults/test_worker_faults.py."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TypeAlias

import asyncpg
import pytest
from pgqueuer.adapters.drivers.asyncpg import AsyncpgDriver
from pgqueuer.domain.settings import db_settings

from server.conversation.api_key import Tenant
from server.conversation.errors import DatabaseUnavailable, SchemaAhead, SchemaBehind
from server.jobs.job import Job
from server.jobs.queue import JobQueue, build_queries
from server.jobs.retention import retention_job
from server.jobs.worker import StopRequest, Worker, WorkerOptions
from server.postgres.connections import DatabaseOptions, connect
from server.postgres.engine import Database
from server.postgres.jobs import sweep_raw_bytes
from server.postgres.migrations import find_drift, migrate_down_one, migrate_up, require_current_schema
from server.postgres.store import PostgresStore
from tests.support.builders import create_conversation, take_exchange
from tests.support.database_source import with_database

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

LIMIT_SECONDS = 20.0
OPTIONS = WorkerOptions(
    shutdown_limit_seconds=LIMIT_SECONDS, takeover_seconds=4, reconnect_seconds=0.05, probe_seconds=0.1
)
QUEUE_TABLES = ("pgqueuer", "pgqueuer_log", "pgqueuer_schedules", "pgqueuer_statistics")

BEFORE_THE_QUEUE = "20261116_01"
"""The revision before the queue."""


@pytest.fixture
async def connection(database: Database) -> AsyncIterator[Connection]:
    """A connection to a database with an empty queue."""
    connection = await connect(database.options)
    for table in QUEUE_TABLES:
        await connection.execute(f"DELETE FROM {table}")  # noqa: S608  reason: constants of this module
    yield connection
    await connection.close()


@asynccontextmanager
async def working(
    options: DatabaseOptions, *jobs: Job, worker_options: WorkerOptions = OPTIONS
) -> AsyncIterator[StopRequest]:
    """A worker next to the test; it has ended when the block has."""
    database = Database(options, on_first_contact=require_current_schema)
    stop = StopRequest()
    task = asyncio.create_task(Worker(database, jobs, options=worker_options).run(stop))
    try:
        yield stop
    finally:
        stop.request()
        try:
            await asyncio.wait_for(task, LIMIT_SECONDS * 2)
        finally:
            await database.close()


async def run_without_jobs(options: DatabaseOptions) -> None:
    database = Database(options, on_first_contact=require_current_schema)
    try:
        await Worker(database, (), options=OPTIONS).run(StopRequest())
    finally:
        await database.close()


async def eventually(condition: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(LIMIT_SECONDS):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.02)


class Diary:
    """A job that records its payloads, and waits on request."""

    def __init__(self, *, waits: bool = False, fails_with: list[Exception] | None = None) -> None:
        self.begun: list[bytes] = []
        self.ended: list[bytes] = []
        self.may_end = asyncio.Event()
        self._waits = waits
        self._fails_with = fails_with or []

    async def run(self, payload: bytes) -> None:
        self.begun.append(payload)
        if self._fails_with:
            raise self._fails_with.pop(0)
        if self._waits:
            await self.may_end.wait()
        self.ended.append(payload)

    async def has_begun(self) -> bool:
        return bool(self.begun)

    async def has_ended(self) -> bool:
        return bool(self.ended)

    def job(self, cron: str | None = None) -> Job:
        return Job(name="diary", run=self.run, cron=cron)


async def enqueue(connection: Connection, payload: bytes = b"", name: str = "diary") -> None:
    await build_queries(AsyncpgDriver(connection)).enqueue(name, payload)


async def history(connection: Connection) -> list[str]:
    return [row["status"] for row in await connection.fetch("SELECT status FROM pgqueuer_log ORDER BY id")]


async def queued(connection: Connection) -> list[str]:
    return [row["status"] for row in await connection.fetch("SELECT status FROM pgqueuer ORDER BY id")]


class TestSchema:
    """The migration compared with what the installed release of pgqueuer requires."""

    @pytest.fixture
    async def empty(self, server_url: str, worker_id: str) -> AsyncIterator[DatabaseOptions]:
        """An empty database."""
        name = f"strata_test_{worker_id}_queue"
        connection = await asyncpg.connect(server_url)
        await connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
        await connection.execute(f'CREATE DATABASE "{name}"')
        yield DatabaseOptions(url=with_database(server_url, name))
        await connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')
        await connection.close()

    async def test_pgqueuer_finds_nothing_to_upgrade(self, connection: Connection) -> None:
        driver = AsyncpgDriver(connection)
        plan = await build_queries(driver).plan_upgrade()

        assert (plan.statements, plan.notes) == ((), ())
        await JobQueue(driver, []).verify()

    async def test_the_migration_creates_what_pgqueuer_would_install(
        self, connection: Connection, empty: DatabaseOptions
    ) -> None:
        installed = await connect(empty)
        try:
            await build_queries(AsyncpgDriver(installed)).install()
            expected = await catalogue(installed)
        finally:
            await installed.close()

        assert len(expected) > 50
        assert await catalogue(connection) == expected

    async def test_downgrading_removes_the_queue(self, empty: DatabaseOptions) -> None:
        await migrate_up(empty)
        connection = await connect(empty)
        try:
            while await connection.fetchval("SELECT version_num FROM alembic_version") != BEFORE_THE_QUEUE:
                await migrate_down_one(empty)
            assert await catalogue(connection) == []
        finally:
            await connection.close()
        await migrate_up(empty)

    async def test_its_tables_are_no_drift(self, database_options: DatabaseOptions) -> None:
        assert await find_drift(database_options) == []

    async def test_a_worker_refuses_an_older_schema(self, empty: DatabaseOptions) -> None:
        await migrate_up(empty)
        await migrate_down_one(empty)

        with pytest.raises(SchemaBehind):
            await run_without_jobs(empty)

    async def test_a_worker_refuses_a_newer_schema(self, empty: DatabaseOptions) -> None:
        await migrate_up(empty)
        connection = await connect(empty)
        await connection.execute("UPDATE alembic_version SET version_num = '20991231_01'")
        await connection.close()

        with pytest.raises(SchemaAhead):
            await run_without_jobs(empty)


CATALOGUE = """
WITH ours AS (SELECT oid, relname FROM pg_class WHERE relname LIKE 'pgqueuer%')
SELECT 'relation ' || relname || relkind::text || relpersistence::text || coalesce(reloptions::text, '')
FROM pg_class WHERE oid IN (SELECT oid FROM ours)
UNION ALL
SELECT 'column ' || relname || '.' || attname || ' ' || attnum || ' ' || format_type(atttypid, atttypmod)
    || attnotnull::text || attidentity::text || coalesce(pg_get_expr(adbin, adrelid), '')
FROM pg_attribute JOIN ours ON attrelid = ours.oid LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
WHERE attnum > 0
UNION ALL
SELECT 'index ' || indexdef FROM pg_indexes WHERE tablename LIKE 'pgqueuer%'
UNION ALL
SELECT 'constraint ' || conname || ' ' || pg_get_constraintdef(c.oid)
FROM pg_constraint c JOIN ours ON conrelid = ours.oid
UNION ALL
SELECT 'trigger ' || pg_get_triggerdef(t.oid) FROM pg_trigger t JOIN ours ON tgrelid = ours.oid
UNION ALL
SELECT 'function ' || regexp_replace(pg_get_functiondef(oid), '\\s+', ' ', 'g')
FROM pg_proc WHERE proname LIKE '%pgqueuer%'
UNION ALL
SELECT 'label ' || typname || enumsortorder || enumlabel FROM pg_enum JOIN pg_type ON pg_type.oid = enumtypid
UNION ALL
SELECT 'sequence ' || sequencename || data_type::text || increment_by || cache_size
FROM pg_sequences WHERE sequencename LIKE 'pgqueuer%'
"""


async def catalogue(connection: Connection) -> list[str]:
    """Everything that Postgres knows of the queue, except for the indentation of its function."""
    return sorted(row[0] for row in await connection.fetch(CATALOGUE))


class TestJobs:
    """What a job can rely on."""

    async def test_a_queued_job_is_done_with_its_payload(self, database: Database, connection: Connection) -> None:
        diary = Diary()
        await enqueue(connection, b"before")
        async with working(database.options, diary.job()):
            await eventually(diary.has_ended)
            await enqueue(connection, b"while it runs")
            await eventually(lambda: _is(diary.ended, [b"before", b"while it runs"]))

        assert await queued(connection) == []
        assert sorted(await history(connection)) == sorted(["queued", "picked", "successful"] * 2)

    async def test_an_outage_postpones_a_job(
        self,
        database: Database,
        connection: Connection,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        diary = Diary(fails_with=[DatabaseUnavailable()])
        await enqueue(connection, b"again")
        with caplog.at_level(logging.INFO, "strata.jobs"):
            async with working(database.options, diary.job()):
                await eventually(diary.has_ended)

        assert diary.begun == [b"again"] * 2
        assert await history(connection) == ["queued", "picked", "queued", "picked", "successful"]
        (postponed,) = [vars(record) for record in caplog.records if record.getMessage() == "job.postponed"]
        assert (postponed["job"], postponed["code"], postponed["attempt"]) == ("diary", "database_unavailable", 1)

    async def test_the_error_of_a_failed_job_is_in_the_log_and_not_in_the_queue(
        self,
        database: Database,
        connection: Connection,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        diary = Diary(fails_with=[ValueError("secret words")])
        await enqueue(connection, b"bad")
        async with working(database.options, diary.job()):
            await eventually(diary.has_begun)
            await enqueue(connection, b"good")
            await eventually(diary.has_ended)

        assert diary.ended == [b"good"]
        assert await queued(connection) == []
        traces = [row["traceback"] for row in await connection.fetch("SELECT traceback FROM pgqueuer_log")]
        assert [("ValueError" in trace, "secret" in trace) for trace in traces if trace] == [(True, False)]
        (failed,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert failed.getMessage() == "job.failed"
        assert failed.exc_info is not None
        assert str(failed.exc_info[1]) == "secret words"

    async def test_pgqueuer_logs_nothing_about_ordinary_work(
        self,
        database: Database,
        connection: Connection,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        diary = Diary(fails_with=[DatabaseUnavailable()])
        await enqueue(connection)
        with caplog.at_level(logging.DEBUG, "pgqueuer"):
            async with working(database.options, diary.job(cron="* * * * *")):
                await eventually(diary.has_ended)

        assert [record.getMessage() for record in caplog.records if record.name == "pgqueuer"] == []

    async def test_the_environment_does_not_change_the_names_of_the_tables(
        self,
        database: Database,
        connection: Connection,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        for name in ("CHANNEL", "FUNCTION", "TRIGGER", "PGQUEUER_PREFIX", "PGQUEUER_QUEUE_TABLE", "PGQUEUER_SCHEMA"):
            monkeypatch.setenv(name, "elsewhere")
        db_settings.cache_clear()
        diary = Diary()
        try:
            async with working(database.options, diary.job()):
                await enqueue(connection)
                await eventually(diary.has_ended)
        finally:
            db_settings.cache_clear()


class TestStopping:
    async def test_a_running_job_is_finished_and_no_other_is_begun(
        self, database: Database, connection: Connection
    ) -> None:
        diary = Diary(waits=True)
        await enqueue(connection, b"first")
        async with working(database.options, diary.job()) as stop:
            await eventually(diary.has_begun)
            stop.request()
            # Its heartbeats continue while the worker stops, so no other process begins it. A poll for jobs that was
            # running when
            # the worker was asked to stop has ended by then.
            await eventually(lambda: _has_beaten(connection))
            await enqueue(connection, b"second")
            for _ in range(50):
                await connection.fetch("SELECT 1")  # Time for a worker that would wrongly begin it.
            diary.may_end.set()

        assert (diary.begun, diary.ended) == ([b"first"], [b"first"])
        assert await queued(connection) == ["queued"]
        assert (await history(connection))[-1] == "successful"

    async def test_a_job_that_does_not_finish_in_time_is_requeued(
        self,
        database: Database,
        connection: Connection,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        slow, quick = Diary(waits=True), Diary()
        await enqueue(connection, b"long")
        hasty = WorkerOptions(shutdown_limit_seconds=0.1, probe_seconds=0.1)
        with caplog.at_level(logging.INFO, "strata.jobs"):
            async with working(database.options, slow.job(), worker_options=hasty):
                await eventually(slow.has_begun)

        assert slow.ended == []
        assert await queued(connection) == ["queued"]
        assert "job.interrupted" in [record.getMessage() for record in caplog.records]
        async with working(database.options, quick.job()):
            await eventually(quick.has_ended)
        assert quick.ended == [b"long"]

    async def test_the_second_stop_request_does_not_wait(self, database: Database, connection: Connection) -> None:
        diary = Diary(waits=True)
        await enqueue(connection)
        patient = WorkerOptions(shutdown_limit_seconds=3600, probe_seconds=0.1)
        async with working(database.options, diary.job(), worker_options=patient) as stop:
            await eventually(diary.has_begun)
            stop.request()

        assert await queued(connection) == ["queued"]

    async def test_a_worker_without_a_database_stops_too(self, caplog: pytest.LogCaptureFixture) -> None:
        async def has_failed() -> bool:
            return "worker.database_lost" in [record.getMessage() for record in caplog.records]

        nowhere = DatabaseOptions(url="postgresql://nobody@127.0.0.1:1/nothing")
        async with working(nowhere, worker_options=WorkerOptions(reconnect_seconds=3600)):
            await eventually(has_failed)


class TestSchedules:
    async def test_the_first_run_is_due_when_a_worker_starts(self, database: Database, connection: Connection) -> None:
        diary = Diary()
        async with working(database.options, diary.job(cron="17 3 * * *")):
            await eventually(diary.has_ended)

        assert diary.ended == [b""]
        row = await connection.fetchrow(
            "SELECT next_run > now() AS later, date_part('hour', next_run AT TIME ZONE 'UTC') AS hour,"
            " date_part('minute', next_run) AS minute FROM pgqueuer_schedules"
        )
        assert row is not None
        assert tuple(row.values()) == (True, 3, 17)

    async def test_a_run_that_is_not_due_is_not_repeated_by_a_restart(
        self, database: Database, connection: Connection
    ) -> None:
        first, second, marker = Diary(), Diary(), Diary()
        async with working(database.options, first.job(cron="17 3 * * *")):
            await eventually(first.has_ended)
        await enqueue(connection, name="marker")
        async with working(database.options, second.job(cron="17 3 * * *"), Job(name="marker", run=marker.run)):
            await eventually(marker.has_ended)

        assert second.begun == []

    async def test_a_missed_run_is_made_up_for(self, database: Database, connection: Connection) -> None:
        first, second = Diary(), Diary()
        async with working(database.options, first.job(cron="17 3 * * *")):
            await eventually(first.has_ended)
        await connection.execute("UPDATE pgqueuer_schedules SET next_run = now() - interval '3 days'")
        async with working(database.options, second.job(cron="17 3 * * *")):
            await eventually(second.has_ended)

        assert second.ended == [b""]

    async def test_a_scheduled_run_happens_once_with_any_number_of_workers(
        self, database: Database, connection: Connection
    ) -> None:
        diary = Diary()
        job = diary.job(cron="* * * * * *")  # Every second.
        async with AsyncExitStack() as stack:
            for _ in range(4):
                await stack.enter_async_context(working(database.options, job))
            await eventually(lambda: _is(diary.ended[:4], [b""] * 4))

        seconds = [
            row[0]
            for row in await connection.fetch(
                "SELECT date_trunc('second', created) FROM pgqueuer_log WHERE status = 'queued' ORDER BY id"
            )
        ]
        assert len(seconds) >= 4
        assert len(set(seconds)) == len(seconds)
        assert len(diary.ended) <= len(seconds)

    async def test_a_run_is_not_queued_while_the_previous_one_is_pending(
        self, database: Database, connection: Connection
    ) -> None:
        diary = Diary(waits=True)
        async with working(database.options, diary.job(cron="* * * * * *")):
            await eventually(diary.has_begun)
            before = await connection.fetchval("SELECT last_run FROM pgqueuer_schedules")

            async def came_round_again() -> bool:
                last = await connection.fetchval("SELECT last_run FROM pgqueuer_schedules")
                return last is not None and last != before

            await eventually(came_round_again)
            assert len(await queued(connection)) == 1
            diary.may_end.set()
            await eventually(diary.has_ended)


class TestRetention:
    """The retention job, from its setting to the bytes."""

    async def test_the_worker_sweeps_what_is_due(
        self,
        database: Database,
        connection: Connection,
        store: PostgresStore,
        tenant: Tenant,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        conversation = await create_conversation(store, tenant.id)
        await take_exchange(store, tenant.id, conversation.id)
        await connection.execute("UPDATE calls SET ended_at = now() - interval '8 days'")
        job = retention_job(7, partial(sweep_raw_bytes, database))

        async def is_swept() -> bool:
            (call,) = await store.list_calls(tenant.id, conversation.id, 2)
            assert call.end is not None
            return call.end.raw_response is None

        assert not await is_swept()
        with caplog.at_level(logging.INFO, "strata.jobs"):
            async with working(database.options, job):
                await eventually(is_swept)

        (swept,) = [vars(record) for record in caplog.records if record.getMessage() == "retention.swept"]
        assert (swept["days"], swept["calls_count"]) == (7, 1)

    async def test_nothing_is_scheduled_for_zero_days(self, database: Database, connection: Connection) -> None:
        async def sweep(days: int) -> dict[str, int]:
            raise AssertionError(days)

        # Queued by a worker that had another setting.
        await enqueue(connection, name="retention")
        async with working(database.options, retention_job(0, sweep)):
            await eventually(lambda: _gone(connection))

        assert await history(connection) == ["queued", "picked", "successful"]
        assert await connection.fetchval("SELECT count(*) FROM pgqueuer_schedules") == 0


async def _is(value: object, expected: object) -> bool:
    return value == expected


async def _gone(connection: Connection) -> bool:
    return await queued(connection) == []


async def _has_beaten(connection: Connection) -> bool:
    """Whether the running job has sent a heartbeat since it was begun."""
    return bool(await connection.fetchval("SELECT heartbeat > updated FROM pgqueuer WHERE status = 'picked'"))
