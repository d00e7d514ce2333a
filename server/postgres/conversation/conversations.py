"""Conversations: created, read, listed and edited."""

from typing import Any, Final

from sqlalchemy import Integer, bindparam, literal_column, select

from server.conversation.conversation import Conversation, ConversationDraft
from server.conversation.errors import AssistantNotFound, ConversationNotFound, RevisionMismatch
from server.conversation.identifiers import ASSISTANT, CONVERSATION, TENANT, decode_id, new_uuid
from server.conversation.page import Page
from server.conversation.store import ConversationChange, ConversationFilter
from server.postgres.codec import encode_json
from server.postgres.connections import Connection
from server.postgres.engine import Statement, StorePart
from server.postgres.paging import before_id, bounded, ids_within, page_of
from server.postgres.rows import conversation_from
from server.postgres.tables import conversations

_c = conversations.c


def _pending_sql(conversation: str, conversation_id: str) -> str:
    """Return SQL for the blocks of the tool calls that wait for results: those of the newest turn."""
    return f"""(
    SELECT jsonb_path_query_array(t.blocks, '$[*] ? (@.type == "tool_call")') FROM turns t
    WHERE t.conversation_id = {conversation_id} AND t.seq = {conversation}.next_seq - 1
        AND {conversation}.pending_call_ids <> '{{}}'
)"""  # noqa: S608  reason: a name from this module only


def exchange_count_sql(column: str) -> str:
    """Return SQL for the number of exchanges of `:conversation`. Rows are counted only if the column is null."""
    return f"""coalesce({column}, (
    SELECT count(*) FROM turns WHERE conversation_id = :conversation AND kind = 'user_task'
))"""  # noqa: S608  reason: a name from our own statements only


_LISTED: Final[tuple[Any, ...]] = (
    conversations,
    literal_column(_pending_sql("conversations", "conversations.id")).label("pending_blocks"),
)

_CREATE: Final = Statement("""
INSERT INTO conversations (id, tenant_id, assistant_id, assistant_version, identifier, source, direction, mode,
    args, context, metadata)
SELECT :conversation, a.tenant_id, a.id, a.version, :identifier, :source, :direction, :mode,
    :args::json, :context::json, :metadata::jsonb
FROM assistants a
WHERE a.id = :assistant AND a.tenant_id = :tenant AND (:version::int IS NULL OR a.version = :version)
ORDER BY a.version DESC
LIMIT 1
-- A repeated statement finds the row that it inserted the first time.
ON CONFLICT (id) DO UPDATE SET id = conversations.id
RETURNING *
""")
_LOAD: Final = Statement(f"""
SELECT c.*, {_pending_sql("c", ":conversation")} AS pending_blocks
FROM conversations c
WHERE c.id = :conversation AND (c.tenant_id = :tenant) IS TRUE
""")  # noqa: S608  reason: constants of this module only
_CHANGE: Final = Statement(f"""
WITH seen AS (
    SELECT c.revision, a.version IS NOT NULL AS version_exists
    FROM conversations c
    LEFT JOIN assistants a ON a.id = c.assistant_id AND a.version = coalesce(:version::int, c.assistant_version)
    WHERE c.id = :conversation AND (c.tenant_id = :tenant) IS TRUE
),
changed AS (
    UPDATE conversations c SET
        assistant_version = coalesce(:version, c.assistant_version),
        args = coalesce(:args::json, c.args),
        context = coalesce(:context::json, c.context),
        metadata = coalesce(:metadata::jsonb, c.metadata),
        revision = c.revision + 1,
        updated_at = now()
    FROM seen
    WHERE c.id = :conversation AND seen.version_exists
        AND (:expected_revision::bigint IS NULL OR c.revision = :expected_revision)
    RETURNING c.*
)
SELECT seen.version_exists, seen.revision AS seen_revision, changed.*,
    {_pending_sql("changed", ":conversation")} AS pending_blocks
FROM seen LEFT JOIN changed ON true
""")  # noqa: S608  reason: constants of this module only


def _list_statement(*filtered: str) -> Statement:
    """Build one statement per combination of filters: one plan for all of them would use no index."""
    return Statement(
        select(*_LISTED)
        .where(
            _c.tenant_id == bindparam("tenant"),
            _c.id >= bindparam("first"),
            _c.id < bindparam("before"),
            *(_c[name] == bindparam(name) for name in filtered),
        )
        .order_by(_c.id.desc())
        .limit(bindparam("count", type_=Integer))
    )


