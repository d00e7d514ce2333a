"""Export of conversations as archives, read from the tables page by page.

The conversation is not locked: the rows that its own row refers to at the start (turns, epochs, their segments and
blobs) are written once and never changed. So a slow reader holds no connection and no old snapshot, a page that loses
its connection is read again, and only an erasure has to be detected at the end.
"""

from collections.abc import AsyncIterator, Mapping
from typing import Any, Final
from uuid import UUID

from server.archive.file import ArchiveWriter, RecordKind
from server.conversation.errors import ConversationBusy, ConversationNotFound
from server.conversation.identifiers import CONVERSATION, TENANT, decode_id, encode_id
from server.postgres.archive.fields import ARCHIVED, FIELDS
from server.postgres.codec import decode_raw
from server.postgres.engine import Database, Statement
from server.postgres.rows import Row

_BEFORE_ALL: Final = UUID(int=0)
_CONVERSATION: Final = Statement(
    "SELECT * FROM conversations WHERE id = :conversation AND (tenant_id = :tenant OR :tenant::uuid IS NULL) IS TRUE"
)
_STILL_THERE: Final = Statement("SELECT 1 FROM conversations WHERE id = :conversation")
_LIST_SQL: Final = "FROM conversations WHERE (:tenant::uuid IS NULL OR tenant_id = :tenant)"
_COUNT: Final = Statement(f"SELECT count(*) AS found {_LIST_SQL}")
_LIST: Final = Statement(f"SELECT id {_LIST_SQL} AND id > :after ORDER BY id LIMIT :page_rows")
_LIST_ROWS: Final = 500


class _Pages:
    """The pages of one table, in the order of its keys."""

    __slots__ = ("keys", "kind", "start", "statement")

    def __init__(self, kind: RecordKind, which: str, keys: Mapping[str, tuple[str, Any]], page_rows: int) -> None:
        table = ARCHIVED[kind].name
        names = ", ".join(field.name for field in FIELDS[kind])
        order = ", ".join(keys)
        after = ", ".join(f":{_after(name)}::{type_}" for name, (type_, _) in keys.items())
        self.kind = kind
        self.keys = tuple(keys)
        self.start = {_after(name): first for name, (_, first) in keys.items()}
        self.statement = Statement(
            f"SELECT {names} FROM {table} t WHERE {which} AND ({order}) > ({after}) ORDER BY {order} LIMIT {page_rows}"  # noqa: S608  reason: names from our own tables only
        )


def _after(key: str) -> str:
    """Return the name of the parameter with the last value of a key. Names of parameters have no digits."""
    return f"after_{key.rstrip('0123456789')}"


_OWN: Final = "conversation_id = :conversation"
_PAGES: Final = (
    _Pages(
        RecordKind.ASSISTANT,
        """id = :assistant AND version IN (
            SELECT :assistant_version::int
            UNION SELECT assistant_version FROM epochs WHERE conversation_id = :conversation AND number <= :epoch::int
        )""",
        {"version": ("int", 0)},
        20,
    ),
    _Pages(
        RecordKind.TEMPLATE,
        # The templates of static texts, and those of calls without a turn.
        """hash IN (
            SELECT template_hash FROM epochs WHERE conversation_id = :conversation AND number <= :epoch::int
            UNION ALL SELECT decode(note->>'template_hash', 'hex')
            FROM calls, jsonb_array_elements(warnings) note WHERE conversation_id = :conversation AND turn_seq < 0
        )""",
        {"hash": ("bytea", b"")},
        20,
    ),
    _Pages(RecordKind.EPOCH, f"{_OWN} AND number <= :epoch::int", {"number": ("int", -1)}, 20),
    _Pages(
        RecordKind.SEGMENT,
        # Also the segments of undone compactions, but not those of a concurrent one.
        f"""{_OWN} AND EXISTS (
            SELECT FROM epochs e WHERE e.conversation_id = t.conversation_id AND e.number <= :epoch::int
                AND e.generation = t.generation AND e.segment_count > t.position
        )""",
        {"generation": ("int", -1), "position": ("int", -1)},
        20,
    ),
    _Pages(
        RecordKind.BLOB,
        """tenant_id = :owner AND sha256 IN (
            SELECT sha256 FROM blob_references WHERE conversation_id = :conversation AND seq < :next_seq::bigint
        )""",
        {"sha256": ("bytea", b"")},
        1,
    ),
    _Pages(RecordKind.TURN, f"{_OWN} AND seq < :next_seq::bigint", {"seq": ("bigint", 0)}, 50),
    _Pages(
        RecordKind.BLOB_REFERENCE,
        f"{_OWN} AND seq < :next_seq::bigint",
        {"seq": ("bigint", 0), "sha256": ("bytea", b"")},
        500,
    ),
    _Pages(
        RecordKind.CALL,
        f"{_OWN} AND turn_seq < :next_seq::bigint",
        {"turn_seq": ("bigint", -(2**63)), "attempt": ("smallint", -1)},
        8,
    ),
)
"""In the order of the file. One page is in memory at a time, so pages of large rows have few rows."""


