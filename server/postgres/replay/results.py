"""Results of replays: recorded once, listed in pages, with the answers and the judge's calls of a page in one query."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from server.conversation.block import Block, block_from_json, block_to_json
from server.conversation.errors import CursorInvalid
from server.conversation.identifiers import REPLAY, decode_id
from server.conversation.page import Page
from server.postgres.codec import decode_cursor, decode_json, encode_cursor, encode_json
from server.postgres.engine import Statement
from server.postgres.paging import bounded
from server.postgres.replay.conversation_tables import REPLAY_SCHEMA
from server.postgres.replay.rows import result_from, result_values
from server.postgres.replay.runs import ReplayRuns
from server.postgres.replay.statements import execute, item_key, lock_item, replay_key
from server.replay.rerun.replay import ItemLease
from server.replay.rerun.result import (
    AnswerBlocks,
    AnswerPosition,
    CallPosition,
    Outcome,
    ResultFilter,
    ResultOrder,
    StoredResult,
    TurnResult,
)

_ALL_RESULTS: Final = ResultFilter()
_RECORD: Final = Statement("""
INSERT INTO replay_results (conversation_id, replay_id, repetition, position, number, source_seq, replay_seq, attempt,
    outcome, kinds, similarity, severity, note, recorded, candidate, assertions, has_failed_assertion, judge, blocks)
SELECT i.conversation_id, i.replay_id, i.repetition, :position, i.number, :source_seq, :replay_seq, :attempt,
    :outcome, :kinds, :similarity, :severity, :note, :recorded::jsonb, :candidate::jsonb, :assertions::jsonb,
    :has_failed_assertion, :judge::jsonb, :blocks::jsonb
FROM replay_items i WHERE i.replay_id = :replay AND i.number = :number
ON CONFLICT DO NOTHING
""")
_DIVERGE: Final = Statement("""
UPDATE replay_items SET diverged_at_seq = :seq
WHERE replay_id = :replay AND number = :number AND (diverged_at_seq IS NULL OR diverged_at_seq > :seq)
""")
_SHOWN: Final = """
SELECT s.conversation_id, s.repetition, s.position, s.number, s.source_seq, s.replay_seq, s.attempt, s.outcome, s.kinds,
    s.similarity, s.severity, s.note, s.recorded, s.candidate, s.assertions, s.judge, i.replay_conversation_id
FROM replay_results s JOIN replay_items i ON i.replay_id = s.replay_id AND i.number = s.number
WHERE s.replay_id = :replay
"""
_IN_ORDER: Final = {
    ResultOrder.POSITION: """
    AND (s.number, s.position) > (:after_number::int, :after_position::int)
ORDER BY s.number, s.position LIMIT :count
""",
    ResultOrder.WORST: """
    AND s.severity <= :severity::float8
    AND (s.severity < :severity OR (s.number, s.position) > (:after_number::int, :after_position::int))
ORDER BY s.severity DESC, s.number, s.position LIMIT :count
""",
}
_FILTERS: Final = {
    "number": "AND s.number = :number",
    "first_position": "AND s.position >= :first_position",
    "outcome": "AND s.outcome = :outcome",
    "kind": "AND :kind = ANY(s.kinds)",
    "failed": "AND s.has_failed_assertion",
}
_LISTS: dict[tuple[ResultOrder, tuple[str, ...]], Statement] = {}
_COUNT: Final = Statement("""
SELECT s.number, s.outcome, count(*) AS total FROM replay_results s JOIN replays r ON r.id = s.replay_id
WHERE s.replay_id = :replay AND s.number = ANY(:numbers::int[]) AND (:tenant::uuid IS NULL OR r.tenant_id = :tenant)
GROUP BY s.number, s.outcome
""")
_ABOVE_MAX_SEVERITY: Final = 2.0
# The answers of a tool loop share a task, some turns earlier. After the end of the recording, the task is in the replay
# conversation.
_LOAD_ANSWERS: Final = Statement(f"""
SELECT s.number, s.position, s.blocks, answer.blocks AS recorded, coalesce(task.blocks, own.blocks) AS task
FROM replays r
CROSS JOIN unnest(:numbers::int[], :positions::int[]) AS wanted (number, position)
JOIN replay_results s ON s.replay_id = r.id AND s.number = wanted.number AND s.position = wanted.position
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
# Of several attempts: the one with an answer, else the last.
_JUDGE_CALLS: Final = Statement(f"""
SELECT DISTINCT ON (note ->> 'position') note ->> 'position' AS position, c.turn_seq, c.attempt
FROM replays r
JOIN replay_items i ON i.replay_id = r.id AND i.number = :number
JOIN {REPLAY_SCHEMA}.calls c ON c.conversation_id = i.replay_conversation_id AND c.turn_seq < 0
CROSS JOIN jsonb_array_elements(c.warnings) AS note
WHERE r.id = :replay AND (:tenant::uuid IS NULL OR r.tenant_id = :tenant)
    AND note ->> 'kind' = 'judge' AND note ->> 'position' = ANY(:positions::text[])
ORDER BY note ->> 'position', (c.ended_at IS NOT NULL AND c.error_code IS NULL) DESC, c.turn_seq, c.attempt DESC
""")  # noqa: S608  reason: constants of our own only


