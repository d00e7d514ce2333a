"""Statements and pages for reading stored calls.

A page of turns or calls is limited by rows and by bytes, because a row may have any size. Postgres returns the size of
a value without reading it, so values after the limit are not read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final
from uuid import UUID

import zstandard

from server.conversation.call import Call
from server.postgres.codec import decode_raw
from server.postgres.engine import Statement
from server.postgres.payload.manifests import StoredManifest
from server.postgres.rows import Row, call_from
from server.replay.verify.recorded_calls import Flaw

PAGE_ROWS: Final = 256
PAGE_BYTES: Final = 8 * 2**20

FRAMES: Final = Statement(
    "SELECT * FROM conversations WHERE id = ANY(:conversations::uuid[]) "
    "AND (:tenant::uuid IS NULL OR tenant_id = :tenant)"
)
EXISTS: Final = Statement("SELECT 1 FROM conversations WHERE id = :conversation")
EPOCHS: Final = Statement("""
SELECT conversation_id, number AS epoch_number, reason AS epoch_reason, assistant_version AS epoch_assistant_version,
    generation, segment_count, base_text, static_hash, template_hash, buffer_start_seq AS epoch_buffer_start_seq,
    prefix_hash AS epoch_prefix_hash, arguments_hash AS epoch_arguments_hash,
    signed_summary, signed_summary_start_seq, signed_summary_text, signed_summary_tokens, signed_summary_kept_hash,
    rejected, args AS epoch_args
FROM epochs WHERE conversation_id = ANY(:conversations::uuid[]) ORDER BY conversation_id, number
""")
SEGMENTS: Final = Statement("""
SELECT position, first_seq, last_seq, text, token_count, summarises_generation, summarises_count
FROM segments WHERE conversation_id = :conversation AND generation = :generation ORDER BY position
""")
REFERENCES: Final = Statement("""
SELECT r.conversation_id, r.seq, r.sha256
FROM blob_references r JOIN conversations c ON c.id = r.conversation_id AND c.tenant_id = r.tenant_id
WHERE r.conversation_id = ANY(:conversations::uuid[])
""")
TEMPLATE: Final = Statement("SELECT source FROM templates WHERE hash = :template_hash")
ASSISTANT: Final = Statement("""
SELECT id AS assistant_id, version AS chosen_version, created_at AS assistant_created_at, name, language, description,
    provider, model, instructions, variables, tools, settings
