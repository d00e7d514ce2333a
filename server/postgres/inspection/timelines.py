"""Timelines and stored calls on Postgres."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final
from uuid import UUID

from server.conversation.call import Call
from server.conversation.epoch import EpochReason
from server.conversation.errors import CallNotFound, ConversationNotFound
from server.conversation.identifiers import CONVERSATION, TENANT, decode_id
from server.conversation.payload import LayerOrder
from server.conversation.turn import Turn
from server.inspection.port import CallKey, StoredCall
from server.inspection.timeline import (
    TIMELINE_BYTES,
    TIMELINE_LIMIT,
    CallOutline,
    EpochMark,
    RunningTurn,
    Timeline,
    TimelineAnchor,
    TimelineTurn,
    annotate_timeline,
    choose_range,
)
from server.postgres.codec import decode_text
from server.postgres.compaction.epochs import EpochStore
from server.postgres.engine import Statement
from server.postgres.inspection.conversation_list import ConversationReader
from server.postgres.inspection.search_index import facts_from
from server.postgres.paging import in_call_range, in_range
from server.postgres.payload.manifests import ManifestReader
from server.postgres.rows import (
    Row,
    call_from,
    conversation_from,
    json_or_none,
    order_or_none,
    text_or_none,
    turn_from,
    usage_from,
)

_BACKGROUND_LIMIT: Final = 50
_EPOCH_LIMIT: Final = 100
_LARGEST_ATTEMPT: Final = 2**15 - 1

_HEAD: Final = Statement("""
SELECT c.*, n.name AS tenant_name,
    (SELECT a.name FROM assistants a WHERE a.id = c.assistant_id ORDER BY a.version DESC LIMIT 1) AS assistant_name,
    (SELECT max(t.seq) FROM turns t WHERE t.conversation_id = c.id) AS last_seq,
    (
        SELECT t.blocks FROM turns t WHERE t.conversation_id = c.id AND t.kind = 'model_response'
            AND c.pending_call_ids <> '{}' ORDER BY t.seq DESC LIMIT 1
    ) AS pending_blocks
FROM conversations c JOIN tenants n ON n.id = c.tenant_id
WHERE c.id = :conversation AND (c.tenant_id = :tenant) IS TRUE
""")
_FACTS: Final = Statement("SELECT * FROM conversation_facts WHERE conversation_id = :conversation")
_TURNS: Final = Statement("""
SELECT seq, kind, state, blocks, provider, model, attempt, stop_reason, error_code, fresh_input_tokens,
    cache_read_tokens, cache_write_tokens, output_tokens, reasoning_tokens, cost_usd, language, args, created_at,
    revision, ending
FROM turns WHERE conversation_id = :conversation AND seq BETWEEN :first_seq AND :last_seq ORDER BY seq LIMIT :count
""")
_SIZES: Final = Statement("""
SELECT t.seq, pg_column_size(t.blocks) + (
        SELECT coalesce(sum(pg_column_size(c.dynamic)), 0) FROM calls c
        WHERE c.conversation_id = t.conversation_id AND c.turn_seq = t.seq
    ) AS size
FROM turns t WHERE t.conversation_id = :conversation AND t.seq > :after ORDER BY t.seq LIMIT :count
""")
_OUTLINE: Final = """
SELECT turn_seq, attempt, provider, model, epoch, layer_order, dynamic, started_at, first_byte_at, ended_at, status,
    error_code, fresh_input_tokens, cache_read_tokens, cache_write_tokens, output_tokens, reasoning_tokens, cost_usd,
    cache_expected_tokens, cache_miss_reason, raw_length, jsonb_array_length(repairs) AS repair_count,
    jsonb_array_length(template_failures) AS template_failure_count,
    ARRAY(SELECT DISTINCT warning ->> 'kind' FROM jsonb_array_elements(warnings) AS warning ORDER BY 1) AS warning_kinds
FROM calls WHERE conversation_id = :conversation
"""
_OUTLINES: Final = Statement(
    f"{_OUTLINE} AND turn_seq BETWEEN :first_seq AND :last_seq ORDER BY turn_seq, attempt LIMIT :count"
)
_EARLIER: Final = Statement(
    f"{_OUTLINE} AND turn_seq > 0 AND turn_seq < :first_seq ORDER BY turn_seq DESC, attempt DESC LIMIT 1"
)
_MARKS: Final = Statement("""
SELECT number, reason, assistant_version, buffer_start_seq, created_at, args
FROM epochs WHERE conversation_id = :conversation AND number = ANY(:numbers::int[])
""")
_BACKGROUND: Final = Statement(f"{_OUTLINE} AND turn_seq < 0 ORDER BY turn_seq, attempt LIMIT :count")
_CALL: Final = Statement("""
SELECT * FROM calls WHERE conversation_id = :conversation AND turn_seq = :turn_seq AND attempt = :attempt
""")
_PREVIOUS: Final = Statement("""
SELECT turn_seq, attempt, provider, model, account, epoch, started_at, manifest, request_hash, layer_order, dynamic,
    caching, cache_expected_tokens, repairs, template_failures, warnings, NULL::timestamptz AS ended_at
