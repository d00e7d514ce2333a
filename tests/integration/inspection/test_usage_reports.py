"""Tokens and costs of the calls of a tenant, by day, assistant, model and conversation."""

import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import asyncpg
import pytest

from server.conversation.api_key import KeyRing, Tenant
from server.conversation.call import Call
from server.conversation.usage import Usage
from server.inspection.usage_report import UsageBy, UsageReport
from server.postgres.connections import DatabaseOptions
from server.postgres.engine import Database
from server.postgres.inspection import usage_reports
from server.postgres.inspection.inspector import PostgresInspector
from server.postgres.migrations import migrate_up
from server.postgres.store import PostgresStore
from server.providers.choice import ANTHROPIC
from tests.conftest import StrataServer
from tests.support.builders import (
    accept,
    answer,
    call_end,
    call_start,
    create_conversation,
    definition,
    take_exchange,
    user_input,
)
from tests.support.conversation_driver import start_driver, text_reply
from tests.support.database_source import with_database
from tests.support.http_driver import ApiClient, open_api

SINCE, UNTIL = datetime(2026, 11, 1, tzinfo=UTC), datetime(2026, 12, 1, tzinfo=UTC)
USAGE = Usage(fresh_input_tokens=10, cache_read_tokens=80, cache_write_tokens=10, output_tokens=5, reasoning_tokens=2)


@pytest.fixture
def reports(database: Database) -> PostgresInspector:
    return PostgresInspector(database)


@pytest.fixture
async def api(strata_server: StrataServer) -> AsyncIterator[ApiClient]:
    async with open_api(strata_server, strata_server.admin_key) as opened:
        yield opened


async def report(reports: PostgresInspector, tenant: Tenant, by: UsageBy, **changes: Any) -> UsageReport:
    return await reports.report_usage(tenant.id, by, **{"since": SINCE, "until": UNTIL} | changes)


async def call(
    store: PostgresStore,
    tenant: Tenant,
    conversation_id: str,
    *,
    at: datetime = SINCE,
    model: str = "m",
    cost: str | None = "0.5",
    usage: Usage = USAGE,
) -> None:
    """One exchange with one call."""
    start = call_start(started_at=at, model=model, cache_expected_tokens=90)
    end = call_end(usage=usage, cost_usd=None if cost is None else Decimal(cost))
    await take_exchange(store, tenant.id, conversation_id, start=start, end=end)


async def test_calls_are_summed_by_any_grouping(
    reports: PostgresInspector, store: PostgresStore, tenant: Tenant
) -> None:
    first, second = [await create_conversation(store, tenant.id) for _ in range(2)]
    await call(store, tenant, first.id, at=SINCE)
    await call(store, tenant, first.id, at=SINCE + timedelta(hours=23, minutes=59), model="n")
    await call(store, tenant, second.id, at=SINCE + timedelta(days=1))
    await call(store, tenant, first.id, at=SINCE + timedelta(days=1))
    for outside in (SINCE - timedelta(microseconds=1), UNTIL):
        await call(store, tenant, second.id, at=outside)
    expected: dict[UsageBy, list[tuple[str, int]]] = {
        UsageBy.DAY: [("2026-11-01", 2), ("2026-11-02", 2)],
        UsageBy.MODEL: [("m", 3), ("n", 1)],
        UsageBy.CONVERSATION: [(first.id, 3), (second.id, 1)],
        UsageBy.ASSISTANT: [(first.assistant_id, 3), (second.assistant_id, 1)],
    }
    for by, rows in expected.items():
        found = await report(reports, tenant, by)
        assert [(row.key, row.call_count) for row in found.rows] == rows
        assert found.is_complete
        for row in found.rows:
            assert row.usage.input_tokens == 100 * row.call_count
            assert row.usage.cache_read_tokens == 80 * row.call_count
            assert (row.usage.output_tokens, row.usage.reasoning_tokens) == (5 * row.call_count, 2 * row.call_count)
            assert row.expected_cache_tokens == 90 * row.call_count
            assert row.cost_usd == Decimal("0.5") * row.call_count
            assert (row.cache_share, row.expected_share) == (0.8, 0.9)
            assert (row.name is not None) is (by is UsageBy.ASSISTANT)
        assert (found.total.key, found.total.call_count, found.total.cost_usd) == ("total", 4, Decimal(2))
    cut = await report(reports, tenant, UsageBy.CONVERSATION, limit=1)
    assert ([row.key for row in cut.rows], cut.is_complete, cut.total.call_count) == ([first.id], False, 4)