FROM assistants WHERE id = :assistant AND version = :version
""")
BLOBS: Final = Statement(
    "SELECT sha256, media_type, data FROM blobs WHERE tenant_id = :tenant AND sha256 = ANY(:hashes::bytea[])"
)
# LATERAL, so that each conversation's rows are found by its key: see `server.postgres.payload.loading`.
TURNS: Final = Statement("""
SELECT page.*, (
    SELECT prefix_hash FROM epochs WHERE conversation_id = page.conversation_id AND number = page.epoch
) AS prefix_hash
FROM (
    SELECT t.*, sum(t.size) OVER (ORDER BY chosen.position, t.seq) - t.size AS bytes_before
    FROM unnest(:conversations::uuid[]) WITH ORDINALITY AS chosen (id, position)
    CROSS JOIN LATERAL (
        SELECT conversation_id, seq, kind, state, native, dialect, blocks, provider, model, model_version, account,
            language, args, attempt, stop_reason, error_code, fresh_input_tokens, cache_read_tokens,
            cache_write_tokens, output_tokens, reasoning_tokens, created_at, k.dynamic, k.input_time, k.epoch,
            chosen.position,
            octet_length(native) + coalesce(octet_length(k.dynamic), 0) AS size
        FROM turns
        LEFT JOIN LATERAL (
            SELECT epoch,
                CASE WHEN layer_order = 'append_only' AND octet_length(dynamic) > 0 THEN dynamic END AS dynamic,
                caching #>> '{clock,input}' AS input_time
            FROM calls
            WHERE conversation_id = turns.conversation_id AND turn_seq = turns.seq AND attempt = turns.attempt
            LIMIT 1
        ) AS k ON true
        WHERE conversation_id = chosen.id AND seq > :after_seq::bigint
        ORDER BY seq LIMIT :page_rows::int
    ) AS t
) AS page
WHERE page.bytes_before < :page_bytes::bigint
ORDER BY page.position, page.seq
""")
CALLS: Final = Statement("""
SELECT page.*
FROM (
    SELECT k.*, sum(k.size) OVER (ORDER BY chosen.position, k.turn_seq, k.attempt) - k.size AS bytes_before
    FROM unnest(:conversations::uuid[]) WITH ORDINALITY AS chosen (id, position)
    CROSS JOIN LATERAL (
        SELECT conversation_id, turn_seq, attempt, provider, model, account, epoch, started_at, request_hash,
            layer_order, dynamic, cache_expected_tokens, warnings, first_byte_at, ended_at, status, error_code,
            fresh_input_tokens, cache_read_tokens, cache_write_tokens, output_tokens, reasoning_tokens, usage_reported,
            cost_usd, cache_miss_reason, caching, response_id, raw_length, raw_response AS raw_bytes, manifest,
            '[]'::jsonb AS repairs, '[]'::jsonb AS template_failures, '{}'::jsonb AS headers,
            NULL::bytea AS raw_response, chosen.position,
            coalesce(octet_length(raw_response), 0) + octet_length(dynamic) + pg_column_size(manifest) AS size
        FROM calls
        WHERE conversation_id = chosen.id
            AND (turn_seq, attempt) > (:after_seq::bigint, :after_attempt::int) AND turn_seq < :until_seq::bigint
            AND (:provider::text IS NULL OR provider = :provider)
            AND (:model::text IS NULL OR model = :model)
            AND (:started_after::timestamptz IS NULL OR started_at >= :started_after)
            AND (:started_before::timestamptz IS NULL OR started_at < :started_before)
        ORDER BY turn_seq, attempt LIMIT :page_rows::int
    ) AS k
) AS page
WHERE page.bytes_before < :page_bytes::bigint
ORDER BY page.position, page.turn_seq, page.attempt
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRows:
    """The rows of one conversation on a page."""

    rows: Sequence[Row]
    is_all: bool
    """Whether the conversation has no other rows."""


class RowPage:
    """Rows of one conversation or several, limited by rows per conversation and by bytes in total."""

    def __init__(self, rows: Sequence[Row], *, page_rows: int, page_bytes: int) -> None:
        self.rows = rows
        self._page_rows = page_rows
        last = rows[-1] if rows else None
        is_full = last is not None and last["bytes_before"] + last["size"] >= page_bytes
        self._cut_from: int | None = last["position"] if last is not None and is_full else None
        self._by_id: dict[UUID, list[Row]] = {}
        for row in rows:
            self._by_id.setdefault(row["conversation_id"], []).append(row)

    @property
    def is_cut(self) -> bool:
        """Whether there may be more rows."""
        return self._cut_from is not None or any(len(rows) >= self._page_rows for rows in self._by_id.values())

    def take(self, conversation: UUID) -> FirstRows:
        """Remove and return the rows of a conversation. After the limit, they may be incomplete or missing."""
        rows = self._by_id.pop(conversation, [])
        is_after_limit = self._cut_from is not None and (not rows or rows[0]["position"] >= self._cut_from)
        return FirstRows(rows=rows, is_all=not is_after_limit and len(rows) < self._page_rows)


def read_call(row: Row, manifest: StoredManifest) -> tuple[Call, tuple[Flaw, ...]]:
    """Decode a call with its raw bytes, and return the flaws of these."""
    call = call_from(row, manifest)
    stored: Any = row["raw_bytes"]
    if call.end is None or stored is None:
        return call, ()
    try:
        raw = decode_raw(stored)
    except zstandard.ZstdError as error:
        note = "The raw bytes cannot be decompressed, or their checksum is wrong."
        return call, (Flaw(position="raw_response", note=note, stored=f"{len(stored)} bytes", found=str(error)[:100]),)
    if len(raw) != row["raw_length"]:
        note = "The number of raw bytes differs."
        lengths = {"stored": str(row["raw_length"]), "found": str(len(raw))}
        return call, (Flaw(position="raw_length", note=note, **lengths),)
    return replace(call, end=replace(call.end, raw_response=raw)), ()
