"""The running turn: its calls, its chunks, its end. Each method is one statement, and each needs the lease.

The statements lock the conversation's row while they write, by updating it or with a key-share lock. So either a
concurrent erasure waits for them, or they find no conversation and write nothing: no row is left after an erasure.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, Final

from server.conversation.block import block_to_json
from server.conversation.call import Call, CallEnd, CallStart, Chunk
from server.conversation.conversation import Lease
from server.conversation.errors import ConversationNotFound, LeaseLost
from server.conversation.identifiers import CONVERSATION, TENANT, decode_id
from server.conversation.manifest import encode_new_manifest
from server.conversation.notifications import Notification
from server.conversation.store import Finished, NewAnswer
from server.conversation.usage import Usage
from server.postgres.codec import encode_json, encode_raw, encode_text
from server.postgres.engine import Statement, StorePart
from server.postgres.notifications import notify_sql

_HELD_SQL: Final = """
WITH held AS (
    SELECT id FROM conversations WHERE id = :conversation AND lease_token = :token FOR KEY SHARE
),"""

_START_COLUMNS: Final = """conversation_id, turn_seq, attempt, provider, model, account, epoch, started_at, manifest,
        dynamic, request_hash, cache_expected_tokens, repairs, template_failures, warnings, layer_order, caching"""
_START_VALUES: Final = """:conversation::uuid, :turn_seq::bigint, :attempt::smallint, :provider::text, :model::text,
        :account::text, :epoch::int, :started_at::timestamptz, :manifest::jsonb, :dynamic::bytea,
        :request_hash::bytea, :cache_expected_tokens::bigint, :repairs::jsonb, :template_failures::jsonb,
        :warnings::jsonb, :layer_order::text, :caching::jsonb"""
_END_COLUMNS: Final = """first_byte_at, ended_at, status, headers, error_code, fresh_input_tokens, cache_read_tokens,
        cache_write_tokens, output_tokens, reasoning_tokens, usage_reported, cost_usd, cache_miss_reason,
        raw_response, raw_length, response_id"""
_END_VALUES: Final = """:first_byte_at::timestamptz, :ended_at::timestamptz, :status::smallint, :headers::jsonb,
        :call_error_code::text, :call_fresh_input_tokens::bigint, :call_cache_read_tokens::bigint,
        :call_cache_write_tokens::bigint, :call_output_tokens::bigint, :call_reasoning_tokens::bigint,
        :usage_reported::jsonb, :call_cost_usd::numeric, :cache_miss_reason::text, :raw_response::bytea,
        :raw_length::bigint, :response_id::text"""
_END_EXCLUDED: Final = ", ".join(f"excluded.{name.strip()}" for name in _END_COLUMNS.split(","))
_ENDED_CALL_SQL: Final = f"""
    INSERT INTO calls ({_START_COLUMNS}, {_END_COLUMNS})
    SELECT {_START_VALUES}, {_END_VALUES}
    FROM held
    ON CONFLICT (conversation_id, turn_seq, attempt) DO UPDATE SET
        ({_END_COLUMNS}, warnings) = ({_END_EXCLUDED}, excluded.warnings)"""  # noqa: S608  reason: constants of this module only

_BEGIN_CALL: Final = Statement(f"""{_HELD_SQL}
begun AS (
    INSERT INTO calls ({_START_COLUMNS})
    SELECT {_START_VALUES} FROM held
    ON CONFLICT (conversation_id, turn_seq, attempt) DO NOTHING
)
SELECT id FROM held
""")  # noqa: S608  reason: constants of this module only

_END_CALL: Final = Statement(f"""{_HELD_SQL}
ended AS ({_ENDED_CALL_SQL}
),
gone AS (
    DELETE FROM call_chunks
    WHERE conversation_id = :conversation AND turn_seq = :turn_seq AND attempt = :attempt AND EXISTS (SELECT FROM held)
)
SELECT id FROM held
""")  # noqa: S608  reason: constants of this module only

_RECORD_SQL: Final = """
WITH held AS (
    SELECT id FROM conversations WHERE id = :conversation AND (tenant_id = :tenant) IS TRUE FOR KEY SHARE
),"""
# The number is taken if another call has it: two processes may call at the same time, and each call is billed.
_SAME_CALL_SQL: Final = """
    WHERE calls.started_at = excluded.started_at AND calls.request_hash = excluded.request_hash
    RETURNING 1"""
_RECORD_BEGUN: Final = Statement(f"""{_RECORD_SQL}
recorded AS (
    INSERT INTO calls ({_START_COLUMNS})
    SELECT {_START_VALUES} FROM held
    ON CONFLICT (conversation_id, turn_seq, attempt) DO UPDATE SET account = excluded.account{_SAME_CALL_SQL}
),
archived AS (
    INSERT INTO templates (hash, source)
    SELECT :template_hash::bytea, :template_source::text FROM held WHERE :template_source IS NOT NULL
    ON CONFLICT (hash) DO NOTHING
)
SELECT EXISTS (SELECT FROM recorded) AS is_recorded FROM held
""")  # noqa: S608  reason: constants of this module only
_RECORD_ENDED: Final = Statement(f"""{_RECORD_SQL}
recorded AS ({_ENDED_CALL_SQL}{_SAME_CALL_SQL}
)
SELECT EXISTS (SELECT FROM recorded) AS is_recorded FROM held
""")  # noqa: S608  reason: constants of this module only

# Growth is announced only while another process reads the turn: Postgres holds a database-wide lock while a transaction
# with a notification commits. The row's lock orders this statement and the request for notifications, so either this
# statement reads the request, or the reader's next statement reads these chunks.
_APPEND_CHUNKS: Final = Statement(f"""
WITH held AS (
    UPDATE conversations SET lease_expires_at = now() + :lease_seconds::float8 * interval '1 second'
    WHERE id = :conversation AND lease_token = :token
    RETURNING id, cancel_requested_at IS NOT NULL AS cancelling, listened_until > now() AS listened
),
written AS (
    INSERT INTO call_chunks (conversation_id, turn_seq, attempt, byte_offset, data)
    SELECT :conversation::uuid, :turn_seq, piece.*
    FROM held, unnest(:attempts::smallint[], :offsets::bigint[], :pieces::bytea[]) AS piece
    ON CONFLICT DO NOTHING
    RETURNING conversation_id
)
SELECT held.cancelling, (
    SELECT {notify_sql(Notification.GROWN, "conversation_id")} FROM written WHERE held.listened LIMIT 1
)
FROM held
""")  # noqa: S608  reason: constants of this module only

_FINISH_SQL: Final = f"""
WITH held AS (
    UPDATE conversations SET
        revision = revision + 1,
        pending_call_ids = :pending,
        lease_token = NULL, lease_owner = NULL, lease_expires_at = NULL, lease_turn_seq = NULL,
        cancel_requested_at = NULL,
        updated_at = now()
    WHERE id = :conversation AND lease_token = :token
    RETURNING id, revision
),
answered AS (
    INSERT INTO turns (conversation_id, seq, kind, state, blocks, native, dialect, provider, model, model_version,
        account, attempt, stop_reason, error_code, ending, fresh_input_tokens, cache_read_tokens, cache_write_tokens,
        output_tokens, reasoning_tokens, cost_usd, written_by_lease, revision)
    SELECT :conversation::uuid, :turn_seq, 'model_response', :state, :blocks::jsonb, :native, :dialect,
        :answered_by::text, :answered_model::text, :answered_version::text, :answered_account::text, %attempt%,
        :stop_reason, :error_code, :ending::jsonb, :fresh_input_tokens::bigint, :cache_read_tokens::bigint,
        :cache_write_tokens::bigint, :output_tokens::bigint, :reasoning_tokens::bigint, :cost_usd::numeric, :token,
        revision
    FROM held
    RETURNING conversation_id, revision, created_at
),%ended%
gone AS (
    DELETE FROM call_chunks
    WHERE conversation_id = :conversation AND turn_seq = :turn_seq AND EXISTS (SELECT FROM held)
)
SELECT revision, created_at, {notify_sql(Notification.ENDED, "conversation_id")} FROM answered
UNION ALL
-- An earlier run of this statement finished the turn, and its result was lost.
SELECT revision, created_at, true FROM turns
WHERE conversation_id = :conversation AND seq = :turn_seq AND written_by_lease = :token
"""  # noqa: S608  reason: constants of this module only
_FINISH: Final = Statement(
    _FINISH_SQL.replace("%attempt%", ":attempt::smallint").replace("%ended%", f"\nended AS ({_ENDED_CALL_SQL}\n),")
)
_FINISH_RECORDED: Final = Statement(
    _FINISH_SQL.replace("%attempt%", ":attempt::smallint").replace(
        "%ended%",
        f"""
