"""Compaction by itself: the turn that ends asks the policy, a job is queued once, a worker does it."""

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
from tests.support.conversation_driver import Walk, assert_all_accepted, begin_walk, eventually, tells
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


async def reasons_of(walk: Walk) -> list[EpochReason]:
    page = await walk.program.store.list_epochs(walk.tenant_id, walk.conversation_id)
    return [outline.reason for outline in page.items]


class TestInsideTheServer:
    @pytest.fixture
    def server_settings(self, server_settings: Settings, queue: Database) -> Settings:
        return server_settings.model_copy(update={"worker_inside": True})

    @pytest.mark.parametrize("provider", BOTH)
    async def test_a_conversation_is_compacted_by_itself(
        self, strata_server: StrataServer, emulated: EmulatedProviders, provider: str
    ) -> None:
        walk = await begin_walk(strata_server.program, strata_server.tenant.id, emulated, provider, settings=EAGER)

        async def compacted() -> bool:
            return EpochReason.COMPACTED in await reasons_of(walk)

        for number in range(4):
            await walk.task(f"Task {number}.", tells("Fine."))
        await eventually(compacted)
        await walk.task("And on?", tells("On and on."))
        assert_all_accepted(emulated[provider].requests())


async def test_turns_queue_their_conversation_no_more_than_twice(
    strata_server: StrataServer, emulated: EmulatedProviders, queue: Database
) -> None:
    walk = await begin_walk(strata_server.program, strata_server.tenant.id, emulated, "gemini", settings=EAGER)
    for number in range(2):
        await walk.task(f"Task {number}.", tells("Fine."))
    await settle(strata_server.program)
    await strata_server.program.compaction_watch.close()
    assert await queued(queue) == []
    for number in range(3):
        await walk.task(f"Another task {number}.", tells("Fine."))
    await settle(strata_server.program)
    await strata_server.program.compaction_watch.close()
    jobs = await queued(queue)
    assert len(jobs) <= 2, "one, and one behind it"
    for job in jobs:
        assert (job["tenant_id"], job["conversation_id"], job["later"]) == (walk.tenant_id, walk.conversation_id, False)


async def test_one_that_waits_for_a_cold_cache_does_not_stand_in_the_way(
    store: PostgresStore, tenant: Tenant, queue: Database
) -> None:
    conversation = await create_conversation(store, tenant.id)
    sender = JobSender(queue)
    later = datetime.now(UTC) + timedelta(minutes=5)
    for at in (later, later, None, None):
        await send_compaction(sender, tenant.id, conversation.id, at=at)
    assert [job["later"] for job in await queued(queue)] == [True, False, False]


async def test_what_comes_while_one_runs_is_done_after_it(
    store: PostgresStore, tenant: Tenant, queue: Database
) -> None:
    """The one that runs may have looked before there was anything to do."""
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


async def test_a_job_that_comes_too_early_looks_again(tenant: Tenant, queue: Database) -> None:
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
            # As while a worker has it.
            await connection.execute("UPDATE pgqueuer SET status = 'picked'")
        await job.run(json.dumps({name: waiting[name] for name in ("tenant_id", "conversation_id", "look")}).encode())
        async with queue.connection() as connection:
            await connection.execute("DELETE FROM pgqueuer WHERE status = 'picked'")
    assert asked == ["conv_x"] * 3
    assert await queued(queue) == []


async def test_a_conversation_that_moves_too_fast_is_left_to_its_turns(
    queue: Database, caplog: pytest.LogCaptureFixture
) -> None:
    async def compact(_tenant_id: str, _conversation_id: str) -> None:
        raise EpochMoved

    payload = json.dumps({"tenant_id": "tenant_x", "conversation_id": "conv_x", "look": 0}).encode()
    with caplog.at_level(logging.INFO, "strata.jobs"):
        await compaction_job(compact, JobSender(queue)).run(payload)
    assert [record.message for record in caplog.records] == ["compaction.overtaken"]


async def test_a_job_for_an_erased_conversation_is_over(strata_server: StrataServer, queue: Database) -> None:
    [job] = [job for job in strata_server.program.jobs if job.name == NAME]
    payload = {"tenant_id": strata_server.tenant.id, "conversation_id": "conv_01jd0z8s3bf6h9kq2m4n6p8r0t", "look": 0}
    await job.run(json.dumps(payload).encode())
    assert await queued(queue) == []


async def test_the_queues_own_records_are_pruned(queue: Database) -> None:
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
