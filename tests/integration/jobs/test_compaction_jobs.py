"""Automatic compaction: the end of a turn evaluates the policy, a job is queued once, a worker executes it."""

import json
import logging
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from server.app.settings import Settings
from server.conversation.api_key import Tenant
from server.conversation.epoch import EpochReason
from server.conversation.errors import EpochMoved
from server.jobs.compaction import NAME, compaction_job, send_compaction
from server.jobs.queue import JobSender
from server.jobs.retention import queue_log_job
from server.postgres.engine import Database
from server.postgres.jobs import prune_queue_log
from server.postgres.store import PostgresStore
from tests.conftest import StrataServer
from tests.support.builders import create_conversation
from tests.support.conversation_driver import (
    ConversationDriver,
    assert_all_accepted,
    eventually,
    start_driver,
    text_reply,
)
from tests.support.emulators import BOTH, EmulatedProviders
from tests.support.turn_service_driver import settle

EAGER = {"compaction": {"policy": "threshold", "max_turns": 4, "keep_exchanges": 1}}


@pytest.fixture
async def queue(database: Database) -> AsyncIterator[Database]:
    """The database with an empty queue."""
    async with database.connection() as connection:
        await connection.execute("DELETE FROM pgqueuer; DELETE FROM pgqueuer_log; DELETE FROM pgqueuer_schedules")
    yield database
    async with database.connection() as connection:
        await connection.execute("DELETE FROM pgqueuer; DELETE FROM pgqueuer_schedules")


async def queued(database: Database) -> list[dict[str, Any]]:
    async with database.connection() as connection:
        rows = await connection.fetch(
            "SELECT dedupe_key, payload, execute_after > now() + interval '1 minute' AS later FROM pgqueuer "
            "WHERE entrypoint = $1 ORDER BY id",
            NAME,
        )
    return [{"key": row["dedupe_key"], "later": row["later"], **json.loads(row["payload"])} for row in rows]


async def reasons_of(driver: ConversationDriver) -> list[EpochReason]:
    page = await driver.program.store.list_epochs(driver.tenant_id, driver.conversation_id)
    return [outline.reason for outline in page.items]


class TestInsideTheServer:
    @pytest.fixture
    def server_settings(self, server_settings: Settings, queue: Database) -> Settings:
        return server_settings.model_copy(update={"worker_inside": True})

    @pytest.mark.parametrize("provider", BOTH)
    async def test_a_conversation_is_compacted_automatically(
        self, strata_server: StrataServer, emulated: EmulatedProviders, provider: str
    ) -> None:
        driver = await start_driver(strata_server.program, strata_server.tenant.id, emulated, provider, settings=EAGER)

        async def compacted() -> bool:
            return EpochReason.COMPACTED in await reasons_of(driver)

        for number in range(4):
            await driver.task(f"Task {number}.", text_reply("Fine."))
        await eventually(compacted)
        await driver.task("And on?", text_reply("On and on."))
        assert_all_accepted(emulated[provider].requests())


async def test_turns_queue_their_conversation_at_most_twice(
    strata_server: StrataServer, emulated: EmulatedProviders, queue: Database
) -> None:
    driver = await start_driver(strata_server.program, strata_server.tenant.id, emulated, "gemini", settings=EAGER)
    for number in range(2):
        await driver.task(f"Task {number}.", text_reply("Fine."))
    await settle(strata_server.program)
    await strata_server.program.compaction_watch.close()
    assert await queued(queue) == []
    for number in range(3):
        await driver.task(f"Another task {number}.", text_reply("Fine."))
    await settle(strata_server.program)
    await strata_server.program.compaction_watch.close()
    jobs = await queued(queue)
    assert len(jobs) <= 2, "one, and one behind it"
    for job in jobs:
        assert (job["tenant_id"], job["conversation_id"], job["later"]) == (
            driver.tenant_id,
            driver.conversation_id,
            False,
        )


