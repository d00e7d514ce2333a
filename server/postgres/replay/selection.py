"""Which conversations a replay is about: those that are named, or those that an operator's filters let through.

What the filters let through is read page by page as a list of conversations is, and of a sample only the sample is
kept: its members are those whose ids hash lowest together with the seed. So the same seed takes the same conversations
in the same order, in whatever order they are met.
"""

import hashlib
import heapq
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from server.conversation.errors import ConversationNotFound
from server.conversation.identifiers import CONVERSATION, TENANT, decode_id
from server.conversation.page import PAGE_LIMIT
from server.inspection.port import InspectionFilter
from server.postgres.engine import Database, Statement
from server.postgres.inspection.conversation_list import list_conversations
from server.replay.rerun.checks import check_size
from server.replay.rerun.replay import CONVERSATION_LIMIT, ReplayLimits, Selection

_CHUNK: Final = 5_000
_KNOWN: Final = Statement("""
SELECT count(*) FROM conversations WHERE id = ANY(:ids::uuid[]) AND (tenant_id = :tenant) IS TRUE
""")


async def select_conversations(database: Database, tenant_id: str, selection: Selection) -> Sequence[str]:
    """See the port."""
    if selection.conversation_ids is None:
        found = _matching(database, tenant_id, selection.filters)
    else:
        await _require_known(database, tenant_id, selection.conversation_ids)
        found = _each(selection.conversation_ids)
    if selection.sample_count is None:
        chosen = await _take(found, CONVERSATION_LIMIT + 1)
    else:
        chosen = await _sample(found, selection.sample_count, selection.sample_seed)
    check_size(len(chosen), ReplayLimits())
    return chosen


def chunks_of(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    """So many at a time as one statement takes."""
    return (ids[start : start + _CHUNK] for start in range(0, len(ids), _CHUNK))


async def _matching(database: Database, tenant_id: str, filters: InspectionFilter) -> AsyncIterator[str]:
    """Each once. What becomes active while the list is walked moves to its front, where nobody looks any more."""
    until = filters.active_before or datetime.now(UTC)
    fixed = replace(filters, active_before=until)
    cursor: str | None = None
    while True:
        page = await list_conversations(database, tenant_id, fixed, cursor, PAGE_LIMIT)
        for conversation in page.items:
            yield conversation.id
        cursor = page.next_cursor
        if cursor is None:
            return


async def _each(ids: Sequence[str]) -> AsyncIterator[str]:
    for conversation_id in ids:
        yield conversation_id


async def _take(found: AsyncIterator[str], limit: int) -> list[str]:
    chosen: list[str] = []
    async for conversation_id in found:
        chosen.append(conversation_id)
        if len(chosen) == limit:
            break
    return chosen


async def _sample(found: AsyncIterator[str], count: int, seed: int) -> list[str]:
    """The `count` with the lowest hashes. The heap has the highest of these at its top, since it is the next to go."""
    lowest: list[tuple[int, str]] = []
    async for conversation_id in found:
        drawn = (-_draw(seed, conversation_id), conversation_id)
        if len(lowest) < count:
            heapq.heappush(lowest, drawn)
        else:
            heapq.heappushpop(lowest, drawn)
    return [conversation_id for _, conversation_id in sorted(lowest, reverse=True)]


def _draw(seed: int, conversation_id: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{conversation_id}".encode()).digest())


async def _require_known(database: Database, tenant_id: str, ids: Sequence[str]) -> None:
    tenant = decode_id(TENANT, tenant_id)
    for chunk in chunks_of(ids):
        decoded = {decode_id(CONVERSATION, conversation_id) for conversation_id in chunk}
        rows = await database.run(_KNOWN, ids=list(decoded), tenant=tenant)
        if None in decoded or rows[0][0] != len(decoded):
            raise ConversationNotFound("A conversation of the selection does not exist.")
