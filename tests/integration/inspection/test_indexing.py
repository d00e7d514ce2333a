"""The indexer counts each turn once, in any process and at any time."""

import asyncio
import math
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.app.settings import Settings
from server.app.wiring import open_program
from server.conversation.api_key import Tenant
from server.conversation.block import TextBlock, ToolResultBlock
from server.conversation.conversation import ConversationFacts
from server.conversation.identifiers import CONVERSATION, decode_id
from server.conversation.turn import StopReason, TurnState
from server.postgres.engine import Database
from server.postgres.inspection import search_index as indexing
from server.postgres.inspection.search_index import (
    IndexReport,
    facts_from,
    index_all,
    index_conversation,
    index_new,
    load_lag_seconds,
)
from server.postgres.store import PostgresStore
from tests.support.builders import (
    NASTY,
    accept,
    answer,
    call_end,
    call_start,
    create_conversation,
    take_exchange,
    tool_response,
    user_input,
)


async def load_facts(database: Database, conversation_id: str) -> ConversationFacts | None:
    async with database.connection() as connection:
        row = await connection.fetchrow(
            "SELECT * FROM conversation_facts WHERE conversation_id = $1", decode_id(CONVERSATION, conversation_id)
        )
    return None if row is None else facts_from(row)


async def load_texts(database: Database, conversation_id: str) -> dict[int, str]:
    async with database.connection() as connection:
        rows = await connection.fetch(
            "SELECT seq, text FROM turn_texts WHERE conversation_id = $1 ORDER BY seq",
            decode_id(CONVERSATION, conversation_id),
        )
    return {row["seq"]: row["text"] for row in rows}


async def test_facts_are_the_sums_over_turns_and_calls(
    database: Database, store: PostgresStore, tenant: Tenant
) -> None:
    conversation = await create_conversation(store, tenant.id)
    accepted = await accept(store, tenant.id, user_input(conversation.id, "How is Oslo?"))
    await store.finish_turn(accepted.lease, answer(calls=["call_1"]))
    accepted = await accept(store, tenant.id, tool_response(conversation.id, ["call_1"]))
    await store.end_call(
        accepted.lease, call_start(attempt=1), call_end(error_code="provider_overloaded", cost_usd=Decimal(0))
    )
    warnings: Any = ({"kind": "prefix_break"}, {"kind": "signatures_withheld", "reason": "unsigned", "seqs": [2]})
    start = call_start(attempt=2, warnings=warnings, repairs=({"kind": "answer_left_out", "seq": 2},))
    await store.finish_turn(
        accepted.lease,
        answer(
            state=TurnState.FAILED,
            stop_reason=StopReason.ERROR,
            error_code="provider_disconnected",
            start=start,
            end=call_end(cost_usd=None),
        ),
    )

    assert await index_new(database) == IndexReport(conversation_count=1, turn_count=4)

    facts = await load_facts(database, conversation.id)
    assert facts is not None
    assert (facts.last_indexed_seq, facts.turn_count, facts.call_count) == (4, 4, 3)
    assert facts.models == ("gemini-3.1-pro-preview",)
    assert facts.states == ("complete", "failed")
    assert facts.stop_reasons == ("tool_use", "error")
    assert set(facts.error_codes) == {"provider_overloaded", "provider_disconnected"}
    assert facts.tool_names == ("get_weather",)
    assert facts.has_repairs
    assert facts.has_missing_signature
    assert facts.has_withheld_signature
    assert facts.has_prefix_break
    assert not facts.was_recovered
    assert facts.usage.fresh_input_tokens == 21
    assert (facts.cost_usd, facts.unpriced_count) == (Decimal("0.0012345678"), 1)
    assert facts.slowest_call_ms == 0
    assert facts.excerpt == "How is Oslo?"
    assert (await load_texts(database, conversation.id))[1] == "How is Oslo?"


async def test_counting_again_changes_nothing(database: Database, store: PostgresStore, tenant: Tenant) -> None:
    conversation = await create_conversation(store, tenant.id)
    await take_exchange(store, tenant.id, conversation.id)
    await index_new(database)
    before = await load_facts(database, conversation.id)

    assert await index_new(database) == IndexReport()
    assert await index_all(database) == IndexReport()
    uuid = decode_id(CONVERSATION, conversation.id)
    assert uuid is not None
    await index_conversation(database, uuid)

    assert await load_facts(database, conversation.id) == before


@settings(max_examples=10)
@given(portions=st.lists(st.integers(0, 3), min_size=1, max_size=5), page=st.integers(1, 4))
async def test_batches_of_any_size_give_the_same_facts(
    database: Database, store: PostgresStore, key_ring: Any, portions: list[int], page: int
) -> None:
    tenant = await key_ring.create_tenant(f"t-{asyncio.get_running_loop().time()}")
    one, other = [await create_conversation(store, tenant.id) for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexing, "PAGE_TURNS", page)
        for count in portions:
            for number in range(count):
                await take_exchange(store, tenant.id, one.id, f"Task {number}")
            await index_new(database)
    for count in portions:
        for number in range(count):
            await take_exchange(store, tenant.id, other.id, f"Task {number}")
    await index_all(database)

    first, second = await load_facts(database, one.id), await load_facts(database, other.id)
    assert first is not None
    assert second is not None
    same = ("last_indexed_seq", "turn_count", "call_count", "usage", "cost_usd", "models", "states", "excerpt")
    assert [getattr(first, name) for name in same] == [getattr(second, name) for name in same]
    assert await load_texts(database, one.id) == await load_texts(database, other.id)


