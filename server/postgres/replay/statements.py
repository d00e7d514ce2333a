"""Steps that several transactions on replays have in common. Each runs while the replay's row is held."""

from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

from server.postgres.connections import Connection
from server.postgres.engine import Statement
from server.postgres.rows import Row
from server.replay.rerun.replay import ItemState, ReplayState

_LOSE: Final = Statement("""
WITH open AS (
    SELECT number, call_usd, call_tokens FROM replay_items
    WHERE replay_id = :replay AND number = ANY(:numbers::int[]) AND call_id IS NOT NULL
    FOR UPDATE
),
noted AS (
    UPDATE replay_items i SET call_id = NULL, call_usd = NULL, call_tokens = NULL, lost_count = i.lost_count + 1,
        spent_usd = i.spent_usd + coalesce(open.call_usd, 0), spent_tokens = i.spent_tokens + open.call_tokens
    FROM open WHERE i.replay_id = :replay AND i.number = open.number
),
total AS (
    SELECT coalesce(sum(call_usd), 0) AS usd, coalesce(sum(call_tokens), 0) AS tokens,
        count(*) FILTER (WHERE call_usd IS NULL) AS unpriced
    FROM open
)
UPDATE replays SET reserved_usd = reserved_usd - total.usd, reserved_tokens = reserved_tokens - total.tokens,
    spent_usd = spent_usd + total.usd, spent_tokens = spent_tokens + total.tokens,
    unpriced_count = unpriced_count + total.unpriced
FROM total WHERE id = :replay
""")
_CHANGE_STATE: Final = Statement("""
UPDATE replays SET state = :state, ended_at = CASE WHEN :is_end::boolean THEN now() END WHERE id = :replay
""")


_END_WAITING: Final = Statement("""
UPDATE replay_items SET state = :state, ended_at = now()
WHERE replay_id = :replay AND (state = 'waiting' OR state = 'running' AND lease_expires_at <= now())
RETURNING CASE WHEN call_id IS NOT NULL THEN number END AS open_number
""")
# Of each state the first row will do, however many there are.
_HAS_OPEN: Final = Statement("""
SELECT EXISTS (SELECT FROM replay_items WHERE replay_id = :replay AND state = 'waiting')
    OR EXISTS (SELECT FROM replay_items WHERE replay_id = :replay AND state = 'running')
""")
ITEMS_END_AS: Final = {ReplayState.CANCELLED: ItemState.CANCELLED, ReplayState.STOPPED_BY_BUDGET: ItemState.SKIPPED}
"""What becomes of the items of a replay that goes on no more."""


async def change_state(connection: Connection, replay: UUID, state: ReplayState) -> None:
    """Items that nobody runs end with a replay that does."""
    is_end = state not in {ReplayState.RUNNING, ReplayState.PAUSED}
    await execute(connection, _CHANGE_STATE, replay=replay, state=str(state), is_end=is_end)
    ended = ITEMS_END_AS.get(state)
    if ended is not None:
        rows = await fetch(connection, _END_WAITING, replay=replay, state=str(ended))
        await lose_calls(connection, replay, [row["open_number"] for row in rows if row["open_number"] is not None])


async def end_if_done(connection: Connection, replay: UUID) -> None:
    """A replay that was not ended otherwise is done with its last item."""
    row = await fetch_one(connection, _HAS_OPEN, replay=replay)
    if row is not None and not row[0]:
        await change_state(connection, replay, ReplayState.DONE)


async def lose_calls(connection: Connection, replay: UUID, numbers: Sequence[int]) -> None:
    """Calls of these items that are still on their way are so no more: each has come to its estimate."""
    if numbers:
        await execute(connection, _LOSE, replay=replay, numbers=list(numbers))


async def execute(connection: Connection, statement: Statement, **values: Any) -> int:
    """Runs a statement of which only the number of rows counts: Postgres says `UPDATE 3`."""
    status = await connection.execute(statement.sql, *statement.arguments(values))
    return int(status.rpartition(" ")[2])


async def fetch(connection: Connection, statement: Statement, **values: Any) -> list[Row]:
    """All rows within a transaction."""
    return await connection.fetch(statement.sql, *statement.arguments(values))


async def fetch_one(connection: Connection, statement: Statement, **values: Any) -> Row | None:
    """The first row within a transaction."""
    return await connection.fetchrow(statement.sql, *statement.arguments(values))
