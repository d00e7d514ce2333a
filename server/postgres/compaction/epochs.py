"""Epochs, and the segments and templates of their static texts. Rows are added and never changed."""

from collections.abc import Sequence
from typing import Any, Final

from server.conversation.epoch import Epoch, EpochReason, Segment, SignedSummary
from server.conversation.errors import ConversationNotFound, EpochMoved
from server.conversation.identifiers import CONVERSATION, TENANT, decode_id
from server.conversation.page import Page
from server.conversation.store import CopiedSegments, EpochOutline
from server.postgres.codec import decode_cursor, decode_text, encode_json
from server.postgres.engine import Statement, StorePart
from server.postgres.paging import bounded, in_range, page_of
from server.postgres.rows import Row, epoch_from, segment_from

_BEGIN_EPOCH: Final = Statement("""
WITH seen AS (
    SELECT epoch FROM conversations WHERE id = :conversation AND (tenant_id = :tenant) IS TRUE
),
moved AS (
    UPDATE conversations SET epoch = :number, buffer_start_seq = :buffer_start_seq
    WHERE id = :conversation AND (tenant_id = :tenant) IS TRUE AND epoch = :number - 1
        AND (:seen_next_seq::bigint IS NULL OR next_seq = :seen_next_seq)
    RETURNING id
),
begun AS (
    INSERT INTO epochs (conversation_id, number, reason, assistant_version, generation, segment_count, base_text,
        static_hash, prefix_hash, arguments_hash, template_hash, buffer_start_seq,
        signed_summary, signed_summary_start_seq, signed_summary_text, signed_summary_tokens,
        signed_summary_kept_hash, rejected, args)
    SELECT :conversation::uuid, :number, :reason, :assistant_version, :generation, :segment_count, :base_text,
        :static_hash, :prefix_hash, :arguments_hash, :template_hash, :buffer_start_seq,
        :signed_summary::bytea, :signed_summary_start_seq::bigint, :signed_summary_text::text,
        :signed_summary_tokens::int, :signed_summary_kept_hash::bytea, :rejected::jsonb,
        -- A compaction renders nothing: the text that it keeps was rendered with the args of the previous epoch.
        coalesce(:args::json, (
            SELECT e.args FROM epochs e
            WHERE e.conversation_id = :conversation AND e.number = :number - 1 AND e.arguments_hash = :arguments_hash
        ))
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
    SELECT :conversation::uuid, :generation, :position::int, :first_seq::bigint, :last_seq::bigint, :segment_text::text,
        :token_count::int, :summarises_generation::int, :summarises_count::int
    FROM moved WHERE :position IS NOT NULL
),
copied AS (
    INSERT INTO segments (conversation_id, generation, position, first_seq, last_seq, text, token_count,
        summarises_generation, summarises_count)
    SELECT :conversation::uuid, :generation, s.position - :copied_from::int + :copied_to::int, s.first_seq, s.last_seq,
        s.text, s.token_count, s.summarises_generation, s.summarises_count
    FROM moved JOIN segments s ON s.conversation_id = :conversation
    WHERE s.generation = :copied_generation::int
        AND s.position >= :copied_from AND s.position < :copied_from + :copied_count::int
)
SELECT moved.id IS NOT NULL AS moved,
    EXISTS (SELECT FROM epochs WHERE conversation_id = :conversation AND number = :number
        AND static_hash = :static_hash AND buffer_start_seq = :buffer_start_seq
        AND signed_summary IS NOT DISTINCT FROM :signed_summary AND rejected IS NOT DISTINCT FROM :rejected) AS repeated
FROM seen LEFT JOIN moved ON true
""")
_EPOCHS: Final = Statement("""
SELECT e.number, e.reason, e.assistant_version, e.generation, e.segment_count, e.buffer_start_seq, e.created_at,
    e.signed_summary_start_seq, e.signed_summary_tokens,
    s.position, s.first_seq, s.last_seq, s.token_count, s.summarises_generation, s.summarises_count, NULL::text AS text
FROM conversations c
LEFT JOIN LATERAL (
    SELECT * FROM epochs
    WHERE conversation_id = :conversation AND number < :before AND reason = ANY(:reasons::text[])
    ORDER BY number DESC
    LIMIT :count
) e ON true
LEFT JOIN segments s ON s.conversation_id = :conversation AND s.generation = e.generation
    AND s.position = e.segment_count - 1
WHERE c.id = :conversation AND (c.tenant_id = :tenant) IS TRUE
ORDER BY e.number DESC
""")
_EPOCH_BEFORE_SUMMARY: Final = Statement("""
SELECT b.number AS epoch_number, b.reason AS epoch_reason, b.assistant_version AS epoch_assistant_version, b.generation,
    b.segment_count, b.base_text, b.static_hash, b.prefix_hash AS epoch_prefix_hash,
    b.arguments_hash AS epoch_arguments_hash, b.template_hash, b.buffer_start_seq AS epoch_buffer_start_seq,
    b.signed_summary, b.signed_summary_start_seq, b.signed_summary_text, b.signed_summary_tokens,
    b.signed_summary_kept_hash, b.rejected
FROM conversations c
LEFT JOIN LATERAL (
    SELECT number FROM epochs
    WHERE conversation_id = :conversation AND reason = :reason AND signed_summary = :signed_summary::bytea
    ORDER BY number DESC
    LIMIT 1
) signed ON true
LEFT JOIN epochs b ON b.conversation_id = :conversation AND b.number = signed.number - 1
WHERE c.id = :conversation AND (c.tenant_id = :tenant) IS TRUE
""")
_SEGMENTS: Final = Statement("""
SELECT s.position, s.first_seq, s.last_seq, s.text, s.token_count, s.summarises_generation, s.summarises_count
FROM conversations c
LEFT JOIN segments s ON s.conversation_id = :conversation AND s.generation = :generation::int
    AND s.position < :count::int
WHERE c.id = :conversation AND (c.tenant_id = :tenant) IS TRUE
ORDER BY s.position
""")
_OF_HISTORY: Final = (
    EpochReason.COMPACTED,
    EpochReason.SIGNED,
    EpochReason.COMPACTED_UNSIGNED,
    EpochReason.SUMMARY_INLINED,
    EpochReason.COMPACTION_UNDONE,
    EpochReason.SUMMARISED,
    EpochReason.OLDEST_LEFT_OUT,
)
_ABOVE_ALL_EPOCHS: Final = 2**31 - 1
_TEMPLATE: Final = Statement("SELECT source FROM templates WHERE hash = :template_hash")