class PostgresArchives:
    """Implements `server.inspection.actions.Archives`."""

    __slots__ = ("_database",)

    def __init__(self, database: Database) -> None:
        self._database = database

    async def export_conversation(self, tenant_id: str, conversation_id: str) -> AsyncIterator[bytes]:
        writer = ArchiveWriter(FIELDS)
        first = True
        async for line in export_records(self._database, writer, conversation_id, tenant_id=tenant_id):
            # Only after the conversation was found.
            if first:
                yield writer.header()
                first = False
            yield line
        yield writer.close()


async def export_records(
    database: Database, writer: ArchiveWriter, conversation_id: str, *, tenant_id: str | None
) -> AsyncIterator[bytes]:
    """Iterate over the lines of one conversation, without a header. `tenant_id`: None for any tenant.

    Raises `ConversationNotFound`, also if the conversation is erased meanwhile, and `ConversationBusy`.
    """
    tenant = None if tenant_id is None else decode_id(TENANT, tenant_id)
    # None means any tenant in the statement, and a malformed id must not.
    if tenant_id is not None and tenant is None:
        raise ConversationNotFound
    found = await database.run(_CONVERSATION, conversation=decode_id(CONVERSATION, conversation_id), tenant=tenant)
    if not found:
        raise ConversationNotFound
    row = found[0]
    if row["lease_turn_seq"] is not None:
        raise ConversationBusy(running_seq=row["lease_turn_seq"], hint="Wait for the turn to end, then export.")
    yield writer.record(RecordKind.CONVERSATION, dict(row))
    values = {
        "conversation": row["id"],
        "owner": row["tenant_id"],
        "assistant": row["assistant_id"],
        "assistant_version": row["assistant_version"],
        "epoch": row["epoch"],
        "next_seq": row["next_seq"],
    }
    for pages in _PAGES:
        after: Mapping[str, Any] = pages.start
        while rows := await database.run(pages.statement, **values, **after):
            for each in rows:
                yield writer.record(pages.kind, _readable(pages.kind, each))
            after = {_after(name): rows[-1][name] for name in pages.keys}
    if not await database.run(_STILL_THERE, conversation=row["id"]):
        raise ConversationNotFound("The conversation was erased while it was exported.")
    yield writer.end()


async def count_conversations(database: Database, tenant_id: str | None) -> int:
    """Count the conversations of a tenant; None counts those of all tenants."""
    count: int = (await database.run(_COUNT, tenant=_owner(tenant_id)))[0]["found"]
    return count


async def list_conversation_ids(database: Database, tenant_id: str | None) -> AsyncIterator[str]:
    """Iterate over their ids, oldest first, so that a fork comes after its source."""
    after = _BEFORE_ALL
    while rows := await database.run(_LIST, tenant=_owner(tenant_id), after=after, page_rows=_LIST_ROWS):
        for row in rows:
            yield encode_id(CONVERSATION, row["id"])
        after = rows[-1]["id"]


def _owner(tenant_id: str | None) -> UUID | None:
    return None if tenant_id is None else decode_id(TENANT, tenant_id)


def _readable(kind: RecordKind, row: Row) -> Mapping[str, Any]:
    """Return the values of a row, with the raw response decompressed."""
    values = dict(row)
    if kind is RecordKind.CALL and values["raw_response"] is not None:
        values["raw_response"] = decode_raw(values["raw_response"])
    return values