async def test_a_job_that_waits_for_a_cold_cache_does_not_block_another(
    store: PostgresStore, tenant: Tenant, queue: Database
) -> None:
    conversation = await create_conversation(store, tenant.id)
    sender = JobSender(queue)
    later = datetime.now(UTC) + timedelta(minutes=5)
    for at in (later, later, None, None):
        await send_compaction(sender, tenant.id, conversation.id, at=at)
    assert [job["later"] for job in await queued(queue)] == [True, False, False]


async def test_a_job_queued_while_one_runs_is_executed_after_it(
    store: PostgresStore, tenant: Tenant, queue: Database
) -> None:
    """The running one may have read the conversation before there was anything to do."""
    conversation = await create_conversation(store, tenant.id)
    sender = JobSender(queue)
    await send_compaction(sender, tenant.id, conversation.id)
    async with queue.connection() as connection:
        await connection.execute("UPDATE pgqueuer SET status = 'picked'")
    for _ in range(3):
        await send_compaction(sender, tenant.id, conversation.id)
    async with queue.connection() as connection:
        rows = await connection.fetch("SELECT status::text FROM pgqueuer ORDER BY id")
    assert [row["status"] for row in rows] == ["picked", "queued"]


async def test_a_job_that_comes_too_early_is_postponed(tenant: Tenant, queue: Database) -> None:
    sender = JobSender(queue)
    asked: list[str] = []
    later = datetime.now(UTC) + timedelta(minutes=5)

    async def compact(_tenant_id: str, conversation_id: str) -> datetime | None:
        asked.append(conversation_id)
        return later if len(asked) < 3 else None

    job = compaction_job(compact, sender)
    await send_compaction(sender, tenant.id, "conv_x", at=later)
    for _ in range(3):
        [waiting] = await queued(queue)
        async with queue.connection() as connection:
            # As while a worker executes it.
            await connection.execute("UPDATE pgqueuer SET status = 'picked'")
        await job.run(json.dumps({name: waiting[name] for name in ("tenant_id", "conversation_id", "look")}).encode())
        async with queue.connection() as connection:
            await connection.execute("DELETE FROM pgqueuer WHERE status = 'picked'")
    assert asked == ["conv_x"] * 3
    assert await queued(queue) == []


async def test_a_conversation_that_changes_too_fast_is_left_to_its_turns(
    queue: Database, caplog: pytest.LogCaptureFixture
) -> None:
    async def compact(_tenant_id: str, _conversation_id: str) -> None:
        raise EpochMoved

    payload = json.dumps({"tenant_id": "tenant_x", "conversation_id": "conv_x", "look": 0}).encode()
    with caplog.at_level(logging.INFO, "strata.jobs"):
        await compaction_job(compact, JobSender(queue)).run(payload)
    assert [record.message for record in caplog.records] == ["compaction.overtaken"]


async def test_a_job_for_an_erased_conversation_ends(strata_server: StrataServer, queue: Database) -> None:
    [job] = [job for job in strata_server.program.jobs if job.name == NAME]
    payload = {"tenant_id": strata_server.tenant.id, "conversation_id": "conv_01jd0z8s3bf6h9kq2m4n6p8r0t", "look": 0}
    await job.run(json.dumps(payload).encode())
    assert await queued(queue) == []


async def test_the_records_of_the_queue_are_pruned(queue: Database) -> None:
    async with queue.connection() as connection:
        await connection.execute(
            "INSERT INTO pgqueuer_log (created, job_id, status, priority, entrypoint) "
            "SELECT now() - make_interval(days => day), day, 'successful', 0, 'x' FROM generate_series(0, 20) AS day"
        )
    counts: list[dict[str, int]] = []

    async def prune(days: int) -> dict[str, int]:
        counts.append(await prune_queue_log(queue, days, page_rows=3))
        return counts[-1]

    await queue_log_job(7, prune).run(b"")
    assert counts[0]["pgqueuer_log"] == 14
    async with queue.connection() as connection:
        assert await connection.fetchval("SELECT count(*) FROM pgqueuer_log") == 7
