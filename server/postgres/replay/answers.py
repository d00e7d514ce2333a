"""What was said in replays: the answers of a page with what they answer, and the judge's calls. One query a page."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from server.conversation.block import Block, block_from_json
from server.postgres.codec import decode_json
from server.postgres.engine import Database, Statement
from server.postgres.replay.conversation_tables import REPLAY_SCHEMA
from server.postgres.replay.runs import replay_key
from server.replay.rerun.result import AnswerPlace, CallPlace, Exchanged

# Of a tool loop all answers have the same task, some turns back. Where a candidate is where nobody was, its own past
# has the task.
_LOAD: Final = Statement(f"""
SELECT s.number, s.place, s.blocks, answer.blocks AS recorded, coalesce(task.blocks, own.blocks) AS task
FROM replays r
CROSS JOIN unnest(:numbers::int[], :places::int[]) AS wanted (number, place)
JOIN replay_results s ON s.replay_id = r.id AND s.number = wanted.number AND s.place = wanted.place
JOIN replay_items i ON i.replay_id = r.id AND i.number = s.number
LEFT JOIN turns answer ON answer.conversation_id = s.conversation_id AND answer.seq = s.source_seq
    AND answer.kind = 'model_response'
LEFT JOIN LATERAL (
    SELECT t.blocks FROM turns t
    WHERE t.conversation_id = s.conversation_id AND t.seq < s.source_seq AND t.kind = 'user_task'
    ORDER BY t.seq DESC LIMIT 1
) AS task ON true
LEFT JOIN LATERAL (
    SELECT t.blocks FROM {REPLAY_SCHEMA}.turns t
    WHERE s.source_seq IS NULL AND t.conversation_id = i.replay_conversation_id AND t.seq <= s.replay_seq
        AND t.kind = 'user_task'
    ORDER BY t.seq DESC LIMIT 1
) AS own ON true
WHERE r.id = :replay AND (:tenant::uuid IS NULL OR r.tenant_id = :tenant)
""")  # noqa: S608  reason: constants of our own only
# Of several attempts the one that was answered, else the last.
_JUDGE_CALLS: Final = Statement(f"""
SELECT DISTINCT ON (note ->> 'place') note ->> 'place' AS place, c.turn_seq, c.attempt
FROM replays r
JOIN replay_items i ON i.replay_id = r.id AND i.number = :number
JOIN {REPLAY_SCHEMA}.calls c ON c.conversation_id = i.replay_conversation_id AND c.turn_seq < 0
CROSS JOIN jsonb_array_elements(c.warnings) AS note
WHERE r.id = :replay AND (:tenant::uuid IS NULL OR r.tenant_id = :tenant)
    AND note ->> 'kind' = 'judge' AND note ->> 'place' = ANY(:places::text[])
ORDER BY note ->> 'place', (c.ended_at IS NOT NULL AND c.error_code IS NULL) DESC, c.turn_seq, c.attempt DESC
""")  # noqa: S608  reason: constants of our own only


async def load_answers(
    database: Database, tenant_id: str | None, replay_id: str, places: Sequence[AnswerPlace]
) -> Mapping[AnswerPlace, Exchanged]:
    """See the port."""
    rows = await database.run(
        _LOAD,
        numbers=[number for number, _ in places],
        places=[place for _, place in places],
        **replay_key(tenant_id, replay_id),
    )
    return {
        (row["number"], row["place"]): Exchanged(
            task=_blocks_of(row["task"]) or (),
            recorded=_blocks_of(row["recorded"]),
            candidate=_blocks_of(row["blocks"]) or (),
        )
        for row in rows
    }


async def find_judge_calls(
    database: Database, tenant_id: str | None, replay_id: str, number: int, places: Sequence[int]
) -> Mapping[int, CallPlace]:
    """See the port."""
    rows = await database.run(
        _JUDGE_CALLS, number=number, places=[str(place) for place in places], **replay_key(tenant_id, replay_id)
    )
    return {int(row["place"]): (row["turn_seq"], row["attempt"]) for row in rows}


def _blocks_of(stored: Any) -> tuple[Block, ...] | None:
    return None if stored is None else tuple(block_from_json(item) for item in decode_json(stored))
