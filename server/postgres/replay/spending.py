"""The spending of replays: reserved before a call is sent, settled when it has ended.

An item has one call at a time, so an open call is stored in the item's row, and the replay's row has the sum. Both are
changed only while the replay's row is locked, so the sums are always right, and one decision is made at a time.
"""

from typing import Final
from uuid import UUID

from server.conversation.errors import LeaseLost
from server.postgres.engine import Statement
from server.postgres.replay.rows import limits_from
from server.postgres.replay.statements import (
    ReplayDatabase,
    change_state,
    execute,
    fetch,
    fetch_one,
    item_key,
    lock_leased_replay,
    lose_calls,
)
from server.postgres.rows import Row
from server.replay.rerun.budget import BudgetState, must_wait_for_open_calls, next_call_after, plan_call
from server.replay.rerun.replay import (
    CallEstimate,
    CallPermission,
    CallSpending,
    Granted,
    ItemLease,
    ReplayState,
    Stopped,
)

_MAX_PROVIDER_PAUSE_SECONDS: Final = 3600.0

# The clock is read after the lock is taken: a transaction that waited for it needs the time after the wait.
_LOCK_CALLER: Final = Statement("""
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
_PAUSE_PROVIDER: Final = Statement("""
INSERT INTO provider_holds (provider, held_until) VALUES (:provider, now() + make_interval(secs => :seconds))
ON CONFLICT (provider) DO UPDATE SET held_until = greatest(provider_holds.held_until, excluded.held_until)
""")


class CallReservations(ReplayDatabase):
    """The limits of a replay hold over all processes together, because its row is locked for every decision."""

    async def reserve_call(
        self, lease: ItemLease, reservation: UUID, *, provider: str, estimate: CallEstimate
    ) -> CallPermission:
        async with self._database.transaction() as connection:
            replay = await lock_leased_replay(connection, lease)
            item = await fetch_one(connection, _LOCK_CALLER, token=lease.token, provider=provider, **item_key(lease))
            if item is None:
                raise LeaseLost("Another process runs the item now.")
            if item["call_id"] == reservation:
                return Granted()
            if item["call_id"] is not None:
                # The last call was never settled: its process could not reach the database and gave up.
                await lose_calls(connection, replay["id"], [lease.number])
                replay = await lock_leased_replay(connection, lease)
            if must_wait_for_open_calls(_budget_state(replay, item), estimate):
                # Open calls of dead processes cannot end below their estimates any more.
                dead = await fetch(connection, _LIST_DEAD, replay=replay["id"])
                await lose_calls(connection, replay["id"], [row["number"] for row in dead])
                replay = await lock_leased_replay(connection, lease)
            permission = plan_call(_budget_state(replay, item), estimate)
            if isinstance(permission, Granted):
                await execute(
                    connection,
                    _RESERVE,
                    reservation=reservation,
                    usd=estimate.usd,
                    tokens=estimate.tokens,
                    next_call_at=next_call_after(limits_from(replay), item["now"]),
                    **item_key(lease),
                )
            elif isinstance(permission, Stopped) and ReplayState(replay["state"]) is ReplayState.RUNNING:
                await change_state(connection, replay["id"], permission.state)
        return permission

    async def settle_call(self, lease: ItemLease, reservation: UUID, spending: CallSpending) -> None:
        async with self._database.transaction() as connection:
            await lock_leased_replay(connection, lease)
            reserved = await fetch_one(connection, _FIND_OPEN, reservation=reservation, **item_key(lease))
            if reserved is None:
                return
            await execute(
                connection,
                _SETTLE,
                usd=spending.usd,
                tokens=spending.tokens,
                reserved_usd=reserved["call_usd"],
                reserved_tokens=reserved["call_tokens"],
                **item_key(lease),
            )

    async def pause_provider(self, provider: str, seconds: float) -> None:
        bounded_seconds = max(0.0, min(seconds, _MAX_PROVIDER_PAUSE_SECONDS))
        await self._database.run(_PAUSE_PROVIDER, provider=provider, seconds=bounded_seconds)


def _budget_state(replay: Row, item: Row) -> BudgetState:
    return BudgetState(
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
