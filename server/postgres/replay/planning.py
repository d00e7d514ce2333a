"""The plan of a replay: which conversations it takes, and what their recorded answers used.

A selection by filters is read page by page, and only its sample is kept: the conversations whose ids hash lowest
together with the seed. So the same seed takes the same conversations in the same order, however they are read.
"""

import hashlib
import heapq
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

from server.conversation.errors import ConversationNotFound
from server.conversation.identifiers import ASSISTANT, CONVERSATION, TENANT, decode_id
from server.conversation.page import PAGE_LIMIT
from server.conversation.usage import Usage
from server.inspection.conversation_list import InspectionFilter
from server.postgres.codec import decode_text
from server.postgres.conversation.assistants import AssistantStore
from server.postgres.engine import Statement
from server.postgres.inspection.inspector import PostgresInspector
from server.postgres.replay.statements import ReplayDatabase
from server.postgres.rows import Row
from server.replay.rerun.estimate import TIERS, RecordedUsage, estimate_replay
from server.replay.rerun.replay import (
    CONVERSATION_LIMIT,
    Candidate,
    ReplayDraft,
    ReplayEstimate,
    ReplayLimits,
    Selection,
)
from server.replay.rerun.validation import check_size

_IDS_PER_STATEMENT: Final = 5_000
_COUNT_KNOWN: Final = Statement("""
SELECT count(*) FROM conversations WHERE id = ANY(:ids::uuid[]) AND (tenant_id = :tenant) IS TRUE
""")
_SUM_USAGE: Final = Statement("""
SELECT coalesce(a.model, t.model) AS model,
    width_bucket((c.fresh_input_tokens + c.cache_read_tokens + c.cache_write_tokens)::bigint, :tiers::bigint[]) AS tier,
    count(*) AS call_count, count(*) FILTER (WHERE c.output_tokens IS NULL) AS unmeasured_count,
    coalesce(sum(c.fresh_input_tokens), 0) AS fresh_input_tokens,
    coalesce(sum(c.cache_read_tokens), 0) AS cache_read_tokens,
    coalesce(sum(c.cache_write_tokens), 0) AS cache_write_tokens,
    coalesce(sum(c.output_tokens), 0) AS output_tokens,
    coalesce(sum(c.reasoning_tokens), 0) AS reasoning_tokens
FROM unnest(:ids::uuid[]) AS chosen (id)
JOIN conversations v ON v.id = chosen.id AND (v.tenant_id = :tenant) IS TRUE
JOIN turns t ON t.conversation_id = v.id AND t.kind = 'model_response' AND t.state = 'complete'
LEFT JOIN calls c ON c.conversation_id = t.conversation_id AND c.turn_seq = t.seq AND c.attempt = t.attempt
LEFT JOIN assistants a ON a.id = coalesce(:assistant::uuid, v.assistant_id) AND a.version = :version::int
GROUP BY 1, tier
""")


class ReplayPlanning(ReplayDatabase):
    """Reads only."""

    async def select_conversations(self, tenant_id: str, selection: Selection) -> Sequence[str]:
        if selection.conversation_ids is None:
            found = self._list_matching(tenant_id, selection.filters)
        else:
            found = self._list_named(tenant_id, selection.conversation_ids)
        if selection.sample_count is None:
            chosen = await _take(found, CONVERSATION_LIMIT + 1)
        else:
            chosen = await _sample(found, selection.sample_count, selection.sample_seed)
        check_size(len(chosen), ReplayLimits())
        return chosen

    async def estimate(self, tenant_id: str, draft: ReplayDraft, conversation_ids: Sequence[str]) -> ReplayEstimate:
        recorded: list[RecordedUsage] = []
        assistant, version = await self._find_version(tenant_id, draft.candidate)
        for ids in _split(conversation_ids):
            # Only complete answers are requested again. Retries are not estimated.
            rows = await self._database.run(
                _SUM_USAGE,
                ids=[decode_id(CONVERSATION, conversation_id) for conversation_id in ids],
                tenant=decode_id(TENANT, tenant_id),
                tiers=list(TIERS),
                assistant=assistant,
                version=version,
            )
            recorded += [_recorded_from(row) for row in rows]
        return estimate_replay(draft, len(conversation_ids), recorded, datetime.now(UTC))

    async def _list_matching(self, tenant_id: str, filters: InspectionFilter) -> AsyncIterator[str]:
        """Yield each conversation once: one that becomes active meanwhile moves to a page that was read already."""
        fixed = replace(filters, active_before=filters.active_before or datetime.now(UTC))
        inspector = PostgresInspector(self._database)
        cursor: str | None = None
        while True:
            page = await inspector.list_conversations(tenant_id, filters=fixed, cursor=cursor, limit=PAGE_LIMIT)
            for conversation in page.items:
                yield conversation.id
            cursor = page.next_cursor
            if cursor is None:
                return

    async def _list_named(self, tenant_id: str, conversation_ids: Sequence[str]) -> AsyncIterator[str]:
        """Yield the ids in their order. Raises `ConversationNotFound` before the first if one is unknown."""
        tenant = decode_id(TENANT, tenant_id)
        for ids in _split(conversation_ids):
            decoded = {decode_id(CONVERSATION, conversation_id) for conversation_id in ids}
            rows = await self._database.run(_COUNT_KNOWN, ids=list(decoded), tenant=tenant)
            if None in decoded or rows[0][0] != len(decoded):
                raise ConversationNotFound("A conversation of the selection does not exist.")
        for conversation_id in conversation_ids:
            yield conversation_id

    async def _find_version(self, tenant_id: str, candidate: Candidate) -> tuple[UUID | None, int | None]:
        """Return the assistant and the version whose model answers; None means those of each conversation."""
        if candidate.assistant_id is None:
            return None, candidate.assistant_version
        chosen = await AssistantStore(self._database).load_assistant(
            tenant_id, candidate.assistant_id, candidate.assistant_version
        )
        return decode_id(ASSISTANT, chosen.id), chosen.version


def _split(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    return (ids[start : start + _IDS_PER_STATEMENT] for start in range(0, len(ids), _IDS_PER_STATEMENT))


async def _take(found: AsyncIterator[str], limit: int) -> list[str]:
    chosen: list[str] = []
    async for conversation_id in found:
        chosen.append(conversation_id)
        if len(chosen) == limit:
            break
    return chosen


async def _sample(found: AsyncIterator[str], count: int, seed: int) -> list[str]:
    """Return the `count` ids with the lowest hashes. The top of the heap is the highest of them, the next to go."""
    lowest: list[tuple[int, str]] = []
    async for conversation_id in found:
        hashed = hashlib.sha256(f"{seed}:{conversation_id}".encode()).digest()
        drawn = (-int.from_bytes(hashed), conversation_id)
        if len(lowest) < count:
            heapq.heappush(lowest, drawn)
        else:
            heapq.heappushpop(lowest, drawn)
    return [conversation_id for _, conversation_id in sorted(lowest, reverse=True)]


def _recorded_from(row: Row) -> RecordedUsage:
    return RecordedUsage(
        model=decode_text(row["model"]),
        # Null if no usage was recorded.
        tier=row["tier"] or 0,
        call_count=row["call_count"],
        unmeasured_count=row["unmeasured_count"],
        usage=Usage(
            fresh_input_tokens=int(row["fresh_input_tokens"]),
            cache_read_tokens=int(row["cache_read_tokens"]),
            cache_write_tokens=int(row["cache_write_tokens"]),
            output_tokens=int(row["output_tokens"]),
            reasoning_tokens=int(row["reasoning_tokens"]),
        ),
    )
