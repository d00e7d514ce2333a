"""Erasing conversations: every row in every table, with all that replays made of them, in one transaction.

Every table with a column `conversation_id` belongs to a conversation, so a new table is covered without being listed
here. Blobs and provider caches are shared: they are deleted with the last conversation that uses them. A cache also
exists at the provider. Its row holds no content and stays, marked, until the cache is removed there.

A replay that loses an item in this way continues with the others.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any, Final
from uuid import UUID

from sqlalchemy import ARRAY, ColumnElement, Table, and_, any_, bindparam, delete, func, not_, select, update
from sqlalchemy import UUID as UUID_TYPE

from server.conversation.errors import ConversationBusy, ConversationNotFound
from server.conversation.identifiers import CONVERSATION, TENANT, decode_id
from server.conversation.store import ErasureReport
from server.postgres.connections import Connection
from server.postgres.engine import Statement, StorePart
from server.postgres.replay.conversation_tables import REPLAY_TABLES
from server.postgres.replay.statements import end_if_done, lose_calls
from server.postgres.schema import metadata

_CONVERSATIONS: Final = bindparam("conversations", type_=ARRAY(UUID_TYPE))
_TENANT: Final = bindparam("tenant", type_=UUID_TYPE)
# A turn with an expired lease does not prevent erasure: later writes of its process find no conversation.
_LOCK: Final = Statement("""
SELECT CASE WHEN lease_expires_at > now() THEN lease_turn_seq END AS lease_turn_seq
FROM conversations WHERE id = :conversation AND tenant_id = :tenant FOR UPDATE
""")
_LIST_REPLAY_CONVERSATIONS: Final = Statement("""
SELECT replay_conversation_id FROM replay_items
WHERE conversation_id = :conversation AND replay_conversation_id IS NOT NULL
""")
# Locks are taken in the same order everywhere: the replays, then their items.
_LOCK_REPLAYS: Final = Statement("""
SELECT id, state FROM replays
WHERE id IN (SELECT replay_id FROM replay_items WHERE conversation_id = :conversation)
ORDER BY id FOR NO KEY UPDATE
""")
_LOCK_ITEMS: Final = Statement("""
SELECT replay_id, number, replay_conversation_id FROM replay_items WHERE conversation_id = :conversation
ORDER BY replay_id, number FOR UPDATE
""")
_UNENDED: Final = ("running", "paused")


class ConversationRows:
    """The statements that count and delete the rows of conversations of one tenant, in the tables of one schema."""

    def __init__(self, tables: Mapping[str, Table], *, owns_assistants: bool = False) -> None:
        """`tables`: by their names without a schema. `owns_assistants`: no two conversations share an assistant."""
        self._tables = tables
        conversations = tables["conversations"]
        doomed: list[tuple[Table, ColumnElement[bool]]] = [
            # The shared rows first: they are found through the conversations' own rows.
            (tables["blobs"], self._unshared_blobs()),
            (tables["provider_caches"], self._unshared_caches()),
            *((table, _among(table.c.conversation_id)) for table in tables.values() if "conversation_id" in table.c),
        ]
        if owns_assistants:
            assistants = tables["assistants"]
            owned = select(conversations.c.assistant_id).where(_among(conversations.c.id))
            doomed.append((assistants, and_(assistants.c.tenant_id == _TENANT, assistants.c.id.in_(owned))))
        doomed.append((conversations, and_(_among(conversations.c.id), conversations.c.tenant_id == _TENANT)))
        self._counts = [
            (table.fullname, Statement(select(func.count(), _stored_bytes(table)).select_from(table).where(which)))
            for table, which in doomed
        ]
        self._deletions = [(table.fullname, Statement(self._deletion_of(table, which))) for table, which in doomed]
        self._locks = [
            Statement(select(conversations.c.id).where(_among(conversations.c.id)).with_for_update()),
            # A transaction that is about to use a shared row has locked it: wait for its end before checking the uses.
            Statement(self._lock_of(tables["blobs"], self._referenced_blobs(), "sha256")),
            Statement(self._lock_of(tables["provider_caches"], self._used_caches(), "id")),
        ]

    async def count(
        self, connection: Connection, tenant: UUID | None, conversations: Sequence[UUID]
    ) -> tuple[dict[str, int], int]:
        """Count the rows by table, and the bytes that they take."""
        key = {"conversations": list(conversations), "tenant": tenant}
        found = {name: (await statement.fetch(connection, **key))[0] for name, statement in self._counts}
        return {name: row[0] for name, row in found.items()}, sum(int(row[1]) for row in found.values())

    async def delete(
        self, connection: Connection, tenant: UUID | None, conversations: Sequence[UUID]
    ) -> dict[str, int]:
        """Delete the rows within a transaction, after concurrent writers, and return their numbers by table."""
        key = {"conversations": list(conversations), "tenant": tenant}
        for statement in self._locks:
            await statement.fetch(connection, **key)
        counts = {}
        for name, statement in self._deletions:
            # Such as `DELETE 3` or `UPDATE 3`.
            status = await connection.execute(statement.sql, *statement.arguments(key))
            counts[name] = int(status.rpartition(" ")[2])
        return counts

    def _deletion_of(self, table: Table, which: ColumnElement[bool]) -> Any:
        if table is self._tables["provider_caches"]:
            return update(table).where(which).values(removing_at=func.to_timestamp(0))
        return delete(table).where(which)

    @staticmethod
    def _lock_of(table: Table, which: ColumnElement[bool], order: str) -> Any:
        return select(table.c[order]).where(which).order_by(table.c[order]).with_for_update()

    def _referenced_blobs(self) -> ColumnElement[bool]:
        blobs, references = self._tables["blobs"], self._tables["blob_references"]
        referenced = select(references.c.sha256).where(_among(references.c.conversation_id))
        return and_(blobs.c.tenant_id == _TENANT, blobs.c.sha256.in_(referenced))

    def _unshared_blobs(self) -> ColumnElement[bool]:
        blobs, references = self._tables["blobs"], self._tables["blob_references"]
        elsewhere = select(references.c.seq).where(
            references.c.tenant_id == blobs.c.tenant_id,
            references.c.sha256 == blobs.c.sha256,
            not_(_among(references.c.conversation_id)),
        )
        return and_(self._referenced_blobs(), not_(elsewhere.exists()))

    def _used_caches(self) -> ColumnElement[bool]:
        caches, uses = self._tables["provider_caches"], self._tables["provider_cache_uses"]
        return caches.c.id.in_(select(uses.c.cache_id).where(_among(uses.c.conversation_id)))

    def _unshared_caches(self) -> ColumnElement[bool]:
        caches, uses = self._tables["provider_caches"], self._tables["provider_cache_uses"]
        elsewhere = select(uses.c.cache_id).where(uses.c.cache_id == caches.c.id, not_(_among(uses.c.conversation_id)))
        return and_(self._used_caches(), not_(elsewhere.exists()))


def _among(column: ColumnElement[Any]) -> ColumnElement[bool]:
    return column == any_(_CONVERSATIONS)


def _stored_bytes(table: Table) -> ColumnElement[int]:
    """Column by column: this reads the size of a value that is stored out of line, but not the value."""
    sizes = [func.coalesce(func.pg_column_size(column), 0) for column in table.c]
    return func.coalesce(func.sum(reduce(add, sizes)), 0)


LIVE_ROWS: Final = ConversationRows({table.name: table for table in metadata.sorted_tables if table.schema is None})
REPLAY_ROWS: Final = ConversationRows(REPLAY_TABLES, owns_assistants=True)
"""Of the conversations that replays write; each has an assistant of its own."""


class ErasureStore(StorePart):
    """Erases conversations."""

    async def erase_conversation(self, tenant_id: str, conversation_id: str, *, dry_run: bool = False) -> ErasureReport:
        conversation, tenant = decode_id(CONVERSATION, conversation_id), decode_id(TENANT, tenant_id)
        async with self._database.transaction() as connection:
            locked = await _LOCK.fetch(connection, conversation=conversation, tenant=tenant)
            if not locked or conversation is None:
                raise ConversationNotFound
            if dry_run:
                return await _count(connection, tenant, conversation)
            running_seq = locked[0]["lease_turn_seq"]
            if running_seq is not None:
                raise ConversationBusy(running_seq=running_seq)
            rows = await _delete(connection, tenant, conversation)
        return ErasureReport(rows={name: count for name, count in rows.items() if count})


async def _count(connection: Connection, tenant: UUID | None, conversation: UUID) -> ErasureReport:
    items = await _LIST_REPLAY_CONVERSATIONS.fetch(connection, conversation=conversation)
    live, live_bytes = await LIVE_ROWS.count(connection, tenant, [conversation])
    in_replays, replay_bytes = await REPLAY_ROWS.count(
        connection, tenant, [item["replay_conversation_id"] for item in items]
    )
    rows = {name: count for name, count in (live | in_replays).items() if count}
    return ErasureReport(rows=rows, stored_bytes=live_bytes + replay_bytes)


async def _delete(connection: Connection, tenant: UUID | None, conversation: UUID) -> Mapping[str, int]:
    replays = await _LOCK_REPLAYS.fetch(connection, conversation=conversation)
    items = await _LOCK_ITEMS.fetch(connection, conversation=conversation)
    for replay in replays:
        await lose_calls(
            connection, replay["id"], [item["number"] for item in items if item["replay_id"] == replay["id"]]
        )
    rows = await LIVE_ROWS.delete(connection, tenant, [conversation])
    written = [item["replay_conversation_id"] for item in items if item["replay_conversation_id"] is not None]
    rows |= await REPLAY_ROWS.delete(connection, tenant, written)
    for replay in replays:
        if replay["state"] in _UNENDED:
            await end_if_done(connection, replay["id"])
    return rows
