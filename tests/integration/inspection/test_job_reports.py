"""Reports of waiting, running, postponed and failed jobs, for operators and for tenants."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from server.conversation.api_key import KeyRing, Scope, Tenant
from server.conversation.errors import CallNotFound, DatabaseUnavailable
from server.inspection.jobs import JobStatus, Watch, report_all_jobs
from server.jobs.job import Job
from server.jobs.queue import JobSender
from server.jobs.worker import StopRequest, Worker, WorkerOptions
from server.postgres.connections import DatabaseOptions
from server.postgres.engine import Database
from server.postgres.inspection import job_reports
from server.postgres.inspection.inspector import PostgresInspector
from server.telemetry.metrics import JobMetrics
from tests.conftest import StrataServer
from tests.support.conversation_driver import eventually
from tests.support.http_driver import ApiClient, open_api
from tests.support.strata_process import strata_here

NAME = "compaction"
LATER_SECONDS = 3600.0


@pytest.fixture
async def queue(database: Database) -> AsyncIterator[Database]:
    """The database with an empty queue."""
    await empty(database)
    yield database
    await empty(database)


async def empty(database: Database) -> None:
    async with database.connection() as connection:
        await connection.execute("DELETE FROM pgqueuer; DELETE FROM pgqueuer_log; DELETE FROM pgqueuer_schedules")


@pytest.fixture
def reports(queue: Database) -> PostgresInspector:
    return PostgresInspector(queue)


@pytest.fixture
async def other(key_ring: KeyRing) -> Tenant:
    return await key_ring.create_tenant("globex")


async def send(database: Database, tenant_id: str, key: str, *, delay_seconds: float = 0.0) -> None:
    sender = JobSender(database)
    assert await sender.send(NAME, b"", tenant_id=tenant_id, dedupe_key=key, delay_seconds=delay_seconds)


async def send_scheduled(database: Database, *names: str) -> None:
    """Jobs without a tenant, as schedules queue them."""
    async with database.connection() as connection:
        for name in names:
            await connection.execute(
                "INSERT INTO pgqueuer (priority, status, entrypoint) VALUES (0, 'queued', $1)", name
            )


async def work_off(database: Database, *errors: Exception) -> None:
    """Run all due jobs, each with the next of these errors, until none of them waits."""
    left = list(errors)

    async def run(_payload: bytes) -> None:
        if left:
            raise left.pop(0)

    stop = StopRequest()
    worker = Worker(database, [Job(name=NAME, run=run)], options=WorkerOptions(shutdown_limit_seconds=5))
    working = asyncio.create_task(worker.run(stop))

    async def is_done() -> bool:
        async with database.connection() as connection:
            count = await connection.fetchval("SELECT count(*) FROM pgqueuer WHERE execute_after <= now()")
        return not left and count == 0

    await eventually(is_done)
    stop.request()
    await working


async def test_each_job_is_counted_once(
    reports: PostgresInspector, queue: Database, tenant: Tenant, other: Tenant
) -> None:
    before = datetime.now(UTC) - timedelta(seconds=5)
    for number in range(3):
        await send(queue, tenant.id, f"waits {number}")
    await send(queue, tenant.id, "later", delay_seconds=LATER_SECONDS)
    await send(queue, other.id, "another's")
    await send_scheduled(queue, "retention")
    async with queue.connection() as connection:
        await connection.execute("UPDATE pgqueuer SET status = 'picked' WHERE dedupe_key = 'waits 2'")
        oldest = await connection.fetchval("SELECT execute_after FROM pgqueuer WHERE dedupe_key = 'waits 0'")
    assert before < oldest
    [own] = await reports.report_jobs(tenant.id)
    assert own == JobStatus(name=NAME, waiting_count=2, running_count=1, later_count=1, oldest_waiting_at=oldest)
    [others] = await reports.report_jobs(other.id)
    assert (others.name, others.waiting_count, others.running_count, others.later_count) == (NAME, 1, 0, 0)
    everybody = {status.name: status for status in await reports.report_jobs(None)}
    assert {name: status.waiting_count for name, status in everybody.items()} == {NAME: 3, "retention": 1}
    assert await reports.report_jobs("tenant_of_nobody") == []


async def test_a_failed_job_has_its_reason_for_its_own_tenant_only(
    reports: PostgresInspector, queue: Database, tenant: Tenant, other: Tenant
) -> None:
    await send(queue, tenant.id, "fails")
    await work_off(queue, ValueError("a secret of somebody's"))
    [own] = await reports.report_jobs(tenant.id)
    assert (own.failed_count, own.last_error, own.waiting_count) == (1, "ValueError", 0)
    assert own.last_error_at is not None
    await send(queue, tenant.id, "fails again")
    await work_off(queue, CallNotFound())
    [own] = await reports.report_jobs(tenant.id)
    assert (own.failed_count, own.last_error) == (2, CallNotFound.code)
    assert await reports.report_jobs(other.id) == []
    assert [status.failed_count for status in await reports.report_jobs(None)] == [2]
    async with queue.connection() as connection:
        assert "secret" not in str(await connection.fetch("SELECT traceback FROM pgqueuer_log"))
        await connection.execute("UPDATE pgqueuer_log SET created = created - interval '25 hours'")
    assert await reports.report_jobs(tenant.id) == []


async def test_a_postponed_job_waits_with_its_reason(
    reports: PostgresInspector, queue: Database, tenant: Tenant
) -> None:
    await send(queue, tenant.id, "away")
    async with queue.connection() as connection:
        # So that the next attempt is far away.
        await connection.execute("UPDATE pgqueuer SET attempts = 9")
    await work_off(queue, DatabaseUnavailable())
    [own] = await reports.report_jobs(tenant.id)
    assert (own.later_count, own.postponed_count, own.failed_count) == (1, 1, 0)
    assert own.last_error == DatabaseUnavailable.code


async def test_a_report_reads_a_limited_number_of_jobs(
    reports: PostgresInspector, queue: Database, tenant: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        await send(queue, tenant.id, f"waits {number}")
    monkeypatch.setattr(job_reports, "MAX_JOBS", 3)
    [status] = await reports.report_jobs(None)
    assert status.waiting_count == 3


class TestOverHttp:
    @pytest.fixture
    async def api(self, strata_server: StrataServer, queue: Database) -> AsyncIterator[ApiClient]:
        async with open_api(strata_server, strata_server.admin_key) as opened:
            yield opened

    async def test_an_admin_sees_the_jobs_of_its_tenant(
        self, api: ApiClient, strata_server: StrataServer, queue: Database, other: Tenant
    ) -> None:
        assert await api.expect(200, "GET", "/admin/api/jobs") == {"data": []}
        await send(queue, strata_server.tenant.id, "mine")
        await send(queue, other.id, "another's")
        await send_scheduled(queue, "retention")
        [shown] = (await api.expect(200, "GET", "/admin/api/jobs"))["data"]
        waiting_at = shown.pop("oldest_waiting_at")
        assert datetime.fromisoformat(waiting_at) <= datetime.now(UTC) + timedelta(minutes=1)
        assert shown == {
            "name": NAME,
            "waiting": 1,
            "running": 0,
            "later": 0,
            "postponed": 0,
            "failed": 0,
            "last_error": None,
            "last_error_at": None,
        }
        _, theirs = await strata_server.key_ring.create_key(
            tenant_id=other.id, name="admin", scopes=frozenset({Scope.ADMIN}), expires_at=None
        )
        async with open_api(strata_server, theirs) as another:
            assert [job["waiting"] for job in (await another.expect(200, "GET", "/admin/api/jobs"))["data"]] == [1]

    async def test_clients_have_no_access(self, strata_server: StrataServer) -> None:
        async with open_api(strata_server) as client:
            assert (await client.expect(403, "GET", "/admin/api/jobs"))["code"] == "scope_missing"

    async def test_the_queue_is_in_the_metrics_after_a_report(
        self, api: ApiClient, strata_server: StrataServer, queue: Database
    ) -> None:
        assert "strata_jobs_waiting{" not in await scrape(api)
        await send(queue, strata_server.tenant.id, "mine")
        async with queue.connection() as connection:
            await connection.execute("UPDATE pgqueuer SET execute_after = now() - interval '90 seconds'")
        await strata_server.program.job_watch.poll()
        shown = dict(line.rsplit(" ", 1) for line in (await scrape(api)).splitlines() if line.startswith("strata_jobs"))
        assert shown['strata_jobs_waiting{job="compaction"}'] == "1.0"
        assert shown['strata_jobs_waiting{job="retention"}'] == "0.0"
        assert 90 <= float(shown['strata_jobs_oldest_waiting_seconds{job="compaction"}']) < 900
        assert shown['strata_jobs_oldest_waiting_seconds{job="retention"}'] == "0.0"


async def scrape(api: ApiClient) -> str:
    answer = await api.ask("GET", "/metrics")
    return str(answer.text)


class Reports:
    """Reports that can fail."""

    def __init__(self) -> None:
        self.is_away = False

    async def report_jobs(self, tenant_id: str | None) -> Sequence[JobStatus]:
        assert tenant_id is None
        if self.is_away:
            raise DatabaseUnavailable
        return [JobStatus(name=NAME, waiting_count=4)]


async def test_an_unreadable_queue_has_no_metrics() -> None:
    registry, reports = CollectorRegistry(), Reports()
    load = partial(report_all_jobs, reports.report_jobs, [NAME, "retention"])
    watch = Watch(load, JobMetrics(registry).publish, pause_seconds=0.001)

    def waiting(name: str) -> float | None:
        return registry.get_sample_value("strata_jobs_waiting", {"job": name})

    async def is_counted() -> bool:
        return waiting(NAME) == 4

    watching = asyncio.create_task(watch.run())
    await eventually(is_counted)
    watching.cancel()
    assert waiting("retention") == 0
    await watch.poll()
    assert waiting(NAME) == 4
    reports.is_away = True
    await watch.poll()
    assert waiting(NAME) is None
    assert registry.get_sample_value("strata_jobs_oldest_waiting_seconds", {"job": NAME}) is None


class TestInTheTerminal:
    @pytest.fixture
    def env(self, queue: Database, database_options: DatabaseOptions, tmp_path: Path) -> dict[str, str]:
        return {"STRATA_DATABASE_URL": database_options.url, "STRATA_DATA_DIR": str(tmp_path)}

    async def test_the_table_shows_the_whole_queue(
        self, env: dict[str, str], queue: Database, tenant: Tenant, other: Tenant
    ) -> None:
        await send(queue, tenant.id, "fails")
        await work_off(queue, ValueError())
        await send(queue, tenant.id, "waits")
        await send(queue, other.id, "another's")
        async with queue.connection() as connection:
            await connection.execute("UPDATE pgqueuer SET execute_after = now() - interval '3 hours'")
        await send_scheduled(queue, "retention", "\x1b[31m[red]")
        shown = strata_here("jobs", env=env)
        assert shown.returncode == 0, shown.stderr
        [row] = [line for line in shown.stdout.splitlines() if NAME in line]
        cells = [cell.strip() for cell in row.strip("│┃").split("│")]
        assert cells[:7] == [NAME, "2", "3h", "0", "0", "0", "1"]
        assert cells[7].startswith("ValueError, ")
        assert "retention" in shown.stdout
        assert "\x1b" not in shown.stdout
        lines = strata_here("jobs", "--json", "--tenant", "globex", env=env).stdout.splitlines()
        [job] = [json.loads(line) for line in lines]
        assert (job["name"], job["waiting"], job["failed"], job["last_error"]) == (NAME, 1, 0, None)

    async def test_an_empty_queue_says_so(self, env: dict[str, str]) -> None:
        assert strata_here("jobs", env=env).stdout == "The queue is empty, and no job failed recently.\n"
        refused = strata_here("jobs", "--tenant", "nobody", env=env)
        assert refused.returncode != 0
        assert "nobody" in refused.stderr


async def test_pgqueuer_still_stores_what_the_reports_read(queue: Database, tenant: Tenant) -> None:
    """The tables belong to the library: this test fails if an upgrade changes them."""
    await send(queue, tenant.id, "waits")
    async with queue.connection() as connection:
        row = await connection.fetchrow("SELECT headers ->> 'tenant_id' AS tenant_id, status FROM pgqueuer")
    assert row is not None
    assert (row["tenant_id"], row["status"]) == (tenant.id, "queued")
