"""Forking: the rows of a conversation are copied to a new one, inside the database.

The copied rows never change, so the source is locked only against erasure, as a running turn locks it. This also
protects its blobs: the source references them until the fork does.

A fork begins at revision 0. The copied turns have no revision, because they did not end in the fork.
"""

from typing import Any, Final

from sqlalchemy import Table

from server.conversation.conversation import Conversation
from server.conversation.errors import ConversationNotFound, TurnNotFound
from server.conversation.identifiers import CONVERSATION, TENANT, decode_id, encode_id, new_uuid
from server.postgres.conversation.conversations import load_conversation_on
from server.postgres.engine import Statement, StorePart
from server.postgres.paging import in_range
from server.postgres.tables import blob_references, calls, epochs, segments, turns

_SOURCE: Final = Statement("""
WITH source AS (
    SELECT id FROM conversations WHERE id = :conversation AND (tenant_id = :tenant) IS TRUE FOR KEY SHARE
)
SELECT t.kind,
    -- Without a request there is no epoch.
    coalesce((
        SELECT epoch FROM calls WHERE conversation_id = :conversation AND turn_seq <= :at_seq::bigint
        ORDER BY turn_seq DESC, attempt DESC LIMIT 1
    ), 0) AS epoch
FROM source LEFT JOIN turns t ON t.conversation_id = :conversation AND t.seq = :at_seq
""")
_CREATE: Final = Statement("""
INSERT INTO conversations (id, tenant_id, assistant_id, assistant_version, next_seq, buffer_start_seq, epoch,
    pending_call_ids, source, direction, mode, args, context, metadata, forked_from_id, forked_from_seq, exchange_count)
SELECT :fork, c.tenant_id, c.assistant_id, c.assistant_version, :next_seq, coalesce(e.buffer_start_seq, 1), :epoch,
    ARRAY(
        SELECT block ->> 'id' FROM turns t, jsonb_array_elements(t.blocks) WITH ORDINALITY AS element (block, position)
        WHERE t.conversation_id = :conversation AND t.seq = :at_seq
            AND t.kind = 'model_response' AND t.state = 'complete' AND block ->> 'type' = 'tool_call'
        ORDER BY position
    ),
    c.source, c.direction, c.mode, c.args, c.context, c.metadata, c.id, :at_seq,
    (SELECT count(*) FROM turns t WHERE t.conversation_id = :conversation AND t.seq <= :at_seq AND t.kind = 'user_task')
FROM conversations c LEFT JOIN epochs e ON e.conversation_id = :conversation AND e.number = :epoch
WHERE c.id = :conversation
""")
_CANCELLED_ANSWER: Final = Statement("""
INSERT INTO turns (conversation_id, seq, kind, state, blocks, native, dialect, provider, model, stop_reason,
    fresh_input_tokens, cache_read_tokens, cache_write_tokens, output_tokens, reasoning_tokens, cost_usd,
    written_by_lease)
SELECT :fork::uuid, :at_seq::bigint + 1, 'model_response', 'cancelled', '[]', '', a.provider, a.provider, a.model,
    'aborted', 0, 0, 0, 0, 0, 0, c.id
FROM conversations c JOIN assistants a ON a.id = c.assistant_id AND a.version = c.assistant_version
WHERE c.id = :fork
""")


def _copy(table: Table, which: str, **instead: str) -> Statement:
    """Build a statement that copies all columns of the rows except the conversation id and the given replacements."""
    values = {column.name: column.name for column in table.c} | {"conversation_id": ":fork"} | instead
    return Statement(
        f"INSERT INTO {table.name} ({', '.join(values)}) SELECT {', '.join(values.values())} FROM {table.name} "  # noqa: S608  reason: names from our own tables only
        f"WHERE conversation_id = :conversation AND {which}"
    )


_COPIES: Final = (
    # Without idempotency keys: a request to the fork must not be taken for a duplicate of one to the source.
    _copy(turns, "seq <= :at_seq", idempotency_key="NULL", body_hash="NULL", revision="NULL"),
    # Not the calls of summaries, which have negative numbers: their segments are copied, their cost is the source's.
    _copy(calls, "turn_seq BETWEEN 1 AND :at_seq"),
    _copy(blob_references, "seq <= :at_seq"),
    _copy(epochs, "number <= :epoch"),
    _copy(
        segments,
        "EXISTS (SELECT FROM epochs e WHERE e.conversation_id = :conversation AND e.number <= :epoch"
        " AND e.generation = segments.generation AND e.segment_count > segments.position)",
    ),
)


class ForkStore(StorePart):
    """Forks conversations."""

    async def fork_conversation(self, tenant_id: str, conversation_id: str, at_seq: int) -> Conversation:
        fork = new_uuid()
        values: dict[str, Any] = {
            "conversation": decode_id(CONVERSATION, conversation_id),
            "tenant": decode_id(TENANT, tenant_id),
            "fork": fork,
            "at_seq": in_range(at_seq),
        }
        async with self._database.transaction() as connection:
            source = await _SOURCE.fetch(connection, **values)
            if not source:
                raise ConversationNotFound
            if source[0]["kind"] is None:
                raise TurnNotFound
            answered = source[0]["kind"] == "model_response"
            values |= {"epoch": source[0]["epoch"], "next_seq": at_seq + (1 if answered else 2)}
            await _CREATE.fetch(connection, **values)
            for copy in _COPIES:
                await copy.fetch(connection, **values)
            if not answered:
                await _CANCELLED_ANSWER.fetch(connection, **values)
            return await load_conversation_on(connection, tenant_id, encode_id(CONVERSATION, fork))
