"""Epochs and what their static texts are made of: segments and templates. Rows are added and never changed."""

from typing import Any, Final

from server.epoch import Epoch, Segment
from server.errors import ConversationNotFound, EpochMoved
from server.identifiers import CONVERSATION, TENANT, decode_id
from server.postgres.codec import decode_text
from server.postgres.engine import Database, Statement

_BEGIN_EPOCH: Final = Statement("""
WITH seen AS (
    SELECT epoch FROM conversations WHERE id = :conversation AND (tenant_id = :tenant) IS TRUE
),
moved AS (
    UPDATE conversations SET epoch = :number, buffer_start_seq = :buffer_start_seq
    WHERE id = :conversation AND (tenant_id = :tenant) IS TRUE AND epoch = :number - 1
    RETURNING id
),
begun AS (
    INSERT INTO epochs (conversation_id, number, reason, assistant_version, generation, segment_count, base_text,
        static_hash, prefix_hash, arguments_hash, template_hash, buffer_start_seq)
    SELECT id, :number, :reason, :assistant_version, :generation, :segment_count, :base_text,
        :static_hash, :prefix_hash, :arguments_hash, :template_hash, :buffer_start_seq
    FROM moved
),
archived AS (
    INSERT INTO templates (hash, source)
    SELECT :template_hash, :template_source::text FROM moved WHERE :template_source IS NOT NULL
    ON CONFLICT (hash) DO NOTHING
),
added AS (
    INSERT INTO segments (conversation_id, generation, position, first_seq, last_seq, text, token_count,
        summarises_generation, summarises_count)
    SELECT id, :generation, :position::int, :first_seq::bigint, :last_seq::bigint, :segment_text::text,
        :token_count::int, :summarises_generation::int, :summarises_count::int
    FROM moved WHERE :position IS NOT NULL
)
SELECT moved.id IS NOT NULL AS moved,
    EXISTS (SELECT FROM epochs WHERE conversation_id = :conversation AND number = :number
        AND static_hash = :static_hash AND buffer_start_seq = :buffer_start_seq) AS repeated
FROM seen LEFT JOIN moved ON true
""")
_TEMPLATE: Final = Statement("SELECT source FROM templates WHERE hash = :template_hash")


async def begin_epoch(
    database: Database,
    tenant_id: str,
    conversation_id: str,
    epoch: Epoch,
    *,
    segment: Segment | None,
    template_source: str | None,
) -> None:
    """See the port."""
    rows = await database.run(
        _BEGIN_EPOCH,
        conversation=decode_id(CONVERSATION, conversation_id),
        tenant=decode_id(TENANT, tenant_id),
        number=epoch.number,
        reason=epoch.reason.value,
        assistant_version=epoch.assistant_version,
        generation=epoch.generation,
        segment_count=epoch.segment_count,
        base_text=epoch.base_text,
        static_hash=epoch.static_hash,
        prefix_hash=epoch.prefix_hash,
        arguments_hash=epoch.arguments_hash,
        template_hash=epoch.template_hash,
        template_source=template_source,
        buffer_start_seq=epoch.buffer_start_seq,
        **_segment_values(segment),
    )
    if not rows:
        raise ConversationNotFound
    if not (rows[0]["moved"] or rows[0]["repeated"]):
        raise EpochMoved


async def load_template(database: Database, template_hash: bytes) -> str | None:
    """See the port."""
    rows = await database.run(_TEMPLATE, template_hash=template_hash)
    return decode_text(rows[0]["source"]) if rows else None


def _segment_values(segment: Segment | None) -> dict[str, Any]:
    if segment is None:
        names = ("position", "first_seq", "last_seq", "segment_text", "token_count")
        return dict.fromkeys((*names, "summarises_generation", "summarises_count"))
    generation, count = segment.summarises or (None, None)
    return {
        "position": segment.position,
        "first_seq": segment.first_seq,
        "last_seq": segment.last_seq,
        "segment_text": segment.text,
        "token_count": segment.token_count,
        "summarises_generation": generation,
        "summarises_count": count,
    }
