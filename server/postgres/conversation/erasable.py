"""Everything that conversations own, in every table of one schema.

The tables are not listed here: every table with a `conversation_id` belongs to a conversation, so a new one is covered
the moment it exists. Blobs and provider caches are shared; they go with their last user. A cache is at the provider
too: its row stays, marked, until it is removed there, and holds nothing of what was said.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any, Final
from uuid import UUID

from sqlalchemy import ARRAY, ColumnElement, Table, and_, any_, bindparam, delete, func, not_, select, update
from sqlalchemy import UUID as UUID_TYPE

from server.postgres.connections import Connection
from server.postgres.engine import Statement
from server.postgres.replay.conversation_tables import REPLAY_TABLES
from server.postgres.schema import metadata

_CONVERSATIONS: Final = bindparam("conversations", type_=ARRAY(UUID_TYPE))
_TENANT: Final = bindparam("tenant", type_=UUID_TYPE)


def _among(column: ColumnElement[Any]) -> ColumnElement[bool]:
    return column == any_(_CONVERSATIONS)


def _stored_bytes(table: Table) -> ColumnElement[int]:
    """Column by column: of a value that is stored out of line that reads its size, and not the value."""
    sizes = [func.coalesce(func.pg_column_size(column), 0) for column in table.c]
    return func.coalesce(func.sum(reduce(add, sizes)), 0)


class Erasable:
    """The statements that count and delete what some conversations of one tenant own."""

    def __init__(self, tables: Mapping[str, Table], *, owns_assistants: bool = False) -> None:
        """`tables` by their names without a schema. `owns_assistants`: each conversation has its assistant alone."""
        self._tables = tables
        conversations = tables["conversations"]
        doomed: list[tuple[Table, ColumnElement[bool]]] = [
            # The shared ones first: what they were shared with is found through the conversations' own rows.
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
            # Whoever is about to use a shared row holds it: wait for them first, then look who uses it.
            Statement(self._lock_of(tables["blobs"], self._shown_blobs(), "sha256")),
            Statement(self._lock_of(tables["provider_caches"], self._used_caches(), "id")),
        ]

    async def count(
        self, connection: Connection, tenant: UUID | None, conversations: Sequence[UUID]
    ) -> tuple[dict[str, int], int]:
        """What there is, by table, and how many bytes it takes."""
        key = {"conversations": list(conversations), "tenant": tenant}
        found = {name: (await connection.fetch(s.sql, *s.arguments(key)))[0] for name, s in self._counts}
        return {name: row[0] for name, row in found.items()}, sum(int(row[1]) for row in found.values())

    async def delete(
        self, connection: Connection, tenant: UUID | None, conversations: Sequence[UUID]
    ) -> dict[str, int]:
        """Within a transaction: everything, after whoever writes it just now. How much it was, by table."""
        key = {"conversations": list(conversations), "tenant": tenant}
        for statement in self._locks:
            await connection.execute(statement.sql, *statement.arguments(key))
        return {name: await _change(connection, statement, key) for name, statement in self._deletions}

    def _deletion_of(self, table: Table, which: ColumnElement[bool]) -> Any:
        if table is self._tables["provider_caches"]:
            return update(table).where(which).values(removing_at=func.to_timestamp(0))
        return delete(table).where(which)

    @staticmethod
    def _lock_of(table: Table, which: ColumnElement[bool], order: str) -> Any:
        return select(table.c[order]).where(which).order_by(table.c[order]).with_for_update()

    def _shown_blobs(self) -> ColumnElement[bool]:
        blobs, references = self._tables["blobs"], self._tables["blob_references"]
        shown = select(references.c.sha256).where(_among(references.c.conversation_id))
        return and_(blobs.c.tenant_id == _TENANT, blobs.c.sha256.in_(shown))

    def _unshared_blobs(self) -> ColumnElement[bool]:
        blobs, references = self._tables["blobs"], self._tables["blob_references"]
        elsewhere = select(references.c.seq).where(
            references.c.tenant_id == blobs.c.tenant_id,
            references.c.sha256 == blobs.c.sha256,
            not_(_among(references.c.conversation_id)),
        )
        return and_(self._shown_blobs(), not_(elsewhere.exists()))

    def _used_caches(self) -> ColumnElement[bool]:
        caches, uses = self._tables["provider_caches"], self._tables["provider_cache_uses"]
        return caches.c.id.in_(select(uses.c.cache_id).where(_among(uses.c.conversation_id)))

    def _unshared_caches(self) -> ColumnElement[bool]:
        caches, uses = self._tables["provider_caches"], self._tables["provider_cache_uses"]
        elsewhere = select(uses.c.cache_id).where(uses.c.cache_id == caches.c.id, not_(_among(uses.c.conversation_id)))
        return and_(self._used_caches(), not_(elsewhere.exists()))


async def _change(connection: Connection, statement: Statement, key: dict[str, Any]) -> int:
    """How many rows went: Postgres says `DELETE 3`, or `UPDATE 3`."""
    status = await connection.execute(statement.sql, *statement.arguments(key))
    return int(status.rpartition(" ")[2])


LIVE: Final = Erasable({table.name: table for table in metadata.sorted_tables if table.schema is None})
REPLAY_ERASABLE: Final = Erasable(REPLAY_TABLES, owns_assistants=True)
"""Of the conversations that replays write; each has an assistant of its own."""
