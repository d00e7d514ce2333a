"""Loading the source of a payload: one statement.

The buffered turns are returned as one array per column, so that the result is a single row and nothing is sent twice.
Values that the caller has cached are omitted, and so are columns that a payload does not use: the static text is the
largest part and never changes within an epoch, and the blocks of a model turn repeat its native bytes.

Joined rows are found by key, one at a time. With a plain join the planner would estimate the buffer as a third of the
conversation and read all of its calls; LIMIT 1 in a LATERAL subquery prevents that.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final
from uuid import UUID

from server.conversation.call import Call
from server.conversation.errors import CallNotFound, ConversationNotFound
from server.conversation.identifiers import CONVERSATION, TENANT, decode_id
from server.conversation.payload import ManifestEntry
from server.conversation.store import BufferedTurn, History, PayloadSource, RebuildSource
from server.postgres.codec import decode_raw
from server.postgres.conversation.conversations import exchange_count_sql
from server.postgres.engine import Database, Statement, StorePart
from server.postgres.paging import in_call_range
from server.postgres.payload.manifests import ManifestReader
from server.postgres.payload.source_rows import Known, RowCache
from server.postgres.rows import (
    Row,
    call_from,
    segment_from,
)
from server.providers.continuation import continued_attempts

_SOURCE_SQL: Final = """
SELECT c.*,
    a.version AS chosen_version, a.created_at AS assistant_created_at, a.name, a.language, a.description, a.provider,
    a.model, a.settings,
    CASE WHEN a.version <> :held_version::int THEN a.instructions END AS instructions,
    CASE WHEN a.version <> :held_version THEN a.variables END AS variables,
    CASE WHEN a.version <> :held_version THEN a.tools END AS tools,
    e.number AS epoch_number, e.reason AS epoch_reason, e.assistant_version AS epoch_assistant_version,
    e.generation, e.segment_count, e.static_hash, e.template_hash, e.buffer_start_seq AS epoch_buffer_start_seq,
    e.prefix_hash AS epoch_prefix_hash, e.arguments_hash AS epoch_arguments_hash, %args% AS epoch_args,
    e.signed_summary, e.signed_summary_start_seq, e.signed_summary_text, e.signed_summary_tokens,
    e.signed_summary_kept_hash, e.rejected,
    e.static_hash = ANY(:held_hashes::bytea[]) AS static_held,
    CASE WHEN e.static_hash <> ALL(:held_hashes) THEN e.base_text END AS base_text,
    s.texts AS segment_texts,
    b.*, i.*, p.*, x.*,
    %exchange_count% AS counted_exchanges,
    ARRAY(
        SELECT started_at FROM calls
        WHERE conversation_id = :conversation AND turn_seq > 0 AND turn_seq < %trigger%
        ORDER BY turn_seq DESC, attempt DESC
        LIMIT 8
    ) AS recent_call_times
