"""The tables and columns of an archive: all of a conversation, except those listed here with the reason."""

from collections.abc import Mapping
from typing import Final

from sqlalchemy import (
    ARRAY,
    JSON,
    UUID,
    BigInteger,
    Column,
    DateTime,
    Integer,
    LargeBinary,
    Numeric,
    SmallInteger,
    Table,
    Text,
)
from sqlalchemy.dialects.postgresql import JSONB

from server.archive.file import Fields, RecordKind
from server.archive.values import Field, FieldKind
from server.conversation.identifiers import ASSISTANT, CONVERSATION
from server.postgres.tables import (
    assistants,
    blob_references,
    blobs,
    calls,
    conversations,
    epochs,
    segments,
    templates,
    turns,
)

ARCHIVED: Final[Mapping[RecordKind, Table]] = {
    RecordKind.CONVERSATION: conversations,
    RecordKind.ASSISTANT: assistants,
    RecordKind.TEMPLATE: templates,
    RecordKind.EPOCH: epochs,
    RecordKind.SEGMENT: segments,
    RecordKind.BLOB: blobs,
    RecordKind.TURN: turns,
    RecordKind.BLOB_REFERENCE: blob_references,
    RecordKind.CALL: calls,
}
NOT_ARCHIVED: Final[Mapping[str, str]] = {
    "call_chunks": "chunks of a running call: a conversation without a running turn has none",
    "waiting_turns": "requests that are waiting now",
    "provider_cache_uses": "caches at a provider, which belong to an account and expire",
    "replay_items": "batch runs, which are not part of the conversation",
    "replay_results": "batch runs, which are not part of the conversation",
    "compaction_alarms": "alarms of this installation",
    "conversation_facts": "derived from the turns",
    "turn_texts": "derived from the turns",
}
"""Tables of a conversation that are not archived, and why."""

_EXCLUDED: Final = frozenset(
    {
        # The import decides to which tenant the conversation belongs.
        "tenant_id",
        # In the record of the conversation only.
        "conversation_id",
        # A conversation without a running turn has none.
        "lease_token",
        "lease_owner",
        "lease_expires_at",
        "lease_turn_seq",
        "cancel_requested_at",
        "listened_until",
    }
)
_PREFIXES: Final[Mapping[tuple[str, str], str]] = {
    ("conversations", "id"): CONVERSATION,
    ("conversations", "forked_from_id"): CONVERSATION,
    ("conversations", "assistant_id"): ASSISTANT,
    ("assistants", "id"): ASSISTANT,
}
# The first match is used: JSONB is a subclass of JSON, and SmallInteger and BigInteger are subclasses of Integer.
_KINDS: Final = (
    (JSONB, FieldKind.JSONB, 0),
    (JSON, FieldKind.JSON, 0),
    (ARRAY, FieldKind.TEXTS, 0),
    (Text, FieldKind.TEXT, 0),
    (LargeBinary, FieldKind.BYTES, 0),
    (UUID, FieldKind.UUID, 0),
    (DateTime, FieldKind.INSTANT, 0),
    (SmallInteger, FieldKind.INTEGER, 16),
    (BigInteger, FieldKind.INTEGER, 64),
    (Integer, FieldKind.INTEGER, 32),
    (Numeric, FieldKind.MONEY, 0),
)


def _field(column: Column[object]) -> Field:
    kind, bits = next((kind, bits) for of, kind, bits in _KINDS if isinstance(column.type, of))
    nullable = bool(column.nullable)
    return Field(
        name=column.name,
        kind=kind,
        nullable=nullable,
        # A column added by a later release is nullable, because the previous release still writes the table.
        optional=nullable and column.name not in {"raw_response", "raw_length"},
        bits=bits,
        prefix=_PREFIXES.get((column.table.name, column.name)),
    )


FIELDS: Final[Fields] = {
    kind: tuple(_field(column) for column in table.c if column.name not in _EXCLUDED)
    for kind, table in ARCHIVED.items()
}
