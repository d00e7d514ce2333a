"""Erasing a conversation: every row, in every table, in one transaction.

The tables are not listed here: every table with a `conversation_id` belongs to a conversation, so a new one is covered
the moment it exists. Blobs and provider caches are shared; they go with their last user. A cache is at the provider
too: its row stays, marked, until it is removed there, and holds nothing of what was said.
"""

from functools import reduce
from operator import add
from typing import Any, Final

from sqlalchemy import ColumnElement, Table, and_, bindparam, delete, func, not_, select, update

from server.errors import ConversationBusy, ConversationNotFound
from server.identifiers import CONVERSATION, TENANT, decode_id
from server.postgres.connecting import Connection
from server.postgres.engine import Database, Statement
from server.postgres.schema import metadata
from server.postgres.tables import blob_references, blobs, conversations, provider_cache_uses, provider_caches
from server.store import ErasureReport

_CONVERSATION: Final = bindparam("conversation", type_=conversations.c.id.type)
_TENANT: Final = bindparam("tenant", type_=conversations.c.tenant_id.type)

_THIS: Final = and_(conversations.c.id == _CONVERSATION, conversations.c.tenant_id == _TENANT)
_SHOWN_BLOBS: Final = and_(
    blobs.c.tenant_id == _TENANT,
    blobs.c.sha256.in_(select(blob_references.c.sha256).where(blob_references.c.conversation_id == _CONVERSATION)),
)
_UNSHARED_BLOBS: Final = and_(
    _SHOWN_BLOBS,
    not_(
        select(blob_references.c.seq)
        .where(
            blob_references.c.tenant_id == blobs.c.tenant_id,
            blob_references.c.sha256 == blobs.c.sha256,
            blob_references.c.conversation_id != _CONVERSATION,
        )
        .exists()
    ),
)
_USED_CACHES: Final = provider_caches.c.id.in_(
    select(provider_cache_uses.c.cache_id).where(provider_cache_uses.c.conversation_id == _CONVERSATION)
)
_UNSHARED_CACHES: Final = and_(
    _USED_CACHES,
    not_(
        select(provider_cache_uses.c.cache_id)
        .where(
            provider_cache_uses.c.cache_id == provider_caches.c.id,
            provider_cache_uses.c.conversation_id != _CONVERSATION,
        )
        .exists()
    ),
)


def _stored_bytes(table: Table) -> ColumnElement[int]:
    """Column by column: of a value that is stored out of line that reads its size, and not the value."""
    sizes = [func.coalesce(func.pg_column_size(column), 0) for column in table.c]
    return func.coalesce(func.sum(reduce(add, sizes)), 0)


# The shared ones first: what they were shared with is found through the conversation's own rows.
_DOOMED: Final = [
    (blobs, _UNSHARED_BLOBS),
    (provider_caches, _UNSHARED_CACHES),
    *(
        (table, table.c.conversation_id == _CONVERSATION)
        for table in metadata.sorted_tables
        if "conversation_id" in table.c
    ),
    (conversations, _THIS),
]

_LOCK: Final = Statement(select(conversations.c.lease_turn_seq).where(_THIS).with_for_update())
# Whoever is about to use a shared row holds it: wait for them first, then look who uses it.
_LOCK_SHARED: Final = [
    Statement(select(blobs.c.sha256).where(_SHOWN_BLOBS).order_by(blobs.c.sha256).with_for_update()),
    Statement(select(provider_caches.c.id).where(_USED_CACHES).order_by(provider_caches.c.id).with_for_update()),
]
_COUNT: Final = [
    (table.name, Statement(select(func.count(), _stored_bytes(table)).select_from(table).where(which)))
    for table, which in _DOOMED
]
_DELETE: Final = [
    (
        table.name,
        Statement(
            update(table).where(which).values(removing_at=func.to_timestamp(0))
            if table is provider_caches
            else delete(table).where(which)
        ),
    )
    for table, which in _DOOMED
]


async def erase_conversation(
    database: Database, tenant_id: str, conversation_id: str, *, dry_run: bool
) -> ErasureReport:
    """See the port."""
    key = {"conversation": decode_id(CONVERSATION, conversation_id), "tenant": decode_id(TENANT, tenant_id)}
    async with database.transaction() as connection:
        locked = await connection.fetchrow(_LOCK.sql, *_LOCK.arguments(key))
        if locked is None:
            raise ConversationNotFound
        if dry_run:
            return await _foresee(connection, key)
        if locked["lease_turn_seq"] is not None:
            raise ConversationBusy(running_seq=locked["lease_turn_seq"])
        for statement in _LOCK_SHARED:
            await connection.execute(statement.sql, *statement.arguments(key))
        counts = [(name, await _delete(connection, statement, key)) for name, statement in _DELETE]
    return ErasureReport(rows={name: count for name, count in counts if count})


async def _foresee(connection: Connection, key: dict[str, Any]) -> ErasureReport:
    found = [(name, (await connection.fetch(s.sql, *s.arguments(key)))[0]) for name, s in _COUNT]
    return ErasureReport(
        rows={name: row[0] for name, row in found if row[0]}, stored_bytes=sum(int(row[1]) for _, row in found)
    )


async def _delete(connection: Connection, statement: Statement, key: dict[str, Any]) -> int:
    """How many rows went: Postgres says `DELETE 3`, or `UPDATE 3`."""
    status = await connection.execute(statement.sql, *statement.arguments(key))
    return int(status.rpartition(" ")[2])