class StoredResults(ReplayRuns):
    """Results are inserted once and never changed."""

    async def record_result(self, lease: ItemLease, result: TurnResult, blocks: Sequence[Block]) -> None:
        key = item_key(lease)
        answer = encode_json([block_to_json(block) for block in blocks])
        async with self._database.transaction() as connection:
            await lock_item(connection, lease)
            await execute(connection, _RECORD, blocks=answer, **key, **result_values(result))
            if result.source_seq is not None and result.outcome is Outcome.DIFFERENT:
                await execute(connection, _DIVERGE, seq=result.source_seq, **key)

    async def list_results(
        self,
        tenant_id: str | None,
        replay_id: str,
        *,
        wanted: ResultFilter = _ALL_RESULTS,
        cursor: str | None = None,
        limit: int = 20,
    ) -> Page[StoredResult]:
        await self._require_replay(tenant_id, replay_id)
        used: dict[str, Any] = {
            "number": wanted.number,
            "first_position": wanted.first_position,
            "outcome": None if wanted.outcome is None else str(wanted.outcome),
            "kind": None if wanted.kind is None else str(wanted.kind),
        }
        used = {name: value for name, value in used.items() if value is not None}
        filters = (*used, "failed") if wanted.has_failed_assertion else tuple(used)
        statement = _statement_for(wanted.order, filters)
        position = _decode_position(cursor)
        rows = await self._database.run(
            statement,
            replay=decode_id(REPLAY, replay_id),
            count=bounded(limit) + 1,
            **used,
            **{name: value for name, value in position.items() if name in statement.names},
        )
        shown = bounded(limit)
        items = [result_from(row) for row in rows[:shown]]
        return Page(items=items, next_cursor=_cursor_after(items[-1]) if len(rows) > shown else None)

    async def count_outcomes(
        self, tenant_id: str | None, replay_id: str, numbers: Sequence[int]
    ) -> Mapping[int, Mapping[Outcome, int]]:
        rows = await self._database.run(_COUNT, numbers=list(numbers), **replay_key(tenant_id, replay_id))
        counts: dict[int, dict[Outcome, int]] = {row["number"]: dict.fromkeys(Outcome, 0) for row in rows}
        for row in rows:
            counts[row["number"]][Outcome(row["outcome"])] = row["total"]
        return counts

    async def load_answers(
        self, tenant_id: str | None, replay_id: str, positions: Sequence[AnswerPosition]
    ) -> Mapping[AnswerPosition, AnswerBlocks]:
        rows = await self._database.run(
            _LOAD_ANSWERS,
            numbers=[number for number, _ in positions],
            positions=[position for _, position in positions],
            **replay_key(tenant_id, replay_id),
        )
        return {
            (row["number"], row["position"]): AnswerBlocks(
                task=_decode_blocks(row["task"]) or (),
                recorded=_decode_blocks(row["recorded"]),
                candidate=_decode_blocks(row["blocks"]) or (),
            )
            for row in rows
        }

    async def find_judge_calls(
        self, tenant_id: str | None, replay_id: str, number: int, positions: Sequence[int]
    ) -> Mapping[int, CallPosition]:
        rows = await self._database.run(
            _JUDGE_CALLS,
            number=number,
            positions=[str(position) for position in positions],
            **replay_key(tenant_id, replay_id),
        )
        return {int(row["position"]): (row["turn_seq"], row["attempt"]) for row in rows}


def _statement_for(order: ResultOrder, filters: tuple[str, ...]) -> Statement:
    """Return one statement per set of filters: a condition on an absent filter would hide an index from the planner."""
    if (order, filters) not in _LISTS:
        conditions = "\n".join(_FILTERS[name] for name in filters)
        _LISTS[order, filters] = Statement(f"{_SHOWN}{conditions}{_IN_ORDER[order]}")
    return _LISTS[order, filters]


def _decode_position(cursor: str | None) -> dict[str, Any]:
    if cursor is None:
        return {"severity": _ABOVE_MAX_SEVERITY, "after_number": 0, "after_position": 0}
    severity, _, rest = decode_cursor(cursor, str).partition(":")
    number, _, position = rest.partition(":")
    try:
        return {"severity": float(severity), "after_number": int(number), "after_position": int(position)}
    except ValueError as error:
        raise CursorInvalid from error


def _cursor_after(last: StoredResult) -> str:
    return encode_cursor(f"{last.result.severity!r}:{last.number}:{last.result.position}")


def _decode_blocks(stored: Any) -> tuple[Block, ...] | None:
    return None if stored is None else tuple(block_from_json(item) for item in decode_json(stored))
