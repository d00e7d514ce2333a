"""The conversations that a command compacts, of one tenant or of all."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from server.conversation.errors import AssistantNotFound, ConversationNotFound
from server.conversation.identifiers import ASSISTANT, CONVERSATION, TENANT, decode_id, encode_id
from server.postgres.engine import Database, Statement

_PAGE_ROWS: Final = 500
_BEFORE_ALL: Final = UUID(int=0)
# Only conversations with a payload and more than one exchange in the buffer have turns that can be compacted.
_CANDIDATES_SQL: Final = """
FROM conversations
WHERE epoch > 0 AND next_seq - buffer_start_seq > 2
    AND (:tenant::uuid IS NULL OR tenant_id = :tenant)
    AND (:assistant::uuid IS NULL OR assistant_id = :assistant)
    AND (:idle_since::timestamptz IS NULL OR updated_at < :idle_since)
"""
_COUNT: Final = Statement(f"SELECT count(*) AS found {_CANDIDATES_SQL}")
_PAGE: Final = Statement(f"SELECT id, tenant_id {_CANDIDATES_SQL} AND id > :after ORDER BY id LIMIT :page_rows")
_OWNER: Final = Statement("SELECT tenant_id FROM conversations WHERE id = :conversation")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionFilter:
    """Selects conversations. None does not restrict."""

    tenant_id: str | None = None
    assistant_id: str | None = None
    idle_since: datetime | None = None
    """Only conversations that were not changed since then."""


async def count_candidates(database: Database, wanted: CompactionFilter) -> int:
    """Count the selected conversations. Raises `AssistantNotFound` for a malformed id."""
    rows = await database.run(_COUNT, **_values(wanted))
    count: int = rows[0]["found"]
    return count


async def list_candidates(database: Database, wanted: CompactionFilter) -> AsyncIterator[tuple[str, str]]:
    """Iterate over the ids of tenants and conversations, oldest first. May include conversations created meanwhile."""
    after = _BEFORE_ALL
    while rows := await database.run(_PAGE, **_values(wanted), after=after, page_rows=_PAGE_ROWS):
        for row in rows:
            yield encode_id(TENANT, row["tenant_id"]), encode_id(CONVERSATION, row["id"])
        after = rows[-1]["id"]


async def find_owner(database: Database, conversation_id: str) -> str:
    """Return the tenant of a conversation. Raises `ConversationNotFound`."""
    rows = await database.run(_OWNER, conversation=decode_id(CONVERSATION, conversation_id))
    if not rows:
        raise ConversationNotFound
    return encode_id(TENANT, rows[0]["tenant_id"])


def _values(wanted: CompactionFilter) -> dict[str, Any]:
    assistant = None if wanted.assistant_id is None else decode_id(ASSISTANT, wanted.assistant_id)
    if wanted.assistant_id is not None and assistant is None:
        raise AssistantNotFound
    return {
        "tenant": None if wanted.tenant_id is None else decode_id(TENANT, wanted.tenant_id),
        "assistant": assistant,
        "idle_since": wanted.idle_since,
    }
