"""Accepting an input turn: one statement.

The statement reads the conversation, searches for a turn that the request would duplicate, and either takes the lease
and writes the turn or changes nothing. It returns what it read, so that a refusal needs no second statement.

If other turns wait for the conversation, it is as busy as if a turn ran: their tickets come first.

Two concurrent requests both lock the conversation's row. The later one waits for the lock, then finds the lease taken
and writes nothing, but the rest of its snapshot is older than the wait and may contain no reason for a refusal. Such a
result contradicts itself, and the statement is run again. The same is done if the unique index on the idempotency key
detects a duplicate that the snapshot does not contain.
"""

from typing import Any, Final
from uuid import UUID

import asyncpg
from asyncpg import exceptions as pg

from server.conversation.block import block_to_json, encode_blocks
from server.conversation.conversation import Lease
from server.conversation.errors import (
    ConversationBusy,
    ConversationNotFound,
    HistoryRuleBroken,
    IdempotencyKeyReused,
    RevisionMismatch,
    StrataError,
)
from server.conversation.identifiers import CONVERSATION, TENANT, decode_id
from server.conversation.store import Accepted, AcceptOutcome, Duplicate, NewInput
from server.conversation.turn import TurnKind
from server.postgres.codec import decode_text, encode_json, encode_text
from server.postgres.conversation.conversations import exchange_count_sql
from server.postgres.engine import Statement, StorePart

_BEHIND_ALL: Final = 2**63 - 1
"""The position of a request without a ticket."""

# Two queries and not one with OR, so that each uses its index, for a conversation of any length.
_PRIOR_SQL: Final = """
    SELECT seq, body_hash FROM turns
    WHERE conversation_id = :conversation AND idempotency_key = :key::text
    UNION ALL
    SELECT t.seq, t.body_hash
    FROM conversations c JOIN turns t ON t.conversation_id = :conversation AND t.seq = c.next_seq - 2
    WHERE c.id = :conversation AND :key::text IS NULL AND :announces_retry AND t.body_hash = :body_hash::bytea
"""

_ACCEPT_SQL: Final = f"""
WITH seen AS (
    SELECT revision, next_seq, pending_call_ids, lease_token, lease_turn_seq,
        EXISTS (
            SELECT FROM waiting_turns
            WHERE conversation_id = :conversation AND ticket < coalesce(:ticket::bigint, {_BEHIND_ALL})
                AND expires_at > now()
        ) AS others_wait
    FROM conversations
    WHERE id = :conversation AND (tenant_id = :tenant) IS TRUE
),
prior AS ({_PRIOR_SQL}),
taken AS (
    UPDATE conversations SET
        revision = revision + 1,
        next_seq = next_seq + 2,
        pending_call_ids = '{{}}',
        lease_token = :token,
        lease_owner = :owner,
        lease_expires_at = now() + :lease_seconds::float8 * interval '1 second',
        lease_turn_seq = next_seq + 1,
        cancel_requested_at = NULL,
        exchange_count = {exchange_count_sql("conversations.exchange_count")}
            + CASE WHEN :is_response THEN 0 ELSE 1 END,
        updated_at = now()
    WHERE id = :conversation AND (tenant_id = :tenant) IS TRUE
        AND lease_token IS NULL
        AND NOT (SELECT others_wait FROM seen)
        AND (:expected_revision::bigint IS NULL OR revision = :expected_revision)
        AND CASE WHEN :is_response
            THEN pending_call_ids <> '{{}}' AND pending_call_ids @> :answers AND pending_call_ids <@ :answers::text[]
            ELSE pending_call_ids = '{{}}' OR :abandons
        END
        AND NOT EXISTS (SELECT FROM prior)
    RETURNING id, tenant_id, next_seq, revision
),
inserted AS (
    INSERT INTO turns (conversation_id, seq, kind, state, blocks, native, dialect, language, args,
        idempotency_key, body_hash, written_by_lease)
    SELECT :conversation::uuid, next_seq - 2, :kind, 'complete', :blocks::jsonb, :native, 'strata', :language,
        :args::json, :key::text, :body_hash::bytea, :token
    FROM taken
),
called AS (
    DELETE FROM waiting_turns
    WHERE conversation_id = :conversation AND ticket = :ticket AND EXISTS (SELECT FROM taken)
)%blobs%
SELECT seen.*, prior.seq AS prior_seq, prior.body_hash AS prior_body_hash,
    taken.next_seq AS taken_next_seq, taken.revision AS taken_revision
FROM seen LEFT JOIN prior ON true LEFT JOIN taken ON true
LIMIT 1
"""  # noqa: S608  reason: constants of this module only