FROM conversations c
LEFT JOIN epochs e ON e.conversation_id = :conversation AND e.number = %epoch%
JOIN assistants a ON a.id = c.assistant_id AND a.version = %version%
LEFT JOIN LATERAL (
    SELECT array_agg(text ORDER BY position) AS texts
    FROM segments
    WHERE conversation_id = :conversation AND generation = e.generation AND position < e.segment_count
        AND e.static_hash <> ALL(:held_hashes)
) s ON true
CROSS JOIN LATERAL (
    -- In the order of the subquery, which the primary key provides; ORDER BY in each aggregate would sort each.
    SELECT array_agg(seq) AS turn_seqs,
        array_agg(kind) AS turn_kinds,
        array_agg(state) AS turn_states,
        array_agg(native) AS turn_natives,
        array_agg(dialect) AS turn_dialects,
        array_agg(blocks) AS turn_blocks,
        array_agg(provider) AS turn_providers,
        array_agg(model) AS turn_models,
        array_agg(model_version) AS turn_model_versions,
        array_agg(account) AS turn_accounts,
        array_agg(language) AS turn_languages,
        array_agg(args) AS turn_args,
        array_agg(prefix_hash) AS turn_prefix_hashes,
        array_agg(dynamic) AS turn_dynamics,
        array_agg(input_time) AS turn_input_times,
        array_agg(output_tokens) AS turn_output_tokens,
        array_agg(reasoning_tokens) AS turn_reasoning_tokens,
        array_agg(created_at) AS turn_times
    FROM (
        SELECT t.seq, t.kind, t.state, t.native, t.dialect, t.provider, t.model, t.model_version, t.account, t.language,
            t.args, t.output_tokens, t.reasoning_tokens, t.created_at,
            CASE WHEN t.kind = 'model_response' AND (
                t.state <> 'complete' OR t.stop_reason = 'tool_use' OR t.provider IS DISTINCT FROM a.provider
            ) THEN t.blocks END AS blocks,
            k.dynamic, k.input_time, k.prefix_hash
        FROM turns t
        LEFT JOIN LATERAL (
            SELECT CASE WHEN layer_order = 'append_only' THEN nullif(dynamic, '') END AS dynamic,
                caching #>> '{clock,input}' AS input_time,
                (SELECT prefix_hash FROM epochs
                 WHERE conversation_id = :conversation AND number = calls.epoch) AS prefix_hash
            FROM calls
            WHERE conversation_id = :conversation AND turn_seq = t.seq AND attempt = t.attempt
            LIMIT 1
        ) k ON true
        WHERE t.conversation_id = :conversation AND t.seq >= greatest(%first%, :cached_seq::bigint) AND t.seq <= %last%
        ORDER BY t.seq
    ) AS turn
) b
CROSS JOIN LATERAL (
    SELECT array_agg(shown.sha256) AS blob_hashes,
        array_agg(blob.media_type) AS blob_types,
        array_agg(blob.data) AS blob_data
    FROM (
        SELECT DISTINCT sha256 FROM blob_references
        WHERE conversation_id = :conversation AND seq >= %first% AND seq <= %last%
            AND sha256 <> ALL(:cached_blobs::bytea[]) AND %blobs%
    ) AS shown
    CROSS JOIN LATERAL (
        SELECT media_type, data FROM blobs WHERE tenant_id = c.tenant_id AND sha256 = shown.sha256 LIMIT 1
    ) AS blob
) i
LEFT JOIN LATERAL (
    SELECT CASE WHEN request_hash <> :held_request::bytea THEN manifest END AS previous_manifest,
        request_hash AS previous_request_hash, coalesce(layer_order, 'layered') AS previous_order,
        provider AS previous_provider, model AS previous_model, account AS previous_account,
        turn_seq AS previous_turn_seq, attempt AS previous_attempt,
        started_at AS previous_started_at, response_id AS previous_response_id, caching AS previous_caching,
        coalesce(fresh_input_tokens, 0) AS fresh_input_tokens, coalesce(cache_read_tokens, 0) AS cache_read_tokens,
        coalesce(cache_write_tokens, 0) AS cache_write_tokens, coalesce(output_tokens, 0) AS output_tokens,
        coalesce(reasoning_tokens, 0) AS reasoning_tokens, epoch AS previous_epoch,
        jsonb_path_query_first(warnings, '$[*] ? (@.kind == "container")') AS previous_container,
        (SELECT prefix_hash FROM epochs
         WHERE conversation_id = :conversation AND number = calls.epoch) AS previous_prefix_hash
    FROM calls
    -- Summaries have negative numbers and no successor. Calls without a hash were recorded without their request.
    WHERE conversation_id = :conversation AND turn_seq > 0 AND turn_seq < %trigger% AND request_hash <> ''
    ORDER BY turn_seq DESC, attempt DESC
    LIMIT 1
) p ON true
LEFT JOIN LATERAL (
    SELECT k.id AS cache_id, k.provider AS cache_provider, k.account AS cache_account, k.model AS cache_model,
        k.prefix_hash AS cache_prefix_hash, k.name AS cache_name, k.token_count AS cache_token_count,
        k.expires_at AS cache_expires_at
    FROM (SELECT cache_id FROM provider_cache_uses WHERE conversation_id = :conversation LIMIT 1) AS used
    CROSS JOIN LATERAL (SELECT * FROM provider_caches WHERE id = used.cache_id AND removing_at IS NULL LIMIT 1) AS k
) x ON true
WHERE c.id = :conversation AND (c.tenant_id = :tenant) IS TRUE
"""


def _source_statement(*, blobs: str = "true", **places: str) -> Statement:
    sql = _SOURCE_SQL
    for place, expression in {
        "blobs": blobs,
        "args": "NULL::json",
        "exchange_count": exchange_count_sql("c.exchange_count"),
        **places,
    }.items():
        sql = sql.replace(f"%{place}%", expression)
    return Statement(sql)


_LOAD: Final = _source_statement(
    epoch="c.epoch",
    # The newest input decides. A tool loop keeps the version of its epoch, even if the conversation was edited.
    version="""CASE WHEN (
        SELECT kind FROM turns WHERE conversation_id = :conversation AND seq = c.next_seq - 2
    ) = 'tool_response' THEN coalesce(e.assistant_version, c.assistant_version) ELSE c.assistant_version END""",
    first="c.buffer_start_seq",
    last="c.next_seq",
    trigger="c.next_seq - 2",
)
_LOAD_PAST: Final = _source_statement(
    epoch=":epoch::int",
    version="coalesce(e.assistant_version, c.assistant_version)",
    first="coalesce(e.buffer_start_seq, 1)",
    last=":trigger_seq::bigint",
    trigger=":trigger_seq::bigint",
    args="e.args",
    exchange_count="""(
        SELECT count(*) FROM turns WHERE conversation_id = :conversation AND kind = 'user_task' AND seq <= :trigger_seq
    )""",
)
_LOAD_HISTORY: Final = _source_statement(
    epoch="c.epoch",
    version="coalesce(e.assistant_version, c.assistant_version)",
    first="c.buffer_start_seq",
    last="c.next_seq",
    trigger="c.next_seq",
    blobs="false",
)
_SEGMENTS: Final = Statement("""
SELECT (SELECT coalesce(max(generation), 0) FROM segments WHERE conversation_id = :conversation) AS newest_generation,
    s.position, s.first_seq, s.last_seq, s.token_count, s.summarises_generation, s.summarises_count,
    CASE WHEN :with_texts::bool AND s.position < :segment_count THEN s.text END AS text
