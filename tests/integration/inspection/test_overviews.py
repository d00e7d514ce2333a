"""The overview sums the calls of a time span, and its alarms last as long as the problem."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from server.conversation.api_key import Tenant
from server.conversation.usage import Usage
from server.inspection.overview import CELL_KEY_LIMIT, OverviewBy, OverviewStep
from server.postgres.access.key_ring import PostgresKeyRing
from server.postgres.engine import Database
from server.postgres.inspection.inspector import PostgresInspector
from server.postgres.inspection.overviews import PostgresCompactionAlarms
from server.postgres.inspection.search_index import index_new
from server.postgres.store import PostgresStore
from tests.support.builders import (
    accept,
    answer,
    call_end,
    call_start,
    create_conversation,
    epoch,
    take_exchange,
    user_input,
)

NOON = datetime(2026, 11, 10, 12, tzinfo=UTC)
SINCE, UNTIL = datetime(2026, 11, 1, tzinfo=UTC), datetime(2026, 12, 1, tzinfo=UTC)


@pytest.fixture
def overviews(database: Database) -> PostgresInspector:
    return PostgresInspector(database)


async def call(store: PostgresStore, tenant: Tenant, at: datetime = NOON, seconds: float = 1.0, **changes: Any) -> str:
    conversation = await create_conversation(store, tenant.id)
    model = changes.pop("model", "gemini-3.1-pro-preview")
    end = call_end(
        ended_at=at + timedelta(seconds=seconds), first_byte_at=at + timedelta(seconds=seconds / 2), **changes
    )
    await take_exchange(store, tenant.id, conversation.id, start=call_start(started_at=at, model=model), end=end)
    return conversation.id


async def test_cells_add_up_by_step_and_key(store: PostgresStore, tenant: Tenant, overviews: PostgresInspector) -> None:
    for day in range(3):
        await call(store, tenant, NOON + timedelta(days=day), seconds=1 + day)
    await call(store, tenant, seconds=9, model="gemini-3.8-flash", cost_usd=None, error_code="provider_disconnected")
    await call(store, tenant, UNTIL)

    found = await overviews.load_overview(tenant.id, OverviewBy.MODEL, since=SINCE, until=UNTIL)

    assert found.step is OverviewStep.DAY
    assert (found.total.call_count, found.total.error_count, found.total.unpriced_count) == (4, 1, 1)
    assert found.total.cost_usd == 3 * Decimal("0.0012345678")
    assert found.total.usage.fresh_input_tokens == 28
    assert found.total.cache_share == pytest.approx(5 / 15)
    assert found.total.median_seconds == pytest.approx(2.5)
    assert [cell.call_count for cell in found.by_step] == [2, 1, 1]
    assert [cell.at for cell in found.by_step] == [(NOON + timedelta(days=day)).replace(hour=0) for day in range(3)]
    assert [(cell.key, cell.call_count) for cell in found.by_key] == [
        ("gemini-3.1-pro-preview", 3),
        ("gemini-3.8-flash", 1),
    ]
    assert sum(cell.call_count for cell in found.cells) == 4
    assert [(error.code, error.call_count, error.last_at) for error in found.errors] == [
        ("provider_disconnected", 1, NOON)
    ]
    assert found.by_key[1].slow_seconds == pytest.approx(9)
    assert found.by_key[1].first_byte_seconds == pytest.approx(4.5)


async def test_keys_are_counted_and_the_largest_have_their_own_series(
    store: PostgresStore, tenant: Tenant, overviews: PostgresInspector
) -> None:
    count = CELL_KEY_LIMIT + 2
    for number in range(count):
        usage = Usage(output_tokens=number)
        await call(store, tenant, NOON + timedelta(days=number % 2), model=f"model-{number:02}", usage=usage)

    found = await overviews.load_overview(tenant.id, OverviewBy.MODEL, since=SINCE, until=UNTIL)

    largest_first = [f"model-{number:02}" for number in reversed(range(count))]
    assert [cell.key for cell in found.by_key] == largest_first
    assert sorted({str(cell.key) for cell in found.cells}) == sorted(largest_first[:CELL_KEY_LIMIT])
    assert found.total.call_count == count
    assert [cell.call_count for cell in found.by_step] == [count / 2, count / 2]


async def test_a_time_span_without_calls_has_no_total(tenant: Tenant, overviews: PostgresInspector) -> None:
    found = await overviews.load_overview(tenant.id, OverviewBy.ASSISTANT, since=NOON, until=NOON + timedelta(days=1))

    assert found.step is OverviewStep.HOUR
    assert (found.total.call_count, found.total.median_seconds, found.total.cache_share) == (0, None, None)
    assert (found.by_step, found.by_key, found.cells, found.slowest) == ([], [], [], [])


async def test_outliers_come_first_and_tenants_are_separate(
    store: PostgresStore, tenant: Tenant, key_ring: PostgresKeyRing, overviews: PostgresInspector
) -> None:
    dear = await call(store, tenant, cost_usd=Decimal(5))
    slow = await call(store, tenant, seconds=100)
    other = await key_ring.create_tenant("other")
    theirs = await call(store, other, cost_usd=Decimal(9))

    mine = await overviews.load_overview(tenant.id, OverviewBy.ASSISTANT, since=SINCE, until=UNTIL)
    everybody = await overviews.load_overview(None, OverviewBy.PROVIDER, since=SINCE, until=UNTIL)

    assert [top.id for top in mine.most_expensive] == [dear, slow]
    assert [top.id for top in mine.slowest] == [slow, dear]
    assert {cell.name for cell in mine.by_key} == {"helper"}
    assert all(cell.key is not None and cell.key.startswith("asst_") for cell in mine.by_key)
    assert everybody.most_expensive[0].id == theirs
    assert [(cell.key, cell.call_count) for cell in everybody.by_key] == [("gemini", 3)]


async def test_a_problem_is_an_alarm(
    database: Database, store: PostgresStore, tenant: Tenant, overviews: PostgresInspector
) -> None:
    conversation = await create_conversation(store, tenant.id)
    warnings: Any = ({"kind": "prefix_break"},)
    await take_exchange(store, tenant.id, conversation.id, start=call_start(warnings=warnings))
    await index_new(database)
    now = datetime.now(UTC)

    found = await overviews.load_overview(
        tenant.id, OverviewBy.MODEL, since=now - timedelta(days=1), until=now + timedelta(days=1)
    )

    counts = {alarm.kind: [item.id for item in alarm.conversations] for alarm in found.alarms}
    assert counts["has_prefix_break"] == [conversation.id]
    assert counts["was_recovered"] == []


async def test_a_stuck_compaction_is_an_alarm_until_the_next_answer_or_epoch(
    store: PostgresStore, tenant: Tenant, overviews: PostgresInspector, database: Database
) -> None:
    conversation = await create_conversation(store, tenant.id)
    alarms = PostgresCompactionAlarms(database)

    async def stuck() -> list[tuple[str, int]]:
        found = await overviews.load_overview(tenant.id, OverviewBy.MODEL, since=SINCE, until=UNTIL)
        return [(alarm.reason, alarm.request_tokens) for alarm in found.stuck_compactions]

    async def note(seq: int, tokens: int, number: int) -> None:
        await alarms.record_blocked(
            tenant.id, conversation.id, reason="blocked_by_open_call", request_tokens=tokens, seq=seq, epoch=number
        )

    await store.begin_epoch(tenant.id, conversation.id, epoch())
    await take_exchange(store, tenant.id, conversation.id)
    await note(2, 1000, 1)
    assert await stuck() == [("blocked_by_open_call", 1000)]
    accepted = await accept(store, tenant.id, user_input(conversation.id))
    assert await stuck() == [("blocked_by_open_call", 1000)]
    await store.finish_turn(accepted.lease, answer())
    assert await stuck() == []
    await note(4, 2000, 1)
    await note(2, 1, 1)
    assert await stuck() == [("blocked_by_open_call", 2000)]
    await store.begin_epoch(tenant.id, conversation.id, epoch(2, "Other."))
    assert await stuck() == []
    # No alarm is recorded for another tenant.
    await alarms.record_blocked("tenant_x", conversation.id, reason="x", request_tokens=1, seq=9, epoch=9)
    assert await stuck() == []