ended AS (
    UPDATE calls SET ({_END_COLUMNS}, warnings) = ({_END_VALUES}, :warnings::jsonb)
    WHERE conversation_id = :conversation AND turn_seq = :turn_seq AND attempt = :attempt AND EXISTS (SELECT FROM held)
),""",  # noqa: S608  reason: constants of this module only
    )
)
_FINISH_WITHOUT_CALL: Final = Statement(_FINISH_SQL.replace("%attempt%", "NULL::smallint").replace("%ended%", ""))


class RunningTurnStore(StorePart):
    """Records the calls, chunks and end of a running turn, and calls without a turn."""

    async def begin_call(self, lease: Lease, start: CallStart) -> None:
        if not await self._database.run(_BEGIN_CALL, **_lease_values(lease), **_start_values(start)):
            raise LeaseLost

    async def end_call(self, lease: Lease, start: CallStart, end: CallEnd) -> None:
        values = _lease_values(lease) | _start_values(start) | _end_values(end)
        if not await self._database.run(_END_CALL, **values):
            raise LeaseLost

    async def record_call(
        self, tenant_id: str, conversation_id: str, call: Call, *, template_source: str | None = None
    ) -> bool:
        values = {
            "conversation": decode_id(CONVERSATION, conversation_id),
            "tenant": decode_id(TENANT, tenant_id),
            "turn_seq": call.turn_seq,
            **_start_values(call.start),
        }
        if call.end is None:
            rows = await self._database.run(_RECORD_BEGUN, **values, **_template_values(template_source))
        else:
            rows = await self._database.run(_RECORD_ENDED, **values, **_end_values(call.end))
        if not rows:
            raise ConversationNotFound
        is_recorded: bool = rows[0]["is_recorded"]
        return is_recorded

    async def append_chunks(self, lease: Lease, chunks: Sequence[Chunk], *, lease_seconds: float) -> bool:
        rows = await self._database.run(
            _APPEND_CHUNKS,
            **_lease_values(lease),
            lease_seconds=lease_seconds,
            attempts=[chunk.attempt for chunk in chunks],
            offsets=[chunk.offset for chunk in chunks],
            pieces=[chunk.data for chunk in chunks],
        )
        if not rows:
            raise LeaseLost
        cancelling: bool = rows[0]["cancelling"]
        return cancelling

    async def finish_turn(self, lease: Lease, answer: NewAnswer) -> Finished:
        values = {
            **_lease_values(lease),
            **_usage_values(answer.usage),
            "pending": [encode_text(call_id) for call_id in answer.pending_call_ids],
            "state": answer.state.value,
            "blocks": encode_json([block_to_json(block) for block in answer.blocks]),
            "native": answer.native.data,
            "dialect": answer.native.dialect,
            "stop_reason": None if answer.stop_reason is None else answer.stop_reason.value,
            "error_code": answer.error_code,
            "ending": encode_json(answer.ending) if answer.ending else None,
            "cost_usd": answer.cost_usd,
            "answered_by": answer.provider,
            "answered_model": answer.model,
            "answered_version": None if answer.model_version is None else encode_text(answer.model_version),
            "answered_account": answer.account,
        }
        if answer.start is None or answer.end is None:
            rows = await self._database.run(_FINISH_WITHOUT_CALL, **values)
        elif answer.is_call_recorded:
            begun: dict[str, Any] = {"attempt": answer.start.attempt, "warnings": encode_json(answer.start.warnings)}
            rows = await self._database.run(_FINISH_RECORDED, **values, **begun, **_end_values(answer.end))
        else:
            rows = await self._database.run(_FINISH, **values, **_start_values(answer.start), **_end_values(answer.end))
        if not rows:
            raise LeaseLost
        return Finished(revision=rows[0]["revision"], created_at=rows[0]["created_at"])


def _lease_values(lease: Lease) -> dict[str, Any]:
    return {
        "conversation": decode_id(CONVERSATION, lease.conversation_id),
        "token": lease.token,
        "turn_seq": lease.turn_seq,
    }


def _start_values(start: CallStart) -> dict[str, Any]:
    return {
        "attempt": start.attempt,
        "provider": start.provider,
        "model": start.model,
        "account": start.account,
        "epoch": start.epoch,
        "started_at": start.started_at,
        "manifest": encode_json(
            start.manifest if start.new_manifest is None else encode_new_manifest(start.new_manifest)
        ),
        "dynamic": start.dynamic,
        "layer_order": start.layer_order.value,
        "request_hash": start.request_hash,
        "caching": encode_json(start.caching) if start.caching else None,
        "cache_expected_tokens": start.cache_expected_tokens,
        "repairs": encode_json(start.repairs),
        "template_failures": encode_json(start.template_failures),
        "warnings": encode_json(start.warnings),
    }


def _template_values(source: str | None) -> dict[str, Any]:
    return {
        "template_hash": None if source is None else hashlib.sha256(source.encode()).digest(),
        "template_source": source,
    }


def _end_values(end: CallEnd) -> dict[str, Any]:
    raw = end.raw_response
    return {
        "first_byte_at": end.first_byte_at,
        "ended_at": end.ended_at,
        "status": end.status,
        "headers": encode_json(end.headers),
        "call_error_code": end.error_code,
        "usage_reported": None if end.usage_reported is None else encode_json(end.usage_reported),
        "call_cost_usd": end.cost_usd,
        "response_id": end.response_id,
        "cache_miss_reason": end.cache_miss_reason,
        "raw_response": None if raw is None else encode_raw(raw),
        "raw_length": None if raw is None else len(raw),
        **_usage_values(end.usage, prefix="call_"),
    }


def _usage_values(usage: Usage, *, prefix: str = "") -> dict[str, int]:
    return {
        f"{prefix}fresh_input_tokens": usage.fresh_input_tokens,
        f"{prefix}cache_read_tokens": usage.cache_read_tokens,
        f"{prefix}cache_write_tokens": usage.cache_write_tokens,
        f"{prefix}output_tokens": usage.output_tokens,
        f"{prefix}reasoning_tokens": usage.reasoning_tokens,
    }
