"""Import of archives: each conversation is written in one transaction, together with its audit entry.

A conversation is imported completely or not at all, also if the file is damaged, the database fails or the process
dies. Rows are written in batches, so a long conversation does not need more memory. After its import a conversation is
indexed: its rows have old dates, and the background indexer would find them only in its daily run.
"""

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

from asyncpg import exceptions as pg

from server.archive.file import ImportedConversation, Record, RecordKind, read_archive
from server.archive.values import FieldKind
from server.conversation.audit import OPERATOR, Action, AuditDraft
from server.conversation.errors import ArchiveInvalid, AssistantExists, ConversationExists
from server.conversation.identifiers import CONVERSATION, TENANT, decode_id, encode_id, new_uuid
from server.postgres.archive.fields import ARCHIVED, FIELDS
from server.postgres.codec import encode_raw
from server.postgres.connections import Connection
from server.postgres.engine import Database
from server.postgres.inspection.audit_log import append_on
from server.postgres.inspection.search_index import index_conversation
from server.providers.model_name import find_name_fault

_BATCH_ROWS: Final = 500
_BATCH_BYTES: Final = 8 * 1024 * 1024
_NEW_ASSISTANT: Final = "ON CONFLICT (id, version) DO NOTHING"
_SHARED: Final[Mapping[RecordKind, str]] = {
    RecordKind.ASSISTANT: _NEW_ASSISTANT,
    RecordKind.TEMPLATE: "ON CONFLICT (hash) DO NOTHING",
    # Not DO NOTHING: an existing blob is locked, so that a concurrent erasure does not delete it.
    RecordKind.BLOB: "ON CONFLICT (tenant_id, sha256) DO UPDATE SET media_type = blobs.media_type",
}
"""The tables whose rows may exist already, with the conflict clause of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """Options of an import."""

    tenant_id: str
    new_ids: bool = False
    """Conversations and assistants get new ids, and references to them are changed accordingly."""
    dry_run: bool = False
    """Write everything, and then roll back."""


class _DryRunEnded(Exception):
    """Rolls back the transaction of a dry run."""


@dataclass(slots=True, kw_only=True)
class _Batch:
    """Rows of one table that are not written yet."""

    connection: Connection
    kind: RecordKind | None = None
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    names: tuple[str, ...] = ()
    size_bytes: int = 0

    async def add(self, kind: RecordKind, values: Mapping[str, Any]) -> None:
        names = tuple(values)
        if kind is not self.kind or names != self.names:
            await self.flush()
            self.kind, self.names = kind, names
        self.rows.append(tuple(values.values()))
        self.size_bytes += sum(len(value) for value in values.values() if isinstance(value, str | bytes))
        if len(self.rows) >= _BATCH_ROWS or self.size_bytes >= _BATCH_BYTES:
            await self.flush()

    async def flush(self) -> None:
        if self.kind is not None and self.rows:
            await self.connection.copy_records_to_table(
                ARCHIVED[self.kind].name, records=self.rows, columns=list(self.names)
            )
        self.rows, self.size_bytes = [], 0


class Importer:
    """Imports files for one tenant. New ids are the same in all files that it imports."""

    def __init__(self, database: Database, options: ImportOptions) -> None:
        self._database = database
        self._options = options
        self._tenant: Final[UUID | None] = decode_id(TENANT, options.tenant_id)
        self._new_conversations: dict[UUID, UUID] = {}
        self._new_assistants: dict[UUID, UUID] = {}

    async def check(self, lines: Iterable[bytes]) -> list[str]:
        """Read a whole file and write nothing. Returns the ids of its conversations in the file.

        Raises `ArchiveInvalid`, and `ConversationExists` for the first conversation that exists already.
        """
        # A dict as an ordered set.
        found: dict[str, None] = {}
        for record in read_archive(lines, FIELDS):
            if record.kind is RecordKind.ASSISTANT:
                _check_assistant(record)
            if record.kind is not RecordKind.CONVERSATION:
                continue
            conversation_id = encode_id(CONVERSATION, record.values["id"])
            if conversation_id in found:
                raise _invalid(record, "the conversation is in the file twice")
            if not self._options.new_ids:
                await self._require_absent(record.values["id"])
            found[conversation_id] = None
        return list(found)

    async def import_archive(self, lines: Iterable[bytes]) -> AsyncIterator[ImportedConversation]:
        """Import the conversations of a checked file, and yield each after its transaction.

        If a conversation cannot be written, none of its rows are; those before it are kept. Raises as
        `import_conversation` does.
        """
        records = read_archive(lines, FIELDS)
        while (imported := await self.import_conversation(records)) is not None:
            yield imported

    async def import_conversation(self, records: Iterator[Record]) -> ImportedConversation | None:
        """Import the next conversation from the records of `read_archive`; None at their end.

        Raises `ConversationExists`, `AssistantExists`, and `ArchiveInvalid` for errors of the file and for rows that
        violate constraints of the tables. The transaction is rolled back then.
        """
        first = next(records, None)
        if first is None:
            return None
        try:
            async with self._database.transaction() as connection:
                # A file may arrive slowly, as over a pipe, and the locks of new rows rarely block others.
                await connection.execute("SET LOCAL idle_in_transaction_session_timeout = '1min'")
                made = await self._write(connection, first, records)
                await self._append_audit(connection, made)
                if self._options.dry_run:
                    raise _DryRunEnded  # noqa: TRY301  reason: rolls back the transaction of the block
        except _DryRunEnded:
            return made
        except pg.UniqueViolationError as error:
            if error.table_name == "conversations":
                raise _exists(first.values["id"]) from error
            raise ArchiveInvalid(f"Rows of {error.table_name} are in the file twice.") from error
        except (pg.IntegrityConstraintViolationError, pg.DataError) as error:
            raise ArchiveInvalid(f"A row violates a constraint of its table: {error.args[0]}.") from error
        await index_conversation(self._database, self._conversation_id(first.values["id"]))
        return made

    async def _append_audit(self, connection: Connection, made: ImportedConversation) -> None:
        draft = AuditDraft(
            tenant_id=self._options.tenant_id,
            actor=OPERATOR,
            action=Action.IMPORT,
            object_id=made.conversation_id,
            details={"source": made.source_id, "turns": made.turn_count},
        )
        await append_on(connection, draft)

    async def _write(self, connection: Connection, first: Record, records: Iterator[Record]) -> ImportedConversation:
        source: UUID = first.values["id"]
        conversation = self._conversation_id(source)
        batch = _Batch(connection=connection)
        await batch.add(RecordKind.CONVERSATION, self._conversation_row(first.values, conversation))
        turn_count = 0
        for record in records:
            if record.kind is RecordKind.END:
                break
            turn_count += record.kind is RecordKind.TURN
            if record.kind in _SHARED:
                await self._share(connection, record)
            else:
                await batch.add(record.kind, self._own_row(record, conversation))
        await batch.flush()
        return ImportedConversation(
            source_id=encode_id(CONVERSATION, source),
            conversation_id=encode_id(CONVERSATION, conversation),
            turn_count=turn_count,
        )

    def _conversation_id(self, source: UUID) -> UUID:
        if not self._options.new_ids:
            return source
        return self._new_conversations.setdefault(source, new_uuid())

    def _assistant_id(self, source: UUID) -> UUID:
        return self._new_assistants.setdefault(source, new_uuid()) if self._options.new_ids else source

    def _conversation_row(self, values: Mapping[str, Any], conversation: UUID) -> dict[str, Any]:
        origin = values.get("forked_from_id")
        return {
            **values,
            "id": conversation,
            "tenant_id": self._tenant,
            "assistant_id": self._assistant_id(values["assistant_id"]),
            # A source that is not in the file keeps its id, as if it had been erased.
            "forked_from_id": self._new_conversations.get(origin, origin) if origin is not None else None,
        }

    def _own_row(self, record: Record, conversation: UUID) -> dict[str, Any]:
        row = {"conversation_id": conversation, **record.values}
        if record.kind is RecordKind.BLOB_REFERENCE:
            row["tenant_id"] = self._tenant
        if record.kind is RecordKind.CALL and row["raw_response"] is not None:
            row["raw_response"] = encode_raw(row["raw_response"])
        return row

    async def _share(self, connection: Connection, record: Record) -> None:
        """Write a row of a table that conversations share, if it does not exist yet."""
        row = dict(record.values)
        if record.kind is RecordKind.ASSISTANT:
            _check_assistant(record)
            row["id"] = self._assistant_id(row["id"])
        if record.kind is not RecordKind.TEMPLATE:
            row["tenant_id"] = self._tenant
        table = ARCHIVED[record.kind].name
        placeholders = ", ".join(f"${number}" for number in range(1, len(row) + 1))
        await connection.execute(
            f"INSERT INTO {table} ({', '.join(row)}) VALUES ({placeholders}) {_SHARED[record.kind]}",  # noqa: S608  reason: names from our own tables only
            *row.values(),
        )
        if record.kind is RecordKind.ASSISTANT:
            await self._require_same_assistant(connection, row)

    async def _require_same_assistant(self, connection: Connection, row: Mapping[str, Any]) -> None:
        """Raise `AssistantExists` unless the stored version equals that of the file, apart from its creation time."""
        documents = {each.name for each in FIELDS[RecordKind.ASSISTANT] if each.kind is FieldKind.JSON}
        names = [name for name in row if name != "created_at"]
        alike = " AND ".join(
            f"{name}{'::text' if name in documents else ''} = ${number}" for number, name in enumerate(names, start=1)
        )
        same = await connection.fetchval(
            f"SELECT EXISTS (SELECT FROM assistants WHERE {alike})",  # noqa: S608  reason: names from our own table only
            *(row[name] for name in names),
        )
        if not same:
            raise AssistantExists

    async def _require_absent(self, conversation: UUID) -> None:
        async with self._database.connection() as connection:
            if await connection.fetchval("SELECT EXISTS (SELECT FROM conversations WHERE id = $1)", conversation):
                raise _exists(conversation)


def _check_assistant(record: Record) -> None:
    """Raise `ArchiveInvalid` for an invalid model name, which would become part of a URL."""
    if find_name_fault(record.values["provider"], record.values["model"]):
        raise _invalid(record, "the model of the assistant is not a valid name")


def _exists(conversation: UUID) -> ConversationExists:
    name = encode_id(CONVERSATION, conversation)
    return ConversationExists(f"The conversation {name} already exists.", conversation_id=name)


def _invalid(record: Record, message: str) -> ArchiveInvalid:
    return ArchiveInvalid(f"Line {record.line_number}: {message}.", line=record.line_number)