FROM calls
WHERE conversation_id = :conversation AND turn_seq > 0 AND (turn_seq, attempt) < (:turn_seq, :attempt)
ORDER BY turn_seq DESC, attempt DESC
LIMIT 1
""")
_NEXT: Final = Statement("""
SELECT turn_seq, attempt FROM calls
WHERE conversation_id = :conversation AND :turn_seq > 0 AND (turn_seq, attempt) > (:turn_seq, :attempt)
ORDER BY turn_seq, attempt
LIMIT 1
""")
_MAX_ATTEMPTS: Final = 10
"""Average number of calls per turn that a timeline reads. The page of a call lists all attempts."""


class TimelineReader(ConversationReader):
    """Reads timelines and calls; see `server.inspection.port.Inspector`."""

    async def load_timeline(
        self,
        tenant_id: str | None,
        conversation_id: str,
        *,
        after_seq: int | None = None,
        before_seq: int | None = None,
        around_seq: int | None = None,
        limit: int = 50,
    ) -> Timeline:
        owner = await self._load_owner(tenant_id, conversation_id)
        key = decode_id(CONVERSATION, conversation_id)
        heads = await self._database.run(_HEAD, conversation=key, tenant=decode_id(TENANT, owner))
        if not heads:
            raise ConversationNotFound
        head, conversation = heads[0], conversation_from(heads[0])
        last_seq = head["last_seq"] or 0
        anchor = TimelineAnchor(after_seq=after_seq, before_seq=before_seq, around_seq=around_seq)
        turns = await self._list_turns(key, last_seq, anchor, max(1, min(limit, TIMELINE_LIMIT)))
        calls = await self._list_outlines(key, turns)
        earlier = await self._find_earlier(key, turns)
        running = await self._find_running(key, head)
        facts = await self._database.run(_FACTS, conversation=key)
        background = await self._database.run(_BACKGROUND, conversation=key, count=_BACKGROUND_LIMIT)
        epochs = {call.epoch for made in calls.values() for call in made} | {
            call.epoch for call in (running.calls if running else ())
        }
        timeline = Timeline(
            tenant_id=owner,
            tenant_name=decode_text(head["tenant_name"]),
            conversation=conversation,
            assistant_name=text_or_none(head["assistant_name"]) or "",
            facts=facts_from(facts[0]) if facts else None,
            turns=[TimelineTurn(turn=turn, calls=calls.get(turn.seq, ())) for turn in turns],
            earlier_seq=turns[0].seq - 1 if turns and turns[0].seq > 1 else None,
            later_seq=turns[-1].seq + 1 if turns and turns[-1].seq < last_seq else None,
            running=running,
            epochs=(await EpochStore(self._database).list_epochs(owner, conversation_id, limit=_EPOCH_LIMIT)).items,
            background_calls=[_outline_from(row) for row in background],
            last_seq=last_seq,
            earlier_call=earlier,
            call_epochs=await self._load_marks(key, epochs),
        )
        return annotate_timeline(timeline)

    async def load_stored_call(
        self, tenant_id: str | None, conversation_id: str, turn_seq: int, attempt: int
    ) -> StoredCall:
        owner = await self._load_owner(tenant_id, conversation_id)
        key: dict[str, Any] = {
            "conversation": decode_id(CONVERSATION, conversation_id),
            "turn_seq": in_call_range(turn_seq),
            "attempt": max(0, min(attempt, _LARGEST_ATTEMPT)),
        }
        rows = await self._database.run(_CALL, **key)
        if not rows:
            raise CallNotFound
        attempts = await self._database.run(
            _OUTLINES,
            conversation=key["conversation"],
            first_seq=key["turn_seq"],
            last_seq=key["turn_seq"],
            count=_LARGEST_ATTEMPT,
        )
        manifests = ManifestReader(self._database)
        return StoredCall(
            tenant_id=owner,
            call=await self._read_call(manifests, key, rows[0]),
            previous=await self._find_previous(manifests, key),
            next_call=await self._find_next(key),
            attempts=[_outline_from(row) for row in attempts],
        )

    async def _load_owner(self, tenant_id: str | None, conversation_id: str) -> str:
        """Return the tenant. Raises `ConversationNotFound`, also for a conversation of a tenant outside the scope."""
        owner = await self.find_tenant(conversation_id)
        if owner is None or tenant_id not in {None, owner}:
            raise ConversationNotFound
        return owner

    async def _find_previous(self, manifests: ManifestReader, key: dict[str, Any]) -> Call | None:
        rows = await self._database.run(_PREVIOUS, **key)
        return await self._read_call(manifests, key, rows[0]) if rows else None

    async def _read_call(self, manifests: ManifestReader, key: dict[str, Any], row: Row) -> Call:
        manifest = await manifests.expand(key["conversation"], row["turn_seq"], row["attempt"], row["manifest"])
        return call_from(row, manifest)

    async def _list_turns(
        self, conversation: UUID | None, last_seq: int, anchor: TimelineAnchor, count: int
    ) -> Sequence[Turn]:
        """Load at most `count` turns and at most `TIMELINE_BYTES`."""
        sizes = await self._database.run(
            _SIZES, conversation=conversation, after=in_range(anchor.start_after(last_seq, count)), count=count
        )
        chosen = choose_range([(row["seq"], int(row["size"])) for row in sizes], anchor, max_bytes=TIMELINE_BYTES)
        if chosen is None:
            return ()
        rows = await self._database.run(
            _TURNS, conversation=conversation, first_seq=chosen[0], last_seq=chosen[1], count=count
        )
        return [turn_from(row) for row in rows]

    async def _find_earlier(self, conversation: UUID | None, turns: Sequence[Turn]) -> CallOutline | None:
        if not turns:
            return None
        rows = await self._database.run(_EARLIER, conversation=conversation, first_seq=turns[0].seq)
        return _outline_from(rows[0]) if rows else None

    async def _load_marks(self, key: UUID | None, numbers: Collection[int]) -> Mapping[int, EpochMark]:
        rows = await self._database.run(_MARKS, conversation=key, numbers=sorted(numbers)) if numbers else ()
        return {row["number"]: _mark_from(row) for row in rows}

    async def _find_next(self, key: dict[str, Any]) -> CallKey | None:
        rows = await self._database.run(_NEXT, **key)
        return CallKey(turn_seq=rows[0]["turn_seq"], attempt=rows[0]["attempt"]) if rows else None

    async def _list_outlines(self, conversation: UUID | None, turns: Sequence[Turn]) -> dict[int, list[CallOutline]]:
        found: dict[int, list[CallOutline]] = defaultdict(list)
        if not turns:
            return found
        rows = await self._database.run(
            _OUTLINES,
            conversation=conversation,
            first_seq=turns[0].seq,
            last_seq=turns[-1].seq,
            count=_MAX_ATTEMPTS * len(turns),
        )
        for row in rows:
            found[row["turn_seq"]].append(_outline_from(row))
        return found

    async def _find_running(self, conversation: UUID | None, head: Row) -> RunningTurn | None:
        seq = head["lease_turn_seq"]
        if seq is None:
            return None
        rows = await self._database.run(
            _OUTLINES, conversation=conversation, first_seq=seq, last_seq=seq, count=_MAX_ATTEMPTS
        )
        return RunningTurn(
            seq=seq,
            owner=decode_text(head["lease_owner"]),
            lease_expires_at=head["lease_expires_at"],
            cancel_requested_at=head["cancel_requested_at"],
            calls=[_outline_from(row) for row in rows],
        )


def _mark_from(row: Row) -> EpochMark:
    return EpochMark(
        number=row["number"],
        reason=EpochReason(row["reason"]),
        assistant_version=row["assistant_version"],
        buffer_start_seq=row["buffer_start_seq"],
        created_at=row["created_at"],
        args=json_or_none(row["args"]),
    )


def _outline_from(row: Row) -> CallOutline:
    return CallOutline(
        turn_seq=row["turn_seq"],
        attempt=row["attempt"],
        provider=decode_text(row["provider"]),
        model=decode_text(row["model"]),
        epoch=row["epoch"],
        layer_order=order_or_none(row["layer_order"]) or LayerOrder.LAYERED,
        dynamic=row["dynamic"].decode("utf-8", "surrogatepass"),
        started_at=row["started_at"],
        first_byte_at=row["first_byte_at"],
        ended_at=row["ended_at"],
        status=row["status"],
        error_code=row["error_code"],
        usage=None if row["ended_at"] is None else usage_from(row),
        cost_usd=row["cost_usd"],
        cache_expected_tokens=row["cache_expected_tokens"],
        cache_miss_reason=text_or_none(row["cache_miss_reason"]),
        raw_length=row["raw_length"],
        repair_count=row["repair_count"],
        template_failure_count=row["template_failure_count"],
        warning_kinds=tuple(decode_text(kind) for kind in row["warning_kinds"] if kind is not None),
    )