# Not DO NOTHING: an existing blob is locked, so that a concurrent erasure does not delete it.
_BLOBS_SQL: Final = """,
pieces AS (
    SELECT DISTINCT ON (sha256) taken.*, piece.*
    FROM taken, unnest(:blob_hashes::bytea[], :blob_types::text[], :blob_data::bytea[])
        AS piece (sha256, media_type, data)
),
stored AS (
    INSERT INTO blobs (tenant_id, sha256, media_type, data)
    SELECT tenant_id, sha256, media_type, data FROM pieces
    ON CONFLICT (tenant_id, sha256) DO UPDATE SET media_type = blobs.media_type
),
referred AS (
    INSERT INTO blob_references (conversation_id, seq, sha256, tenant_id)
    SELECT :conversation::uuid, next_seq - 2, sha256, tenant_id FROM pieces
)"""

_ACCEPT: Final = Statement(_ACCEPT_SQL.replace("%blobs%", ""))
_ACCEPT_WITH_BLOBS: Final = Statement(_ACCEPT_SQL.replace("%blobs%", _BLOBS_SQL))
_FIND: Final = Statement(f"""
WITH prior AS ({_PRIOR_SQL})
SELECT c.lease_turn_seq, prior.seq AS prior_seq, prior.body_hash AS prior_body_hash
FROM conversations c LEFT JOIN prior ON true
WHERE c.id = :conversation AND (c.tenant_id = :tenant) IS TRUE
LIMIT 1
""")  # noqa: S608  reason: constants of this module only

_MAX_ATTEMPTS: Final = 5
_PER_EXCHANGE: Final = 2
"""The numbers that an accepted turn takes: its own and that of its answer."""


class AcceptanceStore(StorePart):
    """Accepts input turns and finds their duplicates."""

    async def accept_turn(self, tenant_id: str, turn: NewInput) -> AcceptOutcome:
        conversation_id = decode_id(CONVERSATION, turn.conversation_id)
        if conversation_id is None:
            raise ConversationNotFound
        statement = _ACCEPT_WITH_BLOBS if turn.blobs else _ACCEPT
        values = _values(conversation_id, decode_id(TENANT, tenant_id), turn)
        for _ in range(_MAX_ATTEMPTS):
            try:
                rows = await self._database.run(statement, **values)
            except pg.UniqueViolationError:
                continue
            if not rows:
                raise ConversationNotFound
            outcome = _outcome(rows[0], turn)
            if outcome is not None:
                return outcome
        # Other requests took the conversation at every attempt.
        raise ConversationBusy

    async def find_duplicate(self, tenant_id: str, turn: NewInput) -> Duplicate | None:
        rows = await self._database.run(
            _FIND,
            conversation=decode_id(CONVERSATION, turn.conversation_id),
            tenant=decode_id(TENANT, tenant_id),
            key=turn.idempotency_key,
            announces_retry=turn.announces_retry,
            body_hash=turn.body_hash,
        )
        if not rows:
            raise ConversationNotFound
        return _duplicate(rows[0], turn)


