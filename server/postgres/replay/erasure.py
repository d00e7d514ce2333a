"""Erasing a whole replay: its replay conversations and items some at a time, itself last. Broken off, it can be begun
again.
"""

from collections import Counter
from typing import Any, Final
from uuid import UUID

from server.conversation.audit import Action, Actor
from server.conversation.errors import ReplayBusy, ReplayNotFound
from server.conversation.identifiers import REPLAY, TENANT, encode_id
from server.conversation.store import ErasureReport
from server.postgres.connections import Connection
from server.postgres.conversation.erasure import REPLAY_ROWS
from server.postgres.engine import Database, Statement
from server.postgres.replay.runs import audit_replay, lock_replay
from server.postgres.replay.statements import change_state, execute, fetch, fetch_one
from server.postgres.rows import Row
from server.replay.rerun.replay import ReplayState

BATCH: Final = 100
"""So many items go in one transaction."""

_COUNT_LIVE: Final = Statement("""
SELECT count(*) FROM replay_items WHERE replay_id = :replay AND state = 'running' AND lease_expires_at > now()
""")
_LIST_BATCH: Final = Statement("""
SELECT number, replay_conversation_id FROM replay_items WHERE replay_id = :replay AND number > :after
ORDER BY number LIMIT :count
""")
_COUNT_RESULTS: Final = Statement("""
SELECT count(*) FROM replay_results WHERE replay_id = :replay AND number = ANY(:numbers::int[])
""")
_DELETE_RESULTS: Final = Statement("""
DELETE FROM replay_results WHERE replay_id = :replay AND number = ANY(:numbers::int[])
""")
_DELETE_ITEMS: Final = Statement("""
DELETE FROM replay_items WHERE replay_id = :replay AND number = ANY(:numbers::int[])
""")
_DELETE: Final = Statement("DELETE FROM replays WHERE id = :replay")


async def erase_replay(
    database: Database, tenant_id: str | None, replay_id: str, actor: Actor, *, dry_run: bool
) -> ErasureReport:
    """See the port."""
    rows: Counter[str] = Counter()
    if dry_run:
        await _count_all(database, tenant_id, replay_id, rows)
    else:
        await _delete_all(database, tenant_id, replay_id, actor, rows)
    return ErasureReport(rows={name: count for name, count in rows.items() if count})


async def _count_all(database: Database, tenant_id: str | None, replay_id: str, rows: Counter[str]) -> None:
    after = 0
    while True:
        async with database.transaction() as connection:
            replay = await lock_replay(connection, tenant_id, replay_id)
            batch = await fetch(connection, _LIST_BATCH, replay=replay["id"], after=after, count=BATCH)
            counted = await fetch_one(connection, _COUNT_RESULTS, **_key(replay["id"], batch))
            rows.update((await REPLAY_ROWS.count(connection, replay["tenant_id"], _replay_store(batch)))[0])
        rows.update({"replay_items": len(batch), "replay_results": counted[0] if counted else 0})
        if len(batch) < BATCH:
            break
        after = batch[-1]["number"]
    rows["replays"] = 1


async def _delete_all(
    database: Database, tenant_id: str | None, replay_id: str, actor: Actor, rows: Counter[str]
) -> None:
    while True:
        async with database.transaction() as connection:
            replay = await _hold_at_rest(connection, tenant_id, replay_id)
            batch = await fetch(connection, _LIST_BATCH, replay=replay["id"], after=0, count=BATCH)
            key = _key(replay["id"], batch)
            rows.update(await REPLAY_ROWS.delete(connection, replay["tenant_id"], _replay_store(batch)))
            rows["replay_results"] += await execute(connection, _DELETE_RESULTS, **key)
            rows["replay_items"] += await execute(connection, _DELETE_ITEMS, **key)
            if len(batch) < BATCH:
                rows["replays"] += await execute(connection, _DELETE, replay=replay["id"])
                await audit_replay(
                    connection,
                    encode_id(TENANT, replay["tenant_id"]),
                    encode_id(REPLAY, replay["id"]),
                    Action.ERASE_REPLAY,
                    actor,
                    item_count=replay["item_count"],
                )
                return


async def _hold_at_rest(connection: Connection, tenant_id: str | None, replay_id: str) -> Row:
    """The replay, which nobody can continue any more. Raises `ReplayBusy`, `ReplayNotFound`."""
    replay = await lock_replay(connection, tenant_id, replay_id)
    live = await fetch_one(connection, _COUNT_LIVE, replay=replay["id"])
    if live is None:
        raise ReplayNotFound
    state = ReplayState(replay["state"])
    if state is ReplayState.RUNNING or live[0]:
        raise ReplayBusy
    if state in {ReplayState.PAUSED, ReplayState.STOPPED_BY_BUDGET}:
        await change_state(connection, replay["id"], ReplayState.CANCELLED)
    return replay


def _replay_store(batch: list[Row]) -> list[UUID]:
    return [row["replay_conversation_id"] for row in batch if row["replay_conversation_id"] is not None]


def _key(replay: UUID, batch: list[Row]) -> dict[str, Any]:
    return {"replay": replay, "numbers": [row["number"] for row in batch]}