async def test_an_assistant_has_its_current_name(
    reports: PostgresInspector, store: PostgresStore, tenant: Tenant
) -> None:
    conversation = await create_conversation(store, tenant.id)
    await call(store, tenant, conversation.id)
    await store.revise_assistant(tenant.id, conversation.assistant_id, definition(name="Another name"))
    (row,) = (await report(reports, tenant, UsageBy.ASSISTANT)).rows
    assert (row.key, row.name) == (conversation.assistant_id, "Another name")


async def test_summaries_count_and_those_of_a_forks_source_belong_to_the_source(
    reports: PostgresInspector, store: PostgresStore, tenant: Tenant
) -> None:
    conversation = await create_conversation(store, tenant.id)
    for _ in range(2):
        await call(store, tenant, conversation.id)
    await record_summary(store, tenant, conversation.id)
    fork = await store.fork_conversation(tenant.id, conversation.id, 4)
    again = await store.fork_conversation(tenant.id, fork.id, 2)
    await record_summary(store, tenant, again.id)
    found = await report(reports, tenant, UsageBy.CONVERSATION)
    assert {row.key: row.call_count for row in found.rows} == {conversation.id: 3, again.id: 1}
    assert (found.total.call_count, found.total.cost_usd) == (4, Decimal(2))


async def record_summary(store: PostgresStore, tenant: Tenant, conversation_id: str) -> None:
    start, end = call_start(started_at=SINCE, model="m"), call_end(usage=USAGE, cost_usd=Decimal("0.5"))
    await store.record_call(tenant.id, conversation_id, Call(turn_seq=-1, start=start, end=end))


async def test_a_sum_with_an_unknown_price_is_unknown(
    reports: PostgresInspector, store: PostgresStore, tenant: Tenant
) -> None:
    conversation = await create_conversation(store, tenant.id)
    await call(store, tenant, conversation.id)
    await call(store, tenant, conversation.id, model="unheard", cost=None)
    by_day = (await report(reports, tenant, UsageBy.DAY)).rows
    assert [(row.cost_usd, row.unpriced_count) for row in by_day] == [(None, 1)]
    by_model = (await report(reports, tenant, UsageBy.MODEL)).rows
    assert {row.key: row.cost_usd for row in by_model} == {"m": Decimal("0.5"), "unheard": None}


async def test_a_running_call_or_one_without_usage_has_no_missing_price(
    reports: PostgresInspector, store: PostgresStore, tenant: Tenant
) -> None:
    conversation = await create_conversation(store, tenant.id)
    await call(store, tenant, conversation.id, usage=Usage(), cost="0")
    accepted = await accept(store, tenant.id, user_input(conversation.id))
    await store.begin_call(accepted.lease, call_start(started_at=SINCE, cache_expected_tokens=90))
    (row,) = (await report(reports, tenant, UsageBy.DAY)).rows
    assert (row.call_count, row.unpriced_count, row.expected_cache_tokens) == (2, 0, 0)
    assert row.cost_usd == Decimal(0)
    await store.finish_turn(accepted.lease, answer(start=None, end=None))


async def test_a_fork_counts_its_own_calls(reports: PostgresInspector, store: PostgresStore, tenant: Tenant) -> None:
    conversation = await create_conversation(store, tenant.id)
    for _ in range(2):
        await call(store, tenant, conversation.id)
    fork = await store.fork_conversation(tenant.id, conversation.id, 4)
    await call(store, tenant, fork.id)
    counts = {row.key: row.call_count for row in (await report(reports, tenant, UsageBy.CONVERSATION)).rows}
    assert counts == {conversation.id: 2, fork.id: 1}


async def test_another_tenant_has_its_own(
    reports: PostgresInspector, store: PostgresStore, tenant: Tenant, key_ring: KeyRing
) -> None:
    await call(store, tenant, (await create_conversation(store, tenant.id)).id)
    other = await key_ring.create_tenant("other")
    await call(store, other, (await create_conversation(store, other.id)).id, model="theirs")
    for by in UsageBy:
        assert (await report(reports, other, by)).total.call_count == 1
    assert [row.key for row in (await report(reports, other, UsageBy.MODEL)).rows] == ["theirs"]
    none = await reports.report_usage("nonsense", UsageBy.DAY, since=SINCE, until=UNTIL)
    assert (none.rows, none.total.call_count, none.total.cost_usd) == ([], 0, Decimal(0))
    everybody = await reports.report_usage(None, UsageBy.MODEL, since=SINCE, until=UNTIL)
    assert ({row.key for row in everybody.rows}, everybody.total.call_count) == ({"m", "theirs"}, 2)


