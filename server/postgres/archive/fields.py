"""Which tables and columns an archive has: all of a conversation's, but for what is said here with its reason."""

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
    "call_chunks": "of a running call: a conversation at rest has none",
    "waiting_turns": "of who waits now",
    "provider_cache_uses": "of caches at a provider, which are an account's and expire",
    "replay_items": "of batch runs, which are no part of the conversation",
    "replay_results": "of batch runs too",
    "compaction_alarms": "of what operators were warned of here",
    "conversation_facts": "counted again from the turns",
    "turn_texts": "read again from the turns",
}
"""Tables of a conversation that stay behind, and why."""

_LEFT_OUT: Final = frozenset(
    {
        # Whoever imports says whose it becomes.
        "tenant_id",
        # Said once, by the conversation's own record.
        "conversation_id",
        # A conversation at rest has none.
        "lease_token",
        "lease_owner",
        "lease_expires_at",
        "lease_turn_seq",
        "cancel_requested_at",
    }
)
_PREFIXES: Final[Mapping[tuple[str, str], str]] = {
    ("conversations", "id"): CONVERSATION,
    ("conversations", "forked_from_id"): CONVERSATION,
    ("conversations", "assistant_id"): ASSISTANT,
    ("assistants", "id"): ASSISTANT,
}
# The first that fits counts: JSONB is a kind of JSON, and the small integers are kinds of Integer.
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
        # A release may add columns, and then they can be left empty: the previous one still writes the table.
        optional=nullable and column.name not in {"raw_response", "raw_length"},
        bits=bits,
        prefix=_PREFIXES.get((column.table.name, column.name)),
    )


FIELDS: Final[Fields] = {
    kind: tuple(_field(column) for column in table.c if column.name not in _LEFT_OUT)
    for kind, table in ARCHIVED.items()
}
