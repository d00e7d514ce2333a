"""What a page of operators reads does not grow with the tables.

The test compares query plans at two sizes, on filled and analysed tables; it measures no time.
"""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import asyncpg
import pytest

from server.conversation.identifiers import CONVERSATION, decode_id
from server.postgres.access.key_ring import PostgresKeyRing
from server.postgres.connections import DatabaseOptions
from server.postgres.inspection import conversation_list
from server.postgres.inspection.search_index import index_all
from server.postgres.inspection.tables import conversation_facts, turn_texts
from server.postgres.migrations import migrate_up
from server.postgres.store import PostgresStore
from server.postgres.tables import calls, conversations, turns
from tests.bench.inspection_rows import Reading, WatchedDatabase, draw_wanted, measure
from tests.support.builders import call_end, call_start, create_conversation, take_exchange
from tests.support.database_source import with_database

SMALL, LARGE = 5_000, 15_000
OVERVIEW = timedelta(hours=1)
"""An overview reads the calls of its period. Earlier calls do not change how many."""
GROWTH = 1.25
FEW = 300
"""Smaller differences are ignored: an index may have one level more, or a fuller page."""

# All rows of one conversation again, with new ids and further back in time. The texts vary: every copy has common
# words,
# every second one another word and a label, the newest few something that is rare.
_COPIES = """
CREATE TEMPORARY TABLE copies AS
SELECT number, md5('copy ' || number)::uuid AS id, number * interval '1 minute' AS age,
    CASE WHEN mod(number, 2) = 0 THEN 'half ' ELSE '' END || CASE WHEN number < 30 THEN 'rarely' ELSE '' END AS said,
    CASE WHEN mod(number, 2) = 0 THEN ARRAY['tool:half'] ELSE '{}' END
        || CASE WHEN number < 30 THEN ARRAY['error:rare', 'has:has_prefix_break'] ELSE '{}' END AS labels
FROM generate_series(%(first)s, %(last)s) AS number
"""
_CHANGES = {
    conversations: {"id": "n.id", "created_at": "o.created_at - n.age"},
    turns: {"conversation_id": "n.id", "created_at": "o.created_at - n.age"},
    calls: {
        "conversation_id": "n.id",
        "started_at": "o.started_at - n.age",
        "first_byte_at": "o.first_byte_at - n.age",
        "ended_at": "o.ended_at - n.age",
    },
    conversation_facts: {
        "conversation_id": "n.id",
        "last_activity_at": "o.last_activity_at - n.age",
        "cost_usd": "n.number % 97",
        "labels": "o.labels || n.labels",
        "tool_names": "CASE WHEN n.number % 2 = 0 THEN ARRAY['half'] ELSE '{}' END",
        "error_codes": "CASE WHEN n.number < 30 THEN ARRAY['rare'] ELSE '{}' END",
    },
    turn_texts: {
        "conversation_id": "n.id",
        "text": "o.text || ' ' || n.said",
        "tsv": "o.tsv || to_tsvector('simple', md5(n.number::text) || ' ' || n.said)",
    },
}


@pytest.fixture(scope="module")
async def filled(server_url: str, worker_id: str) -> AsyncIterator[WatchedDatabase]:
    """A separate database: its tables are filled, analysed, and filled further."""
    name = f"strata_rows_{worker_id}"
    connection = await asyncpg.connect(server_url)
    try:
        await connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
        await connection.execute(f'CREATE DATABASE "{name}"')
        options = DatabaseOptions(url=with_database(server_url, name))
        await migrate_up(options)
        database = WatchedDatabase(options)
        yield database
        await database.close()
        await connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')
    finally:
        await connection.close()


async def fill(database: WatchedDatabase, original: str, first: int, last: int) -> None:
    """Copies of a conversation, each older than the one before."""
    async with database.connection() as connection:
        await connection.execute(_COPIES % {"first": first, "last": last})
        for table, changes in _CHANGES.items():
            names = [column.name for column in table.columns]
            key = next(name for name, value in changes.items() if value == "n.id")
            await connection.execute(
                f"INSERT INTO {table.name} ({', '.join(names)}) "  # noqa: S608  reason: names of our own tables
                f"SELECT {', '.join(changes.get(name, f'o.{name}') for name in names)} "
                f"FROM copies n, {table.name} o WHERE o.{key} = '{decode_id(CONVERSATION, original)}'"
            )
        await connection.execute("DROP TABLE copies")
        await connection.execute("VACUUM ANALYZE")


async def test_what_a_page_reads_does_not_grow_with_the_tables(
    filled: WatchedDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise the tables would have to be so large that the test would be slow.
    monkeypatch.setattr(conversation_list, "ENTRIES", 2000)
    store, ring = PostgresStore(filled), PostgresKeyRing(filled)
    tenant = await ring.create_tenant("acme")
    conversation = await create_conversation(store, tenant.id)
    now = datetime.now(UTC)
    start, end = call_start(started_at=now), call_end(first_byte_at=now, ended_at=now)
    await take_exchange(store, tenant.id, conversation.id, "Please tell me where", "Here it lies", start=start, end=end)
    await index_all(filled)
    await fill(filled, conversation.id, 1, SMALL)
    wanted = await draw_wanted(filled, tenant.id)
    small = await measure(filled, tenant.id, wanted, OVERVIEW)
    await fill(filled, conversation.id, SMALL + 1, LARGE)
    large = await measure(filled, tenant.id, wanted, OVERVIEW)
    table = "\n".join(f"{name}: {small[name]} -> {large[name]}" for name in small)
    assert not [name for name in small if grows(small[name], large[name])], table
    assert max(reading.queries for reading in large.values()) <= 30, table


def grows(small: Reading, large: Reading) -> bool:
    return (
        large.queries > small.queries
        or large.rows > small.rows * GROWTH + FEW
        or large.pages > small.pages * GROWTH + FEW
    )