class EpochStore(StorePart):
    """Begins and reads epochs, segments and templates."""

    async def begin_epoch(
        self,
        tenant_id: str,
        conversation_id: str,
        epoch: Epoch,
        *,
        segment: Segment | None = None,
        copies: CopiedSegments | None = None,
        template_source: str | None = None,
        seen_next_seq: int | None = None,
    ) -> None:
        rows = await self._database.run(
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
            args=None if epoch.args is None else encode_json(epoch.args),
            buffer_start_seq=epoch.buffer_start_seq,
            seen_next_seq=seen_next_seq,
            rejected=encode_json(_rejected_values(epoch)) if epoch.rejected else None,
            **_signed_summary_values(epoch.signed_summary),
            **_segment_values(segment),
            **_copied_values(copies),
        )
        if not rows:
            raise ConversationNotFound
        if not (rows[0]["moved"] or rows[0]["repeated"]):
            raise EpochMoved

    async def load_segments(
        self, tenant_id: str, conversation_id: str, generation: int, count: int
    ) -> Sequence[Segment]:
        rows = await self._database.run(
            _SEGMENTS,
            conversation=decode_id(CONVERSATION, conversation_id),
            tenant=decode_id(TENANT, tenant_id),
            generation=generation,
            count=count,
        )
        if not rows:
            raise ConversationNotFound
        return [segment_from(row, generation) for row in rows if row["position"] is not None]

    async def find_epoch_before(self, tenant_id: str, conversation_id: str, signed_summary: bytes) -> Epoch | None:
        rows = await self._database.run(
            _EPOCH_BEFORE_SUMMARY,
            conversation=decode_id(CONVERSATION, conversation_id),
            tenant=decode_id(TENANT, tenant_id),
            reason=EpochReason.SIGNED.value,
            signed_summary=signed_summary,
        )
        if not rows:
            raise ConversationNotFound
        return None if rows[0]["epoch_number"] is None else epoch_from(rows[0])

    async def list_epochs(
        self, tenant_id: str, conversation_id: str, *, cursor: str | None = None, limit: int = 20
    ) -> Page[EpochOutline]:
        before = _ABOVE_ALL_EPOCHS if cursor is None else min(in_range(decode_cursor(cursor, int)), _ABOVE_ALL_EPOCHS)
        rows = await self._database.run(
            _EPOCHS,
            conversation=decode_id(CONVERSATION, conversation_id),
            tenant=decode_id(TENANT, tenant_id),
            before=before,
            reasons=[reason.value for reason in _OF_HISTORY],
            count=bounded(limit) + 1,
        )
        if not rows:
            raise ConversationNotFound
        found = [row for row in rows if row["number"] is not None]
        return page_of(found, limit, _outline_from, lambda outline: outline.number)

    async def load_template(self, template_hash: bytes) -> str | None:
        rows = await self._database.run(_TEMPLATE, template_hash=template_hash)
        return decode_text(rows[0]["source"]) if rows else None


def _outline_from(row: Row) -> EpochOutline:
    return EpochOutline(
        number=row["number"],
        reason=EpochReason(row["reason"]),
        assistant_version=row["assistant_version"],
        generation=row["generation"],
        segment_count=row["segment_count"],
        buffer_start_seq=row["buffer_start_seq"],
        created_at=row["created_at"],
        last_segment=_newest_piece(row),
    )


def _newest_piece(row: Row) -> Segment | None:
    """Return the newest part of the history: the signed summary if there is one, because a new segment replaces it."""
    if row["signed_summary_start_seq"] is not None:
        return Segment(
            generation=row["generation"],
            position=row["segment_count"],
            first_seq=row["signed_summary_start_seq"],
            last_seq=row["buffer_start_seq"] - 1,
            text="",
            token_count=row["signed_summary_tokens"],
        )
    return None if row["position"] is None else segment_from(row, row["generation"])


def _signed_summary_values(signed_summary: SignedSummary | None) -> dict[str, Any]:
    return {
        "signed_summary": None if signed_summary is None else signed_summary.data,
        "signed_summary_start_seq": None if signed_summary is None else signed_summary.start_seq,
        "signed_summary_text": None if signed_summary is None else signed_summary.text,
        "signed_summary_tokens": None if signed_summary is None else signed_summary.token_count,
        "signed_summary_kept_hash": None
        if signed_summary is None
        else b"".join(signed_summary.kept_prefix_hashes) or None,
    }


def _rejected_values(epoch: Epoch) -> dict[str, Any]:
    return {
        provider: {"signatures": found.signatures_through_seq, "calls": found.calls_through_seq}
        for provider, found in epoch.rejected.items()
    }


def _copied_values(copies: CopiedSegments | None) -> dict[str, Any]:
    return {
        "copied_generation": None if copies is None else copies.generation,
        "copied_from": None if copies is None else copies.from_position,
        "copied_to": None if copies is None else copies.to_position,
        "copied_count": None if copies is None else copies.count,
    }


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
