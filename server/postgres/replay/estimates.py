"""What the answers of conversations took, summed where it lies."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

from server.conversation.identifiers import ASSISTANT, CONVERSATION, TENANT, decode_id
from server.conversation.usage import Usage
from server.postgres.codec import decode_text
from server.postgres.conversation.assistants import AssistantStore
from server.postgres.engine import Database, Statement
from server.postgres.replay.selection import chunks_of
from server.postgres.rows import Row
from server.replay.rerun.estimate import TIERS, RecordedUsage, estimate_replay
from server.replay.rerun.replay import Candidate, ReplayDraft, ReplayEstimate

_SUM: Final = Statement("""
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


async def estimate(
    database: Database, tenant_id: str, draft: ReplayDraft, conversation_ids: Sequence[str]
) -> ReplayEstimate:
    """See the port. Only answers that are complete are asked for again; retries are not foreseen."""
    recorded: list[RecordedUsage] = []
    assistant, version = await _find_version(database, tenant_id, draft.candidate)
    for chunk in chunks_of(conversation_ids):
        rows = await database.run(
            _SUM,
            ids=[decode_id(CONVERSATION, conversation_id) for conversation_id in chunk],
            tenant=decode_id(TENANT, tenant_id),
            tiers=list(TIERS),
            assistant=assistant,
            version=version,
        )
        recorded += [_recorded_from(row) for row in rows]
    return estimate_replay(draft, len(conversation_ids), recorded, datetime.now(UTC))


async def _find_version(database: Database, tenant_id: str, candidate: Candidate) -> tuple[UUID | None, int | None]:
    """Whose model answers: one assistant's for all, that of one version of each, or, with neither, the recorded one."""
    if candidate.assistant_id is None:
        return None, candidate.assistant_version
    chosen = await AssistantStore(database).load_assistant(
        tenant_id, candidate.assistant_id, candidate.assistant_version
    )
    return decode_id(ASSISTANT, chosen.id), chosen.version


def _recorded_from(row: Row) -> RecordedUsage:
    return RecordedUsage(
        model=decode_text(row["model"]),
        # Without usage there is no size either.
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
