"""What the calls of replays may take and have taken: reserved before they leave, settled when they are over.

An item has one call at a time, so what is on its way stands in the item's row, and the replay's row has the sum. Who
changes either holds the replay's row: the sums are right at every moment, and the decision is made by one at a time.
"""

from typing import Any, Final
from uuid import UUID

from server.conversation.errors import LeaseLost
from server.conversation.identifiers import REPLAY, decode_id
from server.postgres.connections import Connection
from server.postgres.engine import Database, Statement
from server.postgres.replay.rows import limits_from
from server.postgres.replay.runs import hold_replay
from server.postgres.replay.statements import change_state, execute, fetch, fetch_one, lose_calls
from server.postgres.rows import Row
from server.replay.rerun.budget import Standing, is_in_the_way, next_call_after, plan_call
from server.replay.rerun.replay import (
    CallEstimate,
    CallPermission,
    CallSpending,
    Granted,
    ItemLease,
    ReplayState,
    Stopped,
)

_LONGEST_HOLD_SECONDS: Final = 3600.0

# The clock is read once the replay's row is held: whoever waited for it must not have looked before.
_LOCK_ITEM: Final = Statement("""
SELECT call_id, clock_timestamp() AS now,
    (SELECT held_until FROM provider_holds WHERE provider = :provider) AS held_until
FROM replay_items
WHERE replay_id = :replay AND number = :number AND lease_token = :token AND state = 'running'
FOR UPDATE
""")
_LIST_DEAD: Final = Statement("""
SELECT number FROM replay_items
WHERE replay_id = :replay AND state = 'running' AND lease_expires_at <= clock_timestamp() AND call_id IS NOT NULL
""")
_RESERVE: Final = Statement("""
WITH noted AS (
    UPDATE replay_items SET call_id = :reservation, call_usd = :usd, call_tokens = :tokens
    WHERE replay_id = :replay AND number = :number
)
UPDATE replays SET reserved_usd = reserved_usd + coalesce(:usd::numeric, 0),
    reserved_tokens = reserved_tokens + :tokens::bigint, next_call_at = :next_call_at
WHERE id = :replay
""")
_FIND_OPEN: Final = Statement("""
SELECT call_usd, call_tokens FROM replay_items
WHERE replay_id = :replay AND number = :number AND call_id = :reservation
FOR UPDATE
""")
_SETTLE: Final = Statement("""
WITH noted AS (
    UPDATE replay_items SET call_id = NULL, call_usd = NULL, call_tokens = NULL,
        spent_usd = spent_usd + coalesce(:usd::numeric, 0), spent_tokens = spent_tokens + :tokens::bigint
    WHERE replay_id = :replay AND number = :number
)
UPDATE replays SET reserved_usd = reserved_usd - coalesce(:reserved_usd::numeric, 0),
    reserved_tokens = reserved_tokens - :reserved_tokens::bigint,
    spent_usd = spent_usd + coalesce(:usd::numeric, 0), spent_tokens = spent_tokens + :tokens::bigint,
    unpriced_count = unpriced_count + CASE WHEN :usd::numeric IS NULL AND :tokens::bigint > 0 THEN 1 ELSE 0 END
WHERE id = :replay
""")
_HOLD: Final = Statement("""
INSERT INTO provider_holds (provider, held_until) VALUES (:provider, now() + make_interval(secs => :seconds))
ON CONFLICT (provider) DO UPDATE SET held_until = greatest(provider_holds.held_until, excluded.held_until)
""")


async def reserve_call(
    database: Database, lease: ItemLease, reservation: UUID, provider: str, estimate: CallEstimate
) -> CallPermission:
    """See the port."""
    async with database.transaction() as connection:
        replay = await hold_replay(connection, lease)
        item = await fetch_one(connection, _LOCK_ITEM, token=lease.token, provider=provider, **_key(lease))
        if item is None:
            raise LeaseLost("Another process runs the item now.")
        if item["call_id"] == reservation:
            return Granted()
        if item["call_id"] is not None:
            # The last one was never settled: its process could not reach the database, and has forgotten it.
            await lose_calls(connection, replay["id"], [lease.number])
            replay = await hold_replay(connection, lease)
        if is_in_the_way(_standing(replay, item), estimate):
            # Of the calls that stand in its way, those of the dead will not turn out cheaper any more.
            dead = await fetch(connection, _LIST_DEAD, replay=replay["id"])
            await lose_calls(connection, replay["id"], [row["number"] for row in dead])
            replay = await hold_replay(connection, lease)
        permission = plan_call(_standing(replay, item), estimate)
        await _follow(connection, lease, reservation, replay, permission, estimate, item)
    return permission


async def _follow(
    connection: Connection,
    lease: ItemLease,
    reservation: UUID,
    replay: Row,
    permission: CallPermission,
    estimate: CallEstimate,
    item: Row,
) -> None:
    if isinstance(permission, Granted):
        await execute(
            connection,
            _RESERVE,
            reservation=reservation,
            usd=estimate.usd,
            tokens=estimate.tokens,
            next_call_at=next_call_after(limits_from(replay), item["now"]),
            **_key(lease),
        )
    elif isinstance(permission, Stopped) and ReplayState(replay["state"]) is ReplayState.RUNNING:
        await change_state(connection, replay["id"], permission.state)


async def settle_call(database: Database, lease: ItemLease, reservation: UUID, spending: CallSpending) -> None:
    """See the port."""
    async with database.transaction() as connection:
        await hold_replay(connection, lease)
        reserved = await fetch_one(connection, _FIND_OPEN, reservation=reservation, **_key(lease))
        if reserved is None:
            return
        await execute(
            connection,
            _SETTLE,
            usd=spending.usd,
            tokens=spending.tokens,
            reserved_usd=reserved["call_usd"],
            reserved_tokens=reserved["call_tokens"],
            **_key(lease),
        )


async def hold_back(database: Database, provider: str, seconds: float) -> None:
    """See the port."""
    await database.run(_HOLD, provider=provider, seconds=max(0.0, min(seconds, _LONGEST_HOLD_SECONDS)))


def _standing(replay: Row, item: Row) -> Standing:
    return Standing(
        state=ReplayState(replay["state"]),
        limits=limits_from(replay),
        spent_usd=replay["spent_usd"],
        spent_tokens=replay["spent_tokens"],
        reserved_usd=replay["reserved_usd"],
        reserved_tokens=replay["reserved_tokens"],
        next_call_at=replay["next_call_at"],
        held_until=item["held_until"],
        now=item["now"],
    )


def _key(lease: ItemLease) -> dict[str, Any]:
    return {"replay": decode_id(REPLAY, lease.replay_id), "number": lease.number}
