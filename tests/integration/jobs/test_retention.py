"""Retention: raw bytes are deleted when their time is over, and nothing else is."""

import asyncio
import logging
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from server.conversation.api_key import Tenant
from server.conversation.errors import DatabaseUnavailable
from server.jobs.retention import retention_job
from server.postgres.engine import Database, Statement
from server.postgres.jobs import sweep_raw_bytes
from server.postgres.store import PostgresStore
from tests.support.builders import accept, answer, call_end, call_start, create_conversation, take_exchange, user_input

DAYS = 30
RAW = b"data: secret words\n\n"


def days_ago(days: float) -> datetime:
    return datetime.now(UTC) - timedelta(days=days)


async def ended_calls(store: PostgresStore, tenant: Tenant, count: int, *, days: float = DAYS + 1) -> str:
    """A conversation of this many calls that ended this long ago."""
    conversation = await create_conversation(store, tenant.id)
    for _ in range(count):
        end = call_end(ended_at=days_ago(days), raw_response=RAW)
        await take_exchange(store, tenant.id, conversation.id, end=end)
    return conversation.id


async def rows_without_raw_bytes(database: Database) -> list[Any]:
    async with database.connection() as connection:
        return [
            row[0]
            for row in await connection.fetch(
                "SELECT to_jsonb(calls) - 'raw_response' FROM calls ORDER BY conversation_id, turn_seq, attempt"
            )
        ]


async def count_kept(database: Database) -> int:
    async with database.connection() as connection:
        return int(await connection.fetchval("SELECT count(raw_response) FROM calls"))


async def test_a_swept_call_has_lost_only_its_raw_bytes(
    database: Database, store: PostgresStore, tenant: Tenant
) -> None:
    conversation = await ended_calls(store, tenant, 1)
    (before,) = await store.list_calls(tenant.id, conversation, 2)
    rows = await rows_without_raw_bytes(database)
    turns = await store.list_turns(tenant.id, conversation)

    assert await sweep_raw_bytes(database, DAYS) == {"calls": 1, "replay_calls": 0}

    (after,) = await store.list_calls(tenant.id, conversation, 2)
    assert before.end is not None
    assert before.end.raw_response == RAW
    assert after == replace(before, end=replace(before.end, raw_response=None))
    assert await rows_without_raw_bytes(database) == rows
    assert rows[0]
    assert await store.list_turns(tenant.id, conversation) == turns


async def test_the_length_of_swept_bytes_stays_known(database: Database, store: PostgresStore, tenant: Tenant) -> None:
    await ended_calls(store, tenant, 1)

    await sweep_raw_bytes(database, DAYS)

    async with database.connection() as connection:
        row = await connection.fetchrow("SELECT raw_response, raw_length FROM calls")
    assert row is not None
    assert (row["raw_response"], row["raw_length"]) == (None, len(RAW))


async def test_the_clock_of_the_database_decides_to_the_minute(
    database: Database, store: PostgresStore, tenant: Tenant
) -> None:
    conversation = await ended_calls(store, tenant, 2, days=0)
    async with database.connection() as connection:
        await connection.execute(
            """
            UPDATE calls SET ended_at = now() - make_interval(days => $1)
                + CASE turn_seq WHEN 2 THEN interval '-1 minute' ELSE interval '1 minute' END
            """,
            DAYS,
        )

    assert (await sweep_raw_bytes(database, DAYS))["calls"] == 1

    for seq, raw in ((2, None), (4, RAW)):
        (call,) = await store.list_calls(tenant.id, conversation, seq)
        assert call.end is not None
        assert call.end.raw_response == raw


async def test_a_call_that_never_ended_is_not_swept(database: Database, store: PostgresStore, tenant: Tenant) -> None:
    conversation = await create_conversation(store, tenant.id)
    accepted = await accept(store, tenant.id, user_input(conversation.id))
    await store.begin_call(accepted.lease, call_start(started_at=days_ago(400)))
    async with database.connection() as connection:
        await connection.execute("UPDATE calls SET raw_response = 'part of it'")

    assert (await sweep_raw_bytes(database, DAYS))["calls"] == 0

    assert await count_kept(database) == 1


async def test_every_attempt_of_a_turn_is_swept(database: Database, store: PostgresStore, tenant: Tenant) -> None:
    conversation = await create_conversation(store, tenant.id)
    accepted = await accept(store, tenant.id, user_input(conversation.id))
    end = call_end(ended_at=days_ago(DAYS + 1))
    await store.end_call(accepted.lease, call_start(attempt=1), end)
    await store.finish_turn(accepted.lease, answer(start=call_start(attempt=2), end=end))

    assert (await sweep_raw_bytes(database, DAYS))["calls"] == 2


