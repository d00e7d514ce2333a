"""What the parts of `PostgresReplays` share: the connections, the locks, and the steps of several transactions.

Every transaction that changes a replay or one of its items locks the replay's row first and the item's row second. So
there is one order of events, and no deadlock.
"""

from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

from server.conversation.errors import LeaseLost, ReplayNotFound
from server.conversation.identifiers import REPLAY, TENANT, decode_id, new_uuid
from server.postgres.connections import Connection
from server.postgres.engine import Database, Statement
from server.postgres.rows import Row
from server.replay.rerun.replay import ItemLease, ItemState, ReplayState

# Not FOR UPDATE: a transaction that inserts a result locks its item, and the foreign key reads the replay's row.
_LOCK_REPLAY: Final = Statement("""
SELECT * FROM replays WHERE id = :replay AND (:tenant::uuid IS NULL OR tenant_id = :tenant) FOR NO KEY UPDATE
""")
_LOCK_ITEM: Final = Statement("""
SELECT state, replay_conversation_id FROM replay_items
WHERE replay_id = :replay AND number = :number AND lease_token = :token
FOR UPDATE
""")
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
_END_UNOWNED: Final = Statement("""
UPDATE replay_items SET state = :state, ended_at = now()
WHERE replay_id = :replay AND (state = 'waiting' OR state = 'running' AND lease_expires_at <= now())
RETURNING CASE WHEN call_id IS NOT NULL THEN number END AS open_number
""")
# One index probe per state, however many items there are.
_HAS_OPEN: Final = Statement("""
SELECT EXISTS (SELECT FROM replay_items WHERE replay_id = :replay AND state = 'waiting')
    OR EXISTS (SELECT FROM replay_items WHERE replay_id = :replay AND state = 'running')
""")
ITEMS_END_AS: Final = {ReplayState.CANCELLED: ItemState.CANCELLED, ReplayState.STOPPED_BY_BUDGET: ItemState.SKIPPED}
"""The state in which open items end with a replay that was cancelled or stopped."""


class ReplayDatabase:
    """The connections of `PostgresReplays`, of which each part implements some methods of the port."""

    def __init__(self, database: Database, replay_store: Database) -> None:
        """`replay_store`: the same database, opened by `make_replay_database`."""
        self._database = database
        self._replay_store = replay_store


def replay_key(tenant_id: str | None, replay_id: str) -> dict[str, Any]:
    """Return the parameters that select a replay. A malformed tenant id selects none, instead of those of all."""
    tenant = None if tenant_id is None else decode_id(TENANT, tenant_id) or new_uuid()
    return {"replay": decode_id(REPLAY, replay_id), "tenant": tenant}


def item_key(lease: ItemLease) -> dict[str, Any]:
    """Return the parameters that select an item."""
    return {"replay": decode_id(REPLAY, lease.replay_id), "number": lease.number}


async def lock_replay(connection: Connection, tenant_id: str | None, replay_id: str) -> Row:
    """Lock the replay's row until the transaction ends. Raises `ReplayNotFound`."""
    row = await fetch_one(connection, _LOCK_REPLAY, **replay_key(tenant_id, replay_id))
    if row is None:
        raise ReplayNotFound
    return row


async def lock_leased_replay(connection: Connection, lease: ItemLease) -> Row:
    """Lock the replay's row for the owner of an item. Raises `LeaseLost` if the replay was erased."""
    try:
        return await lock_replay(connection, None, lease.replay_id)
    except ReplayNotFound:
        raise LeaseLost("The replay was erased.") from None


async def lock_item(connection: Connection, lease: ItemLease, *, may_have_ended: bool = False) -> Row:
    """Lock the item's row until the transaction ends. Raises `LeaseLost` if the lease does not own it any more."""
    item = await fetch_one(connection, _LOCK_ITEM, token=lease.token, **item_key(lease))
    if item is None or not (may_have_ended or ItemState(item["state"]) is ItemState.RUNNING):
        raise LeaseLost("Another process runs the item now.")
    return item


async def change_state(connection: Connection, replay: UUID, state: ReplayState) -> None:
    """Set the state of a locked replay. If it ends, its items without a living owner end with it."""
    is_end = state not in {ReplayState.RUNNING, ReplayState.PAUSED}
    await execute(connection, _CHANGE_STATE, replay=replay, state=str(state), is_end=is_end)
    ended = ITEMS_END_AS.get(state)
    if ended is not None:
        rows = await fetch(connection, _END_UNOWNED, replay=replay, state=str(ended))
        await lose_calls(connection, replay, [row["open_number"] for row in rows if row["open_number"] is not None])


async def end_if_done(connection: Connection, replay: UUID) -> None:
    """Set a locked replay to done if no item waits or runs."""
    row = await fetch_one(connection, _HAS_OPEN, replay=replay)
    if row is not None and not row[0]:
        await change_state(connection, replay, ReplayState.DONE)


async def lose_calls(connection: Connection, replay: UUID, numbers: Sequence[int]) -> None:
    """Count the open calls of these items of a locked replay as spent, each by its estimate."""
    if numbers:
        await execute(connection, _LOSE, replay=replay, numbers=list(numbers))


async def execute(connection: Connection, statement: Statement, **values: Any) -> int:
    """Run a statement and return the number of rows that it changed: Postgres reports `UPDATE 3`."""
    status = await connection.execute(statement.sql, *statement.arguments(values))
    return int(status.rpartition(" ")[2])


async def fetch(connection: Connection, statement: Statement, **values: Any) -> list[Row]:
    """Run a statement within a transaction and return all rows."""
    return await connection.fetch(statement.sql, *statement.arguments(values))


async def fetch_one(connection: Connection, statement: Statement, **values: Any) -> Row | None:
    """Run a statement within a transaction and return its first row."""
    return await connection.fetchrow(statement.sql, *statement.arguments(values))
