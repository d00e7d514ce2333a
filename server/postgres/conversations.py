"""Conversations: made, read, listed, edited; and their epochs and leases. Turns have modules of their own."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Integer, bindparam, func, select, true, update

from server.conversation import Conversation, ConversationDraft, Lease
from server.epoch import Epoch, Segment
from server.errors import AssistantNotFound, ConversationNotFound, EpochMoved, LeaseLost, RevisionMismatch
from server.identifiers import ASSISTANT, CONVERSATION, TENANT, decode_id, encode_id, new_uuid
from server.page import Page
from server.postgres.codec import decode_text, encode_json
from server.postgres.engine import Database, Statement
from server.postgres.paging import before_id, bounded, page_of
from server.postgres.rows import conversation_from
from server.postgres.tables import conversations
from server.store import ConversationChange, ConversationFilter

_c = conversations.c
_THIS: Final = (_c.id == bindparam("conversation"), (_c.tenant_id == bindparam("tenant")).is_(true()))

_CREATE: Final = Statement("""
INSERT INTO conversations (id, tenant_id, assistant_id, assistant_version, identifier, source, direction, mode,
    args, context, metadata)
SELECT :conversation, a.tenant_id, a.id, a.version, :identifier, :source, :direction, :mode,
    :args::json, :context::json, :metadata::jsonb
FROM assistants a
WHERE a.id = :assistant AND a.tenant_id = :tenant AND (:version::int IS NULL OR a.version = :version)
ORDER BY a.version DESC
LIMIT 1
-- A repetition finds the row that it made the first time.
ON CONFLICT (id) DO UPDATE SET id = conversations.id
RETURNING *
""")
_LOAD: Final = Statement(select(conversations).where(*_THIS))
_CHANGE: Final = Statement("""
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
SELECT seen.version_exists, seen.revision AS seen_revision, changed.*
FROM seen LEFT JOIN changed ON true
""")
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
        static_hash, template_hash, buffer_start_seq)
    SELECT id, :number, :reason, :assistant_version, :generation, :segment_count, :base_text,
        :static_hash, :template_hash, :buffer_start_seq
    FROM moved
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
_EXPIRED: Final = Statement(
    select(_c.tenant_id, _c.id, _c.lease_token, _c.lease_owner, _c.lease_turn_seq)
    .where(_c.lease_token.is_not(None), _c.lease_expires_at < func.now())
    .order_by(_c.id)
    .limit(bindparam("count", type_=Integer))
)
_TAKE_OVER: Final = Statement("""
UPDATE conversations SET
    lease_token = :new_token,
    lease_owner = :owner,
    lease_expires_at = now() + :lease_seconds::float8 * interval '1 second'
WHERE id = :conversation AND ((lease_token = :token AND lease_expires_at < now()) OR lease_token = :new_token)
RETURNING id
""")
_SURRENDER: Final = Statement(
    update(conversations)
    .where(_c.lease_token.is_not(None), _c.lease_owner == bindparam("owner"))
    .values(lease_expires_at=func.now())
    .returning(_c.id)
)


def _list_statement(*filtered: str) -> Statement:
    """One statement per combination of filters: a plan for all of them at once would use the index of none."""
    return Statement(
        select(conversations)
        .where(
            _c.tenant_id == bindparam("tenant"),
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


async def create_conversation(database: Database, tenant_id: str, draft: ConversationDraft) -> Conversation:
    """See the port."""
    rows = await database.run(
        _CREATE,
        conversation=new_uuid(),
        tenant=decode_id(TENANT, tenant_id),
        assistant=decode_id(ASSISTANT, draft.assistant_id),
        version=draft.assistant_version,
        identifier=draft.identifier,
        source=draft.source,
        direction=draft.direction,
        mode=draft.mode,
        args=encode_json(draft.args),
        context=encode_json(draft.context),
        metadata=encode_json(draft.metadata),
    )
    if not rows:
        raise AssistantNotFound
    return conversation_from(rows[0])


async def load_conversation(database: Database, tenant_id: str, conversation_id: str) -> Conversation:
    """See the port."""
    rows = await database.run(_LOAD, **_key(tenant_id, conversation_id))
    if not rows:
        raise ConversationNotFound
    return conversation_from(rows[0])


async def list_conversations(
    database: Database, tenant_id: str, filters: ConversationFilter, cursor: str | None, limit: int
) -> Page[Conversation]:
    """See the port."""
    given: dict[str, Any] = {}
    if filters.identifier is not None:
        given["identifier"] = filters.identifier
    if filters.assistant_id is not None:
        given["assistant_id"] = decode_id(ASSISTANT, filters.assistant_id)
    rows = await database.run(
        _LISTS[tuple(given)],
        tenant=decode_id(TENANT, tenant_id),
        before=before_id(cursor, CONVERSATION),
        count=bounded(limit) + 1,
        **given,
    )
    return page_of(rows, limit, conversation_from, lambda conversation: conversation.id)


async def change_conversation(
    database: Database,
    tenant_id: str,
    conversation_id: str,
    change: ConversationChange,
    expected_revision: int | None,
) -> Conversation:
    """See the port."""
    rows = await database.run(
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


async def begin_epoch(
    database: Database, tenant_id: str, conversation_id: str, epoch: Epoch, segment: Segment | None
) -> None:
    """See the port."""
    rows = await database.run(
        _BEGIN_EPOCH,
        **_key(tenant_id, conversation_id),
        number=epoch.number,
        reason=epoch.reason.value,
        assistant_version=epoch.assistant_version,
        generation=epoch.generation,
        segment_count=epoch.segment_count,
        base_text=epoch.base_text,
        static_hash=epoch.static_hash,
        template_hash=epoch.template_hash,
        buffer_start_seq=epoch.buffer_start_seq,
        **_segment_values(segment),
    )
    if not rows:
        raise ConversationNotFound
    if not (rows[0]["moved"] or rows[0]["repeated"]):
        raise EpochMoved


async def list_expired_leases(database: Database, limit: int) -> Sequence[tuple[str, Lease]]:
    """See the port."""
    rows = await database.run(_EXPIRED, count=bounded(limit))
    return [
        (
            encode_id(TENANT, row["tenant_id"]),
            Lease(
                conversation_id=encode_id(CONVERSATION, row["id"]),
                token=row["lease_token"],
                owner=decode_text(row["lease_owner"]),
                turn_seq=row["lease_turn_seq"],
            ),
        )
        for row in rows
    ]


async def take_over_lease(database: Database, lease: Lease, token: UUID, owner: str, lease_seconds: float) -> Lease:
    """See the port."""
    rows = await database.run(
        _TAKE_OVER,
        conversation=decode_id(CONVERSATION, lease.conversation_id),
        token=lease.token,
        new_token=token,
        owner=owner,
        lease_seconds=lease_seconds,
    )
    if not rows:
        raise LeaseLost
    return replace(lease, token=token, owner=owner)


async def surrender_leases(database: Database, owner: str) -> int:
    """See the port."""
    return len(await database.run(_SURRENDER, owner=owner))


def _key(tenant_id: str, conversation_id: str) -> dict[str, Any]:
    return {"conversation": decode_id(CONVERSATION, conversation_id), "tenant": decode_id(TENANT, tenant_id)}


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