FROM (VALUES (true)) AS always
-- One more than the epoch has: if it exists, it was written before and undone.
LEFT JOIN segments s ON s.conversation_id = :conversation AND s.generation = :generation::int
    AND s.position <= :segment_count::int
ORDER BY s.position
""")
_CALL: Final = Statement("""
SELECT k.turn_seq, k.attempt, k.provider, k.model, k.account, k.epoch, k.started_at, k.manifest, k.request_hash,
    k.layer_order, k.dynamic, k.cache_expected_tokens, k.repairs, k.template_failures, k.warnings,
    k.first_byte_at, k.ended_at, k.status, k.headers, k.error_code, k.fresh_input_tokens, k.cache_read_tokens,
    k.cache_write_tokens, k.output_tokens, k.reasoning_tokens, k.usage_reported, k.cost_usd, k.cache_miss_reason,
    k.caching, k.response_id,
    NULL::bytea AS raw_response
FROM conversations c
LEFT JOIN calls k ON k.conversation_id = :conversation AND k.turn_seq = :turn_seq AND k.attempt = :attempt
WHERE c.id = :conversation AND (c.tenant_id = :tenant) IS TRUE
""")
_RAW_OF_ATTEMPTS: Final = Statement(
    "SELECT attempt, raw_response FROM calls "
    "WHERE conversation_id = :conversation AND turn_seq = :turn_seq AND attempt = ANY(:attempts::smallint[])"
)
_LARGEST_ATTEMPT: Final = 2**15 - 1
_NO_VERSION: Final = 0


class PayloadStore(StorePart):
    """Loads the source of a payload, of an earlier request, and of a compaction."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._row_cache = RowCache()
        self._manifests = ManifestReader(database)

    async def load_payload_source(
        self,
        tenant_id: str,
        conversation_id: str,
        *,
        cached_static_hashes: Sequence[bytes] = (),
        cached_blobs: Sequence[bytes] = (),
        cached_turns: tuple[BufferedTurn, ...] = (),
        cached_provider: str | None = None,
    ) -> PayloadSource:
        conversation = decode_id(CONVERSATION, conversation_id)
        known = self._row_cache.find(conversation)
        rows = await self._database.run(
            _LOAD,
            conversation=conversation,
            tenant=decode_id(TENANT, tenant_id),
            held_hashes=list(cached_static_hashes),
            cached_blobs=list(cached_blobs),
            held_version=_NO_VERSION if known.assistant is None else known.assistant.version,
            held_request=known.request_hash,
            # The last one is loaded again, for the comparison.
            cached_seq=cached_turns[-1].seq if cached_turns else 0,
        )
        if not rows:
            raise ConversationNotFound
        source = await self._read(rows[0], known)
        if not cached_turns:
            return source
        turns = _prepend(cached_turns, source)
        if turns is None or source.assistant.definition.provider != cached_provider:
            return await self.load_payload_source(
                tenant_id, conversation_id, cached_static_hashes=cached_static_hashes, cached_blobs=cached_blobs
            )
        return replace(source, buffered=turns)

    async def _read(self, row: Row, known: Known | None = None) -> PayloadSource:
        """Decode the row. The previous manifest takes another round trip if this process did not write it, and it is
        not stored as a whole.
        """
        stored = row["previous_manifest"]
        manifest: tuple[ManifestEntry, ...] = ()
        if known is not None and known.request_hash and row["previous_request_hash"] == known.request_hash:
            manifest = known.manifest
        elif stored is not None:
            manifest = await self._manifests.decode(
                row["id"], row["previous_turn_seq"], row["previous_attempt"], stored
            )
        return self._row_cache.read(row, manifest, None if known is None else known.assistant)

    async def load_rebuild_source(
        self, tenant_id: str, conversation_id: str, turn_seq: int, attempt: int
    ) -> RebuildSource:
        key: dict[str, Any] = {
            "conversation": decode_id(CONVERSATION, conversation_id),
            "tenant": decode_id(TENANT, tenant_id),
        }
        # Two statements: the second needs a result of the first. The rows that they read never change.
        found = await self._database.run(
            _CALL, **key, turn_seq=in_call_range(turn_seq), attempt=max(0, min(attempt, _LARGEST_ATTEMPT))
        )
        if not found:
            raise ConversationNotFound
        if found[0]["turn_seq"] is None:
            raise CallNotFound
        manifest = await self._manifests.expand(key["conversation"], turn_seq, attempt, found[0]["manifest"])
        call = call_from(found[0], manifest)
        rows = await self._database.run(
            _LOAD_PAST,
            **key,
            epoch=call.start.epoch,
            trigger_seq=call.trigger_seq,
            held_hashes=[],
            cached_blobs=[],
            held_version=_NO_VERSION,
            held_request=b"",
            cached_seq=0,
        )
        if not rows:
            raise ConversationNotFound
        continued = await load_continued(self._database, key["conversation"], call)
        return RebuildSource(call=call, source=await self._read(rows[0]), continued=continued)

    async def load_history(
        self, tenant_id: str, conversation_id: str, *, cached_static_hashes: Sequence[bytes] = ()
    ) -> History:
        conversation = decode_id(CONVERSATION, conversation_id)
        known = replace(self._row_cache.find(conversation), assistant=None)
        rows = await self._database.run(
            _LOAD_HISTORY,
            conversation=conversation,
            tenant=decode_id(TENANT, tenant_id),
            held_hashes=list(cached_static_hashes),
            cached_blobs=[],
            held_version=_NO_VERSION,
            held_request=known.request_hash,
            cached_seq=0,
        )
        if not rows:
            raise ConversationNotFound
        source = await self._read(rows[0], known)
        epoch = source.epoch
        if epoch is None:
            return History(source=source, segments=(), newest_generation=0, can_append_segment=True)
        # A second statement, for the segments of the epoch that the first returned. They never change.
        found = await self._database.run(
            _SEGMENTS,
            conversation=conversation,
            generation=epoch.generation,
            segment_count=epoch.segment_count,
            with_texts=source.static_text is not None,
        )
        written = [row for row in found if row["position"] is not None]
        return History(
            source=source,
            segments=tuple(segment_from(row, epoch.generation) for row in written[: epoch.segment_count]),
            newest_generation=found[0]["newest_generation"],
            can_append_segment=len(written) == epoch.segment_count,
        )


def _prepend(cached: tuple[BufferedTurn, ...], source: PayloadSource) -> tuple[BufferedTurn, ...] | None:
    """The whole buffer: cached turns and loaded ones, of which the first is the last cached one. None if the cached
    turns are not, or not all, turns of this buffer.
    """
    first = source.conversation.buffer_start_seq
    loaded = source.buffered
    if cached[0].seq > first or not loaded or loaded[0] != cached[-1]:
        return None
    return (*cached[first - cached[0].seq :], *loaded[1:])


async def load_continued(database: Database, conversation: UUID | None, call: Call) -> tuple[bytes | None, ...]:
    """Load the raw bytes of the calls that a call continues, in order; None if retention has removed them."""
    attempts = continued_attempts(call.start)
    if not attempts:
        return ()
    rows = await database.run(
        _RAW_OF_ATTEMPTS, conversation=conversation, turn_seq=call.turn_seq, attempts=list(attempts)
    )
    found = {row["attempt"]: row["raw_response"] for row in rows}
    stored = [found.get(attempt) for attempt in attempts]
    return tuple(None if raw is None else decode_raw(raw) for raw in stored)
