"""Replay conversations: complete conversations that no live list contains, in tables of the same shape."""

import re

import pytest

from server.conversation.api_key import Tenant
from server.conversation.errors import ConversationNotFound
from server.inspection.timeline import TimelineTurn
from server.postgres.access.key_ring import PostgresKeyRing
from server.postgres.connections import connect
from server.postgres.engine import Database
from server.postgres.inspection.inspector import PostgresInspector
from server.postgres.inspection.search_index import index_all
from server.postgres.replay.conversation_tables import REPLAY_SCHEMA, REPLAY_TABLES
from server.postgres.replay.conversations import replay_database_options
from server.postgres.store import PostgresStore
from tests.support.builders import create_conversation, take_exchange

SHAPES = {
    "columns": """
        SELECT a.attrelid::regclass::text AS place, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull,
            pg_get_expr(d.adbin, d.adrelid), a.attstorage::text, a.attidentity::text, a.attgenerated::text,
            col_description(a.attrelid, a.attnum)
        FROM pg_attribute a LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
        WHERE a.attrelid = $1::text::regclass AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
    """,
    "constraints": """
        SELECT conname, contype::text, pg_get_constraintdef(oid) FROM pg_constraint
        WHERE conrelid = $1::text::regclass ORDER BY 1
    """,
    "indexes": """
        SELECT c.relname, pg_get_indexdef(i.indexrelid), i.indisvalid FROM pg_index i
        JOIN pg_class c ON c.oid = i.indexrelid WHERE i.indrelid = $1::text::regclass ORDER BY 1
    """,
    "table": """
        SELECT reloptions, obj_description(oid, 'pg_class') FROM pg_class WHERE oid = $1::text::regclass
    """,
}


async def shape(database: Database, query: str, place: str) -> list[list[str]]:
    """The definition of a table in the catalogue, in either schema."""
    async with database.connection() as connection:
        rows = await connection.fetch(query, place)
    return [[re.sub(rf"\b(?:{REPLAY_SCHEMA}|public)\.", "", str(value)) for value in row] for row in rows]


@pytest.mark.parametrize("name", REPLAY_TABLES)
async def test_a_replay_table_has_the_shape_of_the_live_one(database: Database, name: str) -> None:
    """Column by column, constraint by constraint, index by index. A change of one is a change of both."""
    for what, query in SHAPES.items():
        live = await shape(database, query, name)
        assert live, what
        assert await shape(database, query, f"{REPLAY_SCHEMA}.{name}") == live, what


async def test_every_table_of_the_schema_is_a_replay_table(database: Database) -> None:
    async with database.connection() as connection:
        rows = await connection.fetch("SELECT tablename FROM pg_tables WHERE schemaname = $1", REPLAY_SCHEMA)
    assert {row["tablename"] for row in rows} == set(REPLAY_TABLES)


async def test_a_replay_conversation_is_complete_and_not_visible_on_the_live_side(
    database: Database, replay_store: Database, store: PostgresStore, tenant: Tenant, key_ring: PostgresKeyRing
) -> None:
    replay_turns = PostgresStore(replay_store)
    replayed = await create_conversation(replay_turns, tenant.id)
    await take_exchange(replay_turns, tenant.id, replayed.id, "Only here.")
    live = await create_conversation(store, tenant.id)
    await take_exchange(store, tenant.id, live.id, "Only there.")
    await index_all(database)

    assert [found.id for found in (await store.list_conversations(tenant.id)).items] == [live.id]
    assert [found.id for found in (await replay_turns.list_conversations(tenant.id)).items] == [replayed.id]
    with pytest.raises(ConversationNotFound):
        await store.load_conversation(tenant.id, replayed.id)
    with pytest.raises(ConversationNotFound):
        await replay_turns.load_conversation(tenant.id, live.id)
    inspector = PostgresInspector(database)
    assert [found.id for found in (await inspector.list_conversations(None)).items] == [live.id]
    assert len((await store.list_assistants(tenant.id)).items) == 1
    assert await inspector.find_tenant(replayed.id) is None

    looking = PostgresInspector(replay_store)
    timeline = await looking.load_timeline(tenant.id, replayed.id)
    assert [type(turn) for turn in timeline.turns] == [TimelineTurn, TimelineTurn]
    assert len(timeline.turns[1].calls) == 1
    stored = await looking.load_stored_call(tenant.id, replayed.id, 2, 1)
    assert stored.call.end is not None
    with pytest.raises(ConversationNotFound):
        await looking.load_timeline((await key_ring.create_tenant("globex")).id, replayed.id)


async def test_a_connection_to_the_replay_schema_finds_tenants_and_replays(database: Database) -> None:
    connection = await connect(replay_database_options(database.options))
    try:
        found = {
            name: await connection.fetchval("SELECT $1::text::regclass::oid::regclass::text", name)
            for name in ("tenants", "replays", "turns")
        }
        schemas = await connection.fetch(
            "SELECT relname, relnamespace::regnamespace::text AS place FROM pg_class "
            "WHERE oid = ANY($1::text[]::regclass[])",
            list(found.values()),
        )
    finally:
        await connection.close()
    assert {row["relname"]: row["place"] for row in schemas} == {
        "tenants": "public",
        "replays": "public",
        "turns": REPLAY_SCHEMA,
    }
