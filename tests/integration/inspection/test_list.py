"""The list of conversations for operators: combinable filters, complete pages, and searches within a tenant."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.conversation.api_key import Tenant
from server.conversation.conversation import ConversationState
from server.conversation.errors import CursorInvalid
from server.conversation.turn import StopReason, TurnState
from server.inspection.conversation_list import InspectedState, InspectionFilter
from server.postgres.access.key_ring import PostgresKeyRing
from server.postgres.engine import Database
from server.postgres.inspection import conversation_list as inspection_list
from server.postgres.inspection.inspector import PostgresInspector
from server.postgres.inspection.search_index import index_new
from server.postgres.store import PostgresStore
from tests.support.builders import (
    NASTY,
    accept,
    call_end,
    call_start,
    create_conversation,
    take_exchange,
    user_input,
)

WARNINGS: dict[str, Any] = {
    "has_prefix_break": {"kind": "prefix_break"},
    "has_withheld_signature": {"kind": "signatures_withheld", "reason": "provider", "seqs": [2]},
    "has_missing_signature": {"kind": "signatures_withheld", "reason": "unsigned", "seqs": [2]},
}


@pytest.fixture
def inspector(database: Database) -> PostgresInspector:
    return PostgresInspector(database)


async def found(inspector: PostgresInspector, tenant_id: str | None, **filters: Any) -> list[str]:
    """The ids of all pages."""
    ids: list[str] = []
    cursor = None
    while True:
        page = await inspector.list_conversations(
            tenant_id, filters=InspectionFilter(**filters), cursor=cursor, limit=2
        )
        ids += [item.id for item in page.items]
        cursor = page.next_cursor
        if cursor is None:
            return ids


async def add_conversation(store: PostgresStore, tenant: Tenant, text: str = "Hello", **changes: Any) -> str:
    conversation = await create_conversation(store, tenant.id)
    await take_exchange(store, tenant.id, conversation.id, text, **changes)
    return conversation.id


async def test_newest_activity_comes_first(
    database: Database, store: PostgresStore, tenant: Tenant, inspector: PostgresInspector
) -> None:
    first, second, third = [await add_conversation(store, tenant) for _ in range(3)]
    await take_exchange(store, tenant.id, first)
    await index_new(database)

    assert await found(inspector, tenant.id) == [first, third, second]

    page = await inspector.list_conversations(tenant.id)
    shown = page.items[0]
    assert (shown.tenant_name, shown.assistant_name, shown.state) == ("acme", "helper", ConversationState.IDLE)
    assert shown.facts.turn_count == 4
    assert shown.is_counted
    assert not page.is_count_exact


async def test_a_conversation_with_a_newer_turn_is_marked_as_not_counted_yet(
    database: Database, store: PostgresStore, tenant: Tenant, inspector: PostgresInspector
) -> None:
    conversation_id = await add_conversation(store, tenant)
    await index_new(database)
    await accept(store, tenant.id, user_input(conversation_id))
    running = (await inspector.list_conversations(tenant.id)).items[0]

    assert running.state is ConversationState.RUNNING
    assert not running.is_counted
    assert await found(inspector, tenant.id, state=InspectedState.RUNNING) == [conversation_id]
    assert await found(inspector, tenant.id, state=InspectedState.AWAITING_TOOLS) == []


@pytest.mark.parametrize("cap", [0, 2000], ids=["walking", "by index"])
async def test_each_filter_finds_exactly_its_conversations(
    database: Database,
    store: PostgresStore,
    tenant: Tenant,
    inspector: PostgresInspector,
    monkeypatch: pytest.MonkeyPatch,
    cap: int,
) -> None:
    monkeypatch.setattr(inspection_list, "CAP", cap)
    monkeypatch.setattr(inspection_list, "WINDOW", 2)
    plain = await add_conversation(store, tenant)
    other = call_start(provider="anthropic", model="claude-opus-5")
    by_filter: list[tuple[dict[str, Any], str]] = [
        ({"provider": "anthropic"}, await add_conversation(store, tenant, start=other)),
        (
            {"error_code": "provider_disconnected"},
            await add_conversation(
                store, tenant, state=TurnState.FAILED, stop_reason=StopReason.ERROR, error_code="provider_disconnected"
            ),
        ),
        (
            {"was_recovered": True},
            await add_conversation(store, tenant, state=TurnState.INTERRUPTED, error_code="turn_interrupted"),
        ),
        ({"tool_name": "get_weather"}, await add_conversation(store, tenant, calls=["call_1"])),
        (
            {"has_repairs": True},
            await add_conversation(store, tenant, start=call_start(repairs=({"kind": "answer_left_out"},))),
        ),
        ({"cost_from": Decimal(1)}, await add_conversation(store, tenant, end=call_end(cost_usd=Decimal(2)))),
        *[
            ({name: True}, await add_conversation(store, tenant, start=call_start(warnings=(warning,))))
            for name, warning in WARNINGS.items()
            if name != "has_withheld_signature"
        ],
    ]
    await index_new(database)

    for filters, conversation_id in by_filter:
        assert await found(inspector, tenant.id, **filters) == [conversation_id], filters
    failed = by_filter[1][1]
    assert await found(inspector, tenant.id, state=InspectedState.FAILED, stop_reason=StopReason.ERROR) == [failed]
    assert await found(inspector, tenant.id, error_code="provider_disconnected", provider="anthropic") == []
    assert await found(inspector, tenant.id, model="claude-opus-5") == [by_filter[0][1]]
    assert plain in await found(inspector, tenant.id, cost_to=Decimal(1), tokens_from=18, tokens_to=18)
    assert await found(inspector, tenant.id, tokens_from=19) == []


async def test_filters_by_assistant_and_time(
    database: Database, store: PostgresStore, tenant: Tenant, inspector: PostgresInspector
) -> None:
    first, second = [await add_conversation(store, tenant) for _ in range(2)]
    await index_new(database)
    assistant_id = (await store.load_conversation(tenant.id, first)).assistant_id

    assert await found(inspector, tenant.id, assistant_id=assistant_id) == [first]
    assert await found(inspector, tenant.id, assistant_id="asst_nonsense") == []
    soon = datetime.now(UTC) + timedelta(hours=1)
    assert await found(inspector, tenant.id, active_after=soon) == []
    assert await found(inspector, tenant.id, active_before=soon) == [second, first]
    assert await found(inspector, tenant.id, active_within=timedelta(hours=1)) == [second, first]
    assert await found(inspector, tenant.id, active_within=timedelta()) == []
    assert await found(inspector, tenant.id, active_within=timedelta(hours=1), active_after=soon) == []


@pytest.mark.parametrize("cap", [0, 2000], ids=["walking", "by index"])
async def test_words_and_phrases_are_found(
    database: Database,
    store: PostgresStore,
    tenant: Tenant,
    inspector: PostgresInspector,
    monkeypatch: pytest.MonkeyPatch,
    cap: int,
) -> None:
    monkeypatch.setattr(inspection_list, "CAP", cap)
    monkeypatch.setattr(inspection_list, "TEXT_WINDOW", 2)
    oslo = await add_conversation(store, tenant, "The weather in Oslo is cold.")
    bergen = await add_conversation(store, tenant, "In Bergen the cold weather rains, 100%.")
    await add_conversation(store, tenant, NASTY)
    await index_new(database)

    assert await found(inspector, tenant.id, text="weather cold") == [bergen, oslo]
    assert await found(inspector, tenant.id, text="weather -bergen") == [oslo]
    assert await found(inspector, tenant.id, text="bergen or oslo") == [bergen, oslo]
    assert await found(inspector, tenant.id, phrase="cold weather") == [bergen]
    assert await found(inspector, tenant.id, phrase="WEATHER IN OSLO") == [oslo]
    assert await found(inspector, tenant.id, phrase="weather  in") == []
    assert await found(inspector, tenant.id, text="weather", phrase="rains, 100%") == [bergen]
    assert await found(inspector, tenant.id, text="weather", tool_name="get_weather") == []
    assert await found(inspector, tenant.id, phrase="get_weather") == []


@pytest.mark.parametrize("text", ["!!!", "'", "\\", "a & b | !c:*", "<->", "((", ":*", "\x00", '"', "tenant:", NASTY])
async def test_any_search_text_is_accepted(
    database: Database, store: PostgresStore, tenant: Tenant, inspector: PostgresInspector, text: str
) -> None:
    plain = await add_conversation(store, tenant, "plain")
    await index_new(database)

    assert await found(inspector, tenant.id, text=text) in ([], [plain])
    assert await found(inspector, tenant.id, phrase=text) == []
    assert await found(inspector, tenant.id, model=text, tool_name=text, error_code=text) == []
    assert await found(inspector, tenant.id, text="plain") == [plain]


async def test_a_tenant_sees_its_own_and_without_a_tenant_all_are_visible(
    database: Database,
    store: PostgresStore,
    tenant: Tenant,
    key_ring: PostgresKeyRing,
    inspector: PostgresInspector,
) -> None:
    other = await key_ring.create_tenant("other")
    mine, theirs = (
        await add_conversation(store, tenant, "secret word"),
        await add_conversation(store, other, "secret word"),
    )
    await index_new(database)

    for filters in ({}, {"text": "secret"}, {"phrase": "secret word"}, {"provider": "gemini"}):
        assert await found(inspector, tenant.id, **filters) == [mine]
        assert await found(inspector, None, **filters) == [theirs, mine]
    assert await found(inspector, "tenant_nonsense") == []
    assert await found(inspector, tenant.id, text=f"tenant:{other.id}") == []


async def test_a_short_list_has_an_exact_count_and_a_long_one_an_estimate(
    database: Database, store: PostgresStore, tenant: Tenant, inspector: PostgresInspector
) -> None:
    for _ in range(3):
        await add_conversation(store, tenant)
    await add_conversation(store, tenant, error_code="provider_disconnected", state=TurnState.FAILED)
    await index_new(database)

    page = await inspector.list_conversations(
        tenant.id, filters=InspectionFilter(error_code="provider_disconnected"), limit=1
    )

    assert (page.estimated_count, page.is_count_exact) == (1, True)
    async with database.connection() as connection:
        await connection.execute("ANALYZE conversation_facts")
    page = await inspector.list_conversations(tenant.id)
    assert (page.estimated_count, page.is_count_exact) == (4, False)


async def test_a_search_that_finds_little_reports_how_far_it_read(
    database: Database,
    store: PostgresStore,
    tenant: Tenant,
    inspector: PostgresInspector,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inspection_list, "WINDOW", 2)
    for _ in range(3):
        await add_conversation(store, tenant)
    await index_new(database)

    page = await inspector.list_conversations(tenant.id, filters=InspectionFilter(cost_from=Decimal(5)))

    assert page.items == []
    assert page.next_cursor is not None
    assert page.searched_until is not None


@settings(max_examples=20)
@given(counts=st.lists(st.integers(1, 3), max_size=6), limit=st.integers(1, 4))
async def test_pages_of_any_size_show_each_conversation_once(
    database: Database, store: PostgresStore, key_ring: PostgresKeyRing, counts: list[int], limit: int
) -> None:
    tenant = await key_ring.create_tenant(str(datetime.now(UTC)))
    inspector = PostgresInspector(database)
    made = []
    for count in counts:
        conversation = await create_conversation(store, tenant.id)
        for _ in range(count):
            await take_exchange(store, tenant.id, conversation.id)
        made.append(conversation.id)
    await index_new(database)

    seen: list[str] = []
    cursor = None
    while True:
        page = await inspector.list_conversations(tenant.id, cursor=cursor, limit=limit)
        seen += [item.id for item in page.items]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert seen == list(reversed(made))


@pytest.mark.parametrize("cursor", ["", "x", "IjEi", "Ijk5OTk5OTk5OTk5OTk5OTk5OTk5OToxIg"])
async def test_an_invalid_cursor_is_refused(tenant: Tenant, inspector: PostgresInspector, cursor: str) -> None:
    with pytest.raises(CursorInvalid):
        await inspector.list_conversations(tenant.id, cursor=cursor)
