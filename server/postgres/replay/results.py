"""Results of replays: written once, read in pages."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from server.conversation.block import Block, block_to_json
from server.conversation.errors import CursorInvalid
from server.conversation.identifiers import REPLAY, decode_id
from server.conversation.page import Page
from server.postgres.codec import decode_cursor, encode_cursor, encode_json
from server.postgres.engine import Database, Statement
from server.postgres.paging import bounded
from server.postgres.replay.items import lock_item
from server.postgres.replay.rows import result_from, result_values
from server.postgres.replay.runs import replay_key, require_replay
from server.postgres.replay.statements import execute
from server.replay.rerun.replay import ItemLease
from server.replay.rerun.result import Outcome, ResultFilter, ResultOrder, StoredResult, TurnResult

_RECORD: Final = Statement("""
INSERT INTO replay_results (conversation_id, replay_id, repetition, place, number, source_seq, replay_seq, attempt,
    outcome, kinds, similarity, severity, note, recorded, candidate, assertions, has_failed_assertion, judge, blocks)
SELECT i.conversation_id, i.replay_id, i.repetition, :place, i.number, :source_seq, :replay_seq, :attempt,
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
SELECT s.conversation_id, s.repetition, s.place, s.number, s.source_seq, s.replay_seq, s.attempt, s.outcome, s.kinds,
    s.similarity, s.severity, s.note, s.recorded, s.candidate, s.assertions, s.judge, i.replay_conversation_id
FROM replay_results s JOIN replay_items i ON i.replay_id = s.replay_id AND i.number = s.number
WHERE s.replay_id = :replay
"""
_IN_ORDER: Final = {
    ResultOrder.PLACE: """
    AND (s.number, s.place) > (:after_number::int, :after_place::int)
ORDER BY s.number, s.place LIMIT :count
""",
    ResultOrder.WORST: """
    AND s.severity <= :severity::float8
    AND (s.severity < :severity OR (s.number, s.place) > (:after_number::int, :after_place::int))
ORDER BY s.severity DESC, s.number, s.place LIMIT :count
""",
}
_FILTERS: Final = {
    "number": "AND s.number = :number",
    "first_place": "AND s.place >= :first_place",
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
_WORSE_THAN_ALL: Final = 2.0


async def record_result(database: Database, lease: ItemLease, result: TurnResult, blocks: Sequence[Block]) -> None:
    """See the port."""
    key = {"replay": decode_id(REPLAY, lease.replay_id), "number": lease.number}
    answer = encode_json([block_to_json(block) for block in blocks])
    async with database.transaction() as connection:
        await lock_item(connection, lease)
        await execute(connection, _RECORD, blocks=answer, **key, **result_values(result))
        if result.source_seq is not None and result.outcome is Outcome.DIFFERENT:
            await execute(connection, _DIVERGE, seq=result.source_seq, **key)


async def list_results(
    database: Database, tenant_id: str | None, replay_id: str, wanted: ResultFilter, cursor: str | None, limit: int
) -> Page[StoredResult]:
    """See the port."""
    await require_replay(database, tenant_id, replay_id)
    used: dict[str, Any] = {
        "number": wanted.number,
        "first_place": wanted.first_place,
        "outcome": None if wanted.outcome is None else str(wanted.outcome),
        "kind": None if wanted.kind is None else str(wanted.kind),
    }
    used = {name: value for name, value in used.items() if value is not None}
    filters = (*used, "failed") if wanted.has_failed_assertion else tuple(used)
    statement = _statement_for(wanted.order, filters)
    place = _read_place(cursor)
    rows = await database.run(
        statement,
        replay=decode_id(REPLAY, replay_id),
        count=bounded(limit) + 1,
        **used,
        **{name: value for name, value in place.items() if name in statement.names},
    )
    shown = bounded(limit)
    items = [result_from(row) for row in rows[:shown]]
    return Page(items=items, next_cursor=_cursor_behind(items[-1]) if len(rows) > shown else None)


async def count_outcomes(
    database: Database, tenant_id: str | None, replay_id: str, numbers: Sequence[int]
) -> Mapping[int, Mapping[Outcome, int]]:
    """See the port."""
    rows = await database.run(_COUNT, numbers=list(numbers), **replay_key(tenant_id, replay_id))
    counts: dict[int, dict[Outcome, int]] = {row["number"]: dict.fromkeys(Outcome, 0) for row in rows}
    for row in rows:
        counts[row["number"]][Outcome(row["outcome"])] = row["total"]
    return counts


def _statement_for(order: ResultOrder, filters: tuple[str, ...]) -> Statement:
    """One statement per set of filters: a filter that is not there must not keep the planner from an index."""
    if (order, filters) not in _LISTS:
        conditions = "\n".join(_FILTERS[name] for name in filters)
        _LISTS[order, filters] = Statement(f"{_SHOWN}{conditions}{_IN_ORDER[order]}")
    return _LISTS[order, filters]


def _read_place(cursor: str | None) -> dict[str, Any]:
    if cursor is None:
        return {"severity": _WORSE_THAN_ALL, "after_number": 0, "after_place": 0}
    severity, _, rest = decode_cursor(cursor, str).partition(":")
    number, _, place = rest.partition(":")
    try:
        return {"severity": float(severity), "after_number": int(number), "after_place": int(place)}
    except ValueError as error:
        raise CursorInvalid from error


def _cursor_behind(last: StoredResult) -> str:
    return encode_cursor(f"{last.result.severity!r}:{last.number}:{last.result.place}")