def _outcome(row: asyncpg.Record, turn: NewInput) -> AcceptOutcome | None:
    """Interpret the result of the statement; None if it contradicts itself. Raises the refusal."""
    if row["taken_revision"] is not None:
        return _accepted(turn, row["taken_next_seq"], row["taken_revision"])
    if row["lease_token"] == turn.lease_token:
        # The same request was accepted before, and the response to it was lost.
        return _accepted(turn, row["next_seq"], row["revision"])
    duplicate = _duplicate(row, turn)
    if duplicate is not None:
        return duplicate
    refusal = _refusal(row, turn)
    if refusal is not None:
        raise refusal
    return None


def _duplicate(row: asyncpg.Record, turn: NewInput) -> Duplicate | None:
    if row["prior_seq"] is None:
        return None
    if row["prior_body_hash"] != turn.body_hash:
        raise IdempotencyKeyReused
    answer_seq = row["prior_seq"] + 1
    return Duplicate(seq=row["prior_seq"], answer_seq=answer_seq, running=row["lease_turn_seq"] == answer_seq)


def _refusal(row: asyncpg.Record, turn: NewInput) -> StrataError | None:
    if row["lease_token"] is not None:
        return ConversationBusy(running_seq=row["lease_turn_seq"])
    if row["others_wait"]:
        return ConversationBusy("Other turns wait for this conversation already.")
    if turn.expected_revision not in (None, row["revision"]):
        return RevisionMismatch(expected_revision=turn.expected_revision, revision=row["revision"])
    pending = tuple(decode_text(call_id) for call_id in row["pending_call_ids"])
    if turn.kind is TurnKind.USER_TASK:
        if pending and not turn.abandons_calls:
            return HistoryRuleBroken(
                "Tool calls wait for their results; a user task cannot come before them.",
                hint="Send their results first, or give the calls up with `abandon_pending_calls`.",
                rule="call_followed_by_responses",
                missing_ids=list(pending),
            )
        return None
    missing = [call_id for call_id in pending if call_id not in turn.answers]
    unexpected = [call_id for call_id in turn.answers if call_id not in pending]
    if unexpected:
        return HistoryRuleBroken(
            "There are results for tool calls that are not pending.",
            rule="no_orphan_response",
            unexpected_ids=unexpected,
            missing_ids=missing,
        )
    if missing or not pending:
        return HistoryRuleBroken(
            "Results are missing for some of the pending tool calls." if missing else "No tool call is pending.",
            rule="all_calls_answered" if missing else "no_orphan_response",
            missing_ids=missing,
        )
    return None


def _accepted(turn: NewInput, next_seq: int, revision: int) -> Accepted:
    seq = next_seq - _PER_EXCHANGE
    lease = Lease(
        conversation_id=turn.conversation_id, token=turn.lease_token, owner=turn.lease_owner, turn_seq=seq + 1
    )
    return Accepted(seq=seq, revision=revision, lease=lease)


def _values(conversation_id: UUID, tenant_id: UUID | None, turn: NewInput) -> dict[str, Any]:
    values: dict[str, Any] = {
        "conversation": conversation_id,
        "tenant": tenant_id,
        "kind": turn.kind.value,
        "is_response": turn.kind is TurnKind.TOOL_RESPONSE,
        "blocks": encode_json([block_to_json(block) for block in turn.blocks]),
        "native": encode_blocks(turn.blocks),
        "answers": [encode_text(call_id) for call_id in turn.answers],
        "abandons": turn.abandons_calls,
        "language": turn.language,
        "args": None if turn.args is None else encode_json(turn.args),
        "key": turn.idempotency_key,
        "body_hash": turn.body_hash,
        "announces_retry": turn.announces_retry,
        "expected_revision": turn.expected_revision,
        "token": turn.lease_token,
        "owner": turn.lease_owner,
        "lease_seconds": turn.lease_seconds,
        "ticket": turn.ticket,
    }
    if turn.blobs:
        values["blob_hashes"] = [blob.sha256 for blob in turn.blobs]
        values["blob_types"] = [encode_text(blob.media_type) for blob in turn.blobs]
        values["blob_data"] = [blob.data for blob in turn.blobs]
    return values