@pytest.mark.parametrize("page_rows", [1, 2, 3, 7, 500])
async def test_the_size_of_a_page_does_not_matter(
    database: Database, store: PostgresStore, tenant: Tenant, page_rows: int
) -> None:
    for days in (DAYS + 1, 0, DAYS + 1):
        await ended_calls(store, tenant, 3, days=days)

    assert (await sweep_raw_bytes(database, DAYS, page_rows=page_rows))["calls"] == 6

    assert await count_kept(database) == 3
    assert (await sweep_raw_bytes(database, DAYS, page_rows=page_rows))["calls"] == 0


async def test_each_page_is_a_separate_statement(database: Database, store: PostgresStore, tenant: Tenant) -> None:
    await ended_calls(store, tenant, 5)
    counting = FailingDatabase(database, fails_at=1000)

    await sweep_raw_bytes(counting, DAYS, page_rows=2)

    # Three pages of calls and the end of each table.
    assert counting.runs == 5


class FailingDatabase(Database):
    """The same database, but one statement fails."""

    def __init__(self, database: Database, *, fails_at: int) -> None:
        super().__init__(database.options)
        self._database = database
        self._fails_at = fails_at
        self.runs = 0

    async def run(self, statement: Statement, *, repeatable: bool = True, **values: object) -> list[Any]:
        self.runs += 1
        if self.runs == self._fails_at:
            raise DatabaseUnavailable
        return await self._database.run(statement, repeatable=repeatable, **values)


async def test_an_interrupted_sweep_keeps_its_progress_and_can_be_repeated(
    database: Database, store: PostgresStore, tenant: Tenant
) -> None:
    await ended_calls(store, tenant, 5)

    with pytest.raises(DatabaseUnavailable):
        await sweep_raw_bytes(FailingDatabase(database, fails_at=2), DAYS, page_rows=2)

    assert await count_kept(database) == 3
    assert (await sweep_raw_bytes(database, DAYS, page_rows=2))["calls"] == 3


async def test_a_locked_row_is_left_for_the_next_time(database: Database, store: PostgresStore, tenant: Tenant) -> None:
    await ended_calls(store, tenant, 3)
    async with database.transaction() as holder:
        await holder.execute("SELECT FROM calls WHERE turn_seq = 4 FOR UPDATE")
        async with asyncio.timeout(10):
            assert (await sweep_raw_bytes(database, DAYS))["calls"] == 2

    assert (await sweep_raw_bytes(database, DAYS))["calls"] == 1


async def test_two_concurrent_sweeps_share_the_rows(database: Database, store: PostgresStore, tenant: Tenant) -> None:
    for _ in range(3):
        await ended_calls(store, tenant, 4)

    reports = await asyncio.gather(*(sweep_raw_bytes(database, DAYS, page_rows=3) for _ in range(4)))

    assert sum(report["calls"] for report in reports) == 12
    assert await count_kept(database) == 0


async def test_answers_of_replays_are_swept_too(
    database: Database, replay_store: Database, store: PostgresStore, tenant: Tenant
) -> None:
    await ended_calls(store, tenant, 1)
    await ended_calls(PostgresStore(replay_store), tenant, 2)
    await ended_calls(PostgresStore(replay_store), tenant, 1, days=DAYS - 1)

    assert await sweep_raw_bytes(database, DAYS, page_rows=2) == {"calls": 1, "replay_calls": 2}

    assert (await count_kept(database), await count_kept(replay_store)) == (0, 1)


async def test_the_job_logs_its_counts_without_any_content(
    database: Database, store: PostgresStore, tenant: Tenant, caplog: pytest.LogCaptureFixture
) -> None:
    conversation = await ended_calls(store, tenant, 2)

    async def sweep(days: int) -> dict[str, int]:
        return await sweep_raw_bytes(database, days)

    with caplog.at_level(logging.INFO, "strata.jobs"):
        await retention_job(DAYS, sweep).run(b"")

    (record,) = [record for record in caplog.records if record.name == "strata.jobs"]
    facts = vars(record)
    assert record.getMessage() == "retention.swept"
    assert (facts["days"], facts["calls_count"], facts["replay_calls_count"]) == (DAYS, 2, 0)
    assert facts["seconds"] >= 0
    assert conversation not in str(facts)
    assert "secret" not in str(facts)


async def test_zero_days_keep_everything_for_ever() -> None:
    async def sweep(days: int) -> dict[str, int]:
        raise AssertionError(days)

    job = retention_job(0, sweep)
    await job.run(b"")

    assert job.cron is None
    assert retention_job(1, sweep).cron is not None