_LISTS: Final[dict[tuple[str, ...], Statement]] = {
    filtered: _list_statement(*filtered)
    for filtered in ((), ("identifier",), ("assistant_id",), ("identifier", "assistant_id"))
}
_EVERYTHING: Final = ConversationFilter()


class ConversationStore(StorePart):
    """Creates, reads, lists and edits conversations."""

    async def create_conversation(self, tenant_id: str, draft: ConversationDraft) -> Conversation:
        rows = await self._database.run(_CREATE, **_creation_values(tenant_id, draft))
        if not rows:
            raise AssistantNotFound
        return conversation_from(rows[0])

    async def load_conversation(self, tenant_id: str, conversation_id: str) -> Conversation:
        rows = await self._database.run(_LOAD, **_key(tenant_id, conversation_id))
        if not rows:
            raise ConversationNotFound
        return conversation_from(rows[0])

    async def list_conversations(
        self,
        tenant_id: str,
        *,
        filters: ConversationFilter = _EVERYTHING,
        cursor: str | None = None,
        limit: int = 20,
    ) -> Page[Conversation]:
        given: dict[str, Any] = {}
        if filters.identifier is not None:
            given["identifier"] = filters.identifier
        if filters.assistant_id is not None:
            given["assistant_id"] = decode_id(ASSISTANT, filters.assistant_id)
        first, before = ids_within(filters.created_after, filters.created_before)
        rows = await self._database.run(
            _LISTS[tuple(given)],
            tenant=decode_id(TENANT, tenant_id),
            first=first,
            before=min(before, before_id(cursor, CONVERSATION)),
            count=bounded(limit) + 1,
            **given,
        )
        return page_of(rows, limit, conversation_from, lambda conversation: conversation.id)

    async def change_conversation(
        self,
        tenant_id: str,
        conversation_id: str,
        change: ConversationChange,
        *,
        expected_revision: int | None = None,
    ) -> Conversation:
        rows = await self._database.run(
            _CHANGE,
            repeatable=False,
            **_key(tenant_id, conversation_id),
            version=change.assistant_version,
            args=None if change.args is None else encode_json(change.args),
            context=None if change.context is None else encode_json(change.context),
            metadata=None if change.metadata is None else encode_json(change.metadata),
            expected_revision=expected_revision,
        )
        if not rows:
            raise ConversationNotFound
        row = rows[0]
        if row["id"] is not None:
            return conversation_from(row)
        if not row["version_exists"]:
            raise AssistantNotFound(f"The assistant has no version {change.assistant_version}.")
        raise RevisionMismatch(expected_revision=expected_revision, revision=row["seen_revision"])


async def create_conversation_on(connection: Connection, tenant_id: str, draft: ConversationDraft) -> Conversation:
    """Create a conversation within a transaction. Raises `AssistantNotFound`."""
    rows = await _CREATE.fetch(connection, **_creation_values(tenant_id, draft))
    if not rows:
        raise AssistantNotFound
    return conversation_from(rows[0])


async def load_conversation_on(connection: Connection, tenant_id: str, conversation_id: str) -> Conversation:
    """Load a conversation within a transaction. Raises `ConversationNotFound`."""
    rows = await _LOAD.fetch(connection, **_key(tenant_id, conversation_id))
    if not rows:
        raise ConversationNotFound
    return conversation_from(rows[0])


def _creation_values(tenant_id: str, draft: ConversationDraft) -> dict[str, Any]:
    return {
        "conversation": new_uuid(),
        "tenant": decode_id(TENANT, tenant_id),
        "assistant": decode_id(ASSISTANT, draft.assistant_id),
        "version": draft.assistant_version,
        "identifier": draft.identifier,
        "source": draft.source,
        "direction": draft.direction,
        "mode": draft.mode,
        "args": encode_json(draft.args),
        "context": encode_json(draft.context),
        "metadata": encode_json(draft.metadata),
    }


def _key(tenant_id: str, conversation_id: str) -> dict[str, Any]:
    return {"conversation": decode_id(CONVERSATION, conversation_id), "tenant": decode_id(TENANT, tenant_id)}