async def test_concurrent_indexers_count_each_turn_once(
    database: Database, store: PostgresStore, tenant: Tenant
) -> None:
    conversations = [await create_conversation(store, tenant.id) for _ in range(4)]
    for conversation in conversations:
        for _ in range(3):
            await take_exchange(store, tenant.id, conversation.id)

    await asyncio.gather(*(index_all(database) for _ in range(4)))

    for conversation in conversations:
        facts = await load_facts(database, conversation.id)
        assert facts is not None
        assert (facts.turn_count, facts.call_count) == (6, 3)


async def test_a_running_turn_is_counted_after_its_end(
    database: Database, store: PostgresStore, tenant: Tenant
) -> None:
    conversation = await create_conversation(store, tenant.id)
    accepted = await accept(store, tenant.id, user_input(conversation.id))
    await index_new(database)
    facts = await load_facts(database, conversation.id)
    assert facts is not None
    assert (facts.last_indexed_seq, facts.call_count) == (1, 0)
    assert await index_new(database) == IndexReport()

    await store.finish_turn(accepted.lease, answer())
    await index_new(database)

    facts = await load_facts(database, conversation.id)
    assert facts is not None
    assert (facts.last_indexed_seq, facts.call_count) == (2, 1)


async def test_a_stopped_indexer_catches_up(database: Database, store: PostgresStore, tenant: Tenant) -> None:
    conversation = await create_conversation(store, tenant.id)
    await index_new(database)
    await take_exchange(store, tenant.id, conversation.id)
    async with database.connection() as connection:
        await connection.execute("UPDATE index_progress SET indexed_until = now() - interval '3 days'")

    assert (await index_new(database)).turn_count == 2

    assert 0 <= await load_lag_seconds(database) < 60


async def test_turns_with_an_old_date_are_found_by_the_full_scan(
    database: Database, store: PostgresStore, tenant: Tenant
) -> None:
    conversation = await create_conversation(store, tenant.id)
    await index_new(database)
    await take_exchange(store, tenant.id, conversation.id)
    async with database.connection() as connection:
        await connection.execute("UPDATE turns SET created_at = created_at - interval '1 year'")
        await connection.execute("UPDATE index_progress SET indexed_until = now() + interval '1 hour'")
    assert (await index_new(database)).turn_count == 0

    assert (await index_all(database)).turn_count == 2


async def test_a_fork_counts_its_turns_but_not_the_costs_of_its_source(
    database: Database, store: PostgresStore, tenant: Tenant
) -> None:
    conversation = await create_conversation(store, tenant.id)
    await take_exchange(store, tenant.id, conversation.id)
    await index_new(database)
    fork = await store.fork_conversation(tenant.id, conversation.id, 2)
    await take_exchange(store, tenant.id, fork.id)

    await index_new(database)

    facts = await load_facts(database, fork.id)
    assert facts is not None
    assert (facts.turn_count, facts.call_count) == (4, 1)
    assert facts.cost_usd == Decimal("0.0012345678")


@pytest.mark.parametrize(
    "text",
    [
        "x" * 1_000_000,
        " ".join(f"{number:x}" for number in range(300_000)),
        "a-" * 400_000,
        "http://a.b/c" * 100_000,
        "\U0001f600" * 300_000,
        NASTY * 5000,
        "İ" * 400_000,
    ],
    ids=["one word", "many words", "hyphens", "addresses", "emoji", "nasty", "grows in lower case"],
)
async def test_a_turn_of_any_text_is_indexed(
    database: Database, store: PostgresStore, tenant: Tenant, text: str
) -> None:
    conversation = await create_conversation(store, tenant.id)
    accepted = await accept(
        store, tenant.id, user_input(conversation.id, blocks=(TextBlock(text=f"begins {text} ends"),))
    )
    await store.finish_turn(accepted.lease, answer(calls=["call_1"]))
    result = ToolResultBlock(tool_call_id="call_1", output={"deep": [text]})
    await accept(store, tenant.id, tool_response(conversation.id, ["call_1"], blocks=(result,)))

    assert (await index_new(database)).turn_count == 3

    texts = await load_texts(database, conversation.id)
    assert texts[1].startswith("begins")
    assert all(len(found.encode()) <= 200_000 for found in texts.values())


async def test_an_erased_conversation_leaves_no_facts(database: Database, store: PostgresStore, tenant: Tenant) -> None:
    conversation = await create_conversation(store, tenant.id)
    await take_exchange(store, tenant.id, conversation.id)
    await index_new(database)
    uuid = decode_id(CONVERSATION, conversation.id)
    assert uuid is not None

    await store.erase_conversation(tenant.id, conversation.id)

    assert await index_conversation(database, uuid) == IndexReport()
    assert await load_facts(database, conversation.id) is None
    assert await load_texts(database, conversation.id) == {}


async def test_a_worker_runs_the_indexer(
    database: Database, store: PostgresStore, tenant: Tenant, server_settings: Settings
) -> None:
    conversation = await create_conversation(store, tenant.id)
    await take_exchange(store, tenant.id, conversation.id)

    async with open_program(server_settings.model_copy(update={"worker_inside": True})) as program:
        async with asyncio.timeout(30):
            while await load_facts(database, conversation.id) is None:  # noqa: ASYNC110  reason: a row, not an event
                await asyncio.sleep(0.05)
            while program.index_watch.value is None or math.isnan(program.index_watch.value):
                await program.index_watch.poll()

    facts = await load_facts(database, conversation.id)
    assert facts is not None
    assert facts.turn_count == 2
    assert 0 <= program.index_watch.value < 60
