"""Erasing leaves no row in any table, including tables added later."""

import decimal
import hashlib
import uuid
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import (
    ARRAY,
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    Integer,
    LargeBinary,
    Numeric,
    SmallInteger,
    Table,
    Text,
)
from sqlalchemy.dialects.postgresql import TSVECTOR
from sqlalchemy.types import DateTime, Uuid

from server.conversation.api_key import Tenant
from server.conversation.block import Blob
from server.conversation.conversation import ConversationDraft
from server.conversation.identifiers import CONVERSATION, TENANT, decode_id
from server.postgres.engine import Database
from server.postgres.schema import metadata
from server.postgres.store import PostgresStore
from tests.support.builders import accept, answer, create_assistant, epoch, user_input

MARKER = "erase-me-completely"
OWNED = [table for table in metadata.sorted_tables if "conversation_id" in table.c and table.schema is None]
FOREIGN = ("alembic_version", "pgqueuer")
"""Tables of the migrations and of the job queue, which are not Strata's own."""


async def catalogue(database: Database) -> list[str]:
    async with database.connection() as connection:
        rows = await connection.fetch("""
            SELECT CASE schemaname WHEN 'public' THEN tablename ELSE schemaname || '.' || tablename END AS name
            FROM pg_tables WHERE schemaname NOT IN ('pg_catalog', 'information_schema') ORDER BY 1
        """)
    return [row["name"] for row in rows]


async def rows_that_mention(database: Database, *needles: str) -> dict[str, int]:
    """The number of rows of each table that contain any of the texts, in any column, bytes included."""
    found = {}
    async with database.connection() as connection:
        for name in await catalogue(database):
            patterns = [f"%{form}%" for needle in needles for form in (needle, needle.encode().hex())]
            count = await connection.fetchval(
                f"SELECT count(*) FROM {name} AS row WHERE row::text LIKE ANY($1::text[])",  # noqa: S608
                patterns,
            )
            if count:
                found[name] = count
    return found


_SAMPLES: list[tuple[type[Any] | tuple[type[Any], ...], Any]] = [
    (JSON, f'{{"note": "{MARKER}"}}'),
    (ARRAY, [MARKER]),
    (Text, MARKER),
    (TSVECTOR, f"'{MARKER}'"),
    (LargeBinary, MARKER.encode()),
    ((BigInteger, Integer, SmallInteger), 7),
    (Numeric, decimal.Decimal(1)),
    (Boolean, True),
    (Double, 0.5),
    (DateTime, datetime(2026, 1, 1, tzinfo=UTC)),
]


def sample(column: Column[Any], conversation_id: uuid.UUID, tenant_id: uuid.UUID) -> Any:
    """A value for a column, by its type: good enough for a row that is never read."""
    fixed = {"conversation_id": conversation_id, "tenant_id": tenant_id}
    if column.name in fixed:
        return fixed[column.name]
    for kind, value in _SAMPLES:
        if isinstance(column.type, kind):
            return value
    if isinstance(column.type, Uuid):
        return uuid.uuid4()
    raise NotImplementedError(column)


async def insert_sample(database: Database, table: Table, conversation_id: uuid.UUID, tenant_id: uuid.UUID) -> None:
    """A row in the table, and before it in those that it refers to."""
    values = {column.name: sample(column, conversation_id, tenant_id) for column in table.c}
    if table.name == "turns":
        values |= {"kind": "user_task", "state": "complete"}
    async with database.connection() as connection:
        for key in table.foreign_keys:
            if key.column.table.name != "tenants":
                await insert_sample(database, key.column.table, conversation_id, tenant_id)
                found = await connection.fetchval(f'SELECT "{key.column.name}" FROM "{key.column.table.name}" LIMIT 1')  # noqa: S608
                values[key.parent.name] = found
        names = ", ".join(f'"{name}"' for name in values)
        places = ", ".join(f"${place}" for place in range(1, len(values) + 1))
        await connection.execute(f'INSERT INTO "{table.name}" ({names}) VALUES ({places})', *values.values())  # noqa: S608


async def test_every_table_in_the_database_is_known_to_the_code(database: Database) -> None:
    known = {table.fullname for table in metadata.sorted_tables}
    unknown = [name for name in await catalogue(database) if name not in known and not name.startswith(FOREIGN)]
    assert unknown == []


@pytest.mark.parametrize("table", OWNED, ids=lambda table: table.name)
def test_a_table_of_a_conversation_is_found_by_its_conversation(table: Table) -> None:
    assert next(iter(table.primary_key.columns)).name == "conversation_id"


async def test_erasing_leaves_no_row_in_any_table(store: PostgresStore, database: Database, tenant: Tenant) -> None:
    assistant = await create_assistant(store, tenant.id)
    draft = ConversationDraft(assistant_id=assistant.id, identifier=MARKER, metadata={"x": MARKER})
    doomed = await store.create_conversation(tenant.id, draft)
    kept = await store.create_conversation(tenant.id, ConversationDraft(assistant_id=assistant.id))
    image = Blob(sha256=hashlib.sha256(MARKER.encode()).digest(), media_type="image/png", data=MARKER.encode())
    for conversation, text in ((doomed, MARKER), (kept, "kept")):
        await store.begin_epoch(tenant.id, conversation.id, epoch(text=text))
        blobs = (image,) if conversation is doomed else ()
        accepted = await accept(store, tenant.id, user_input(conversation.id, text, blobs=blobs))
        await store.finish_turn(accepted.lease, answer(text))
    conversation_id, tenant_id = decode_id(CONVERSATION, doomed.id), decode_id(TENANT, tenant.id)
    assert conversation_id is not None
    assert tenant_id is not None
    for table in OWNED:
        await insert_sample(database, table, conversation_id, tenant_id)

    before = await rows_that_mention(database, str(conversation_id))
    assert set(before) == {"conversations", *(table.name for table in OWNED)}
    expected = await store.erase_conversation(tenant.id, doomed.id, dry_run=True)
    assert set(expected.rows) >= set(before)
    assert await rows_that_mention(database, str(conversation_id)) == before

    assert (await store.erase_conversation(tenant.id, doomed.id)).rows == expected.rows
    assert await rows_that_mention(database, str(conversation_id)) == {}
    # Replays are separate runs, created above and not part of the conversation.
    assert set(await rows_that_mention(database, MARKER)) <= {"replays"}
    assert len((await store.list_turns(tenant.id, kept.id)).items) == 2
    assert (await store.load_payload_source(tenant.id, kept.id)).static_text == "kept"