LARGE = """
WITH tenant AS (INSERT INTO tenants (id, name) VALUES (gen_random_uuid(), 'large') RETURNING id),
conversation AS (
    INSERT INTO conversations (id, tenant_id, assistant_id, assistant_version, args, context, metadata)
    SELECT gen_random_uuid(), id, gen_random_uuid(), 1, '{}', '{}', '{}' FROM tenant, generate_series(1, 100)
    RETURNING id
)
INSERT INTO calls (conversation_id, turn_seq, attempt, provider, model, account, epoch, manifest, dynamic, request_hash,
    repairs, template_failures, warnings, started_at)
SELECT id, 2 + day, 1, 'gemini', 'm', 'a', 1, to_jsonb(repeat('x', 300)), '', '', '[]', '[]', '[]',
    timestamptz '2026-01-01' + day * interval '1 day'
FROM generate_series(0, 199) AS day, conversation ORDER BY day
"""


async def test_a_report_on_a_large_table_reads_the_pages_of_its_own_time(server_url: str, worker_id: str) -> None:
    """In a separate database: the calls are in the order of time, as in a database that is not emptied between
    tests.
    """
    name = f"strata_usage_{worker_id}"
    connection = await asyncpg.connect(server_url)
    database = Database(DatabaseOptions(url=with_database(server_url, name)))
    try:
        await connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
        await connection.execute(f'CREATE DATABASE "{name}"')
        await migrate_up(database.options)
        async with database.connection() as filling:
            await filling.execute(LARGE)
            await filling.execute("VACUUM ANALYZE calls")
            pages = await filling.fetchval("SELECT pg_relation_size('calls') / 8192")
        assert pages > 1_000
        for by in UsageBy:
            assert 0 < await count_pages_read(database, by) < pages / 4
    finally:
        await database.close()
        await connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
        await connection.close()


async def count_pages_read(database: Database, by: UsageBy) -> int:
    """Of the table of calls, for two of its two hundred days."""
    statement = usage_reports._STATEMENTS[by]  # noqa: SLF001  reason: it looks at the statement itself
    day = datetime(2026, 3, 1, tzinfo=UTC)
    values = {"tenant": None, "everybody": True, "since": day, "until": day + timedelta(days=2), "limit": 1}
    async with database.connection() as connection:
        plan = await connection.fetchval(
            f"EXPLAIN (ANALYZE, FORMAT JSON) {statement.sql}", *statement.arguments(values)
        )
    read = re.findall(r'"(?:Exact|Lossy) Heap Blocks": (\d+)', plan)
    assert "ix_calls_started_at" in plan
    assert '"Node Type": "Seq Scan"' not in plan
    return sum(int(count) for count in read)


async def test_the_report_over_http_has_the_latest_calls(
    strata_server: StrataServer, api: ApiClient, emulated: Any
) -> None:
    driver = await start_driver(strata_server.program, strata_server.tenant.id, emulated, ANTHROPIC)
    costs = [(await driver.task("Hello?", text_reply("Yes."))).turn.cost_usd for _ in range(2)]
    shown = await api.expect(200, "GET", "/admin/api/usage?by=conversation")
    assert (shown["by"], shown["complete"]) == ("conversation", True)
    (row,) = shown["data"]
    assert (row["key"], row["calls"], row["unpriced_calls"]) == (driver.conversation_id, 2, 0)
    assert row["cost_usd"] == pytest.approx(float(sum(cost for cost in costs if cost is not None)))
    usages = [call.end.usage for call in await driver.calls() if call.end is not None]
    assert row["usage"]["output_tokens"] == sum(usage.output_tokens for usage in usages)
    assert (shown["total"]["key"], shown["total"]["cost_usd"]) == ("total", row["cost_usd"])
    days = await api.expect(200, "GET", "/admin/api/usage")
    assert [one["calls"] for one in days["data"]] == [2]
    none = await api.expect(200, "GET", "/admin/api/usage?from=2020-01-01T00:00:00Z&to=2020-02-01T00:00:00Z&by=model")
    assert (none["data"], none["since"], none["until"]) == ([], "2020-01-01T00:00:00Z", "2020-02-01T00:00:00Z")


@pytest.mark.parametrize(
    "query",
    [
        "by=week",
        "limit=0",
        "limit=1001",
        "from=yesterday",
        "from=2026-01-31T09:30:00",
        "from=2026-01-02T00:00:00Z&to=2026-01-01T00:00:00Z",
        "from=2020-01-01T00:00:00Z&to=2026-01-01T00:00:00Z",
        "to=0001-01-01T00:00:00Z",
    ],
)
async def test_an_impossible_report_is_refused(api: ApiClient, query: str) -> None:
    problem = await api.expect(422, "GET", f"/admin/api/usage?{query}")
    assert problem["code"] == "validation_failed"


async def test_reports_are_for_admins(strata_server: StrataServer) -> None:
    async with open_api(strata_server) as client:
        assert (await client.expect(403, "GET", "/admin/api/usage"))["code"] == "scope_missing"
