"""Erasure of a whole replay: its items and replay conversations in batches, the replay's row last.

An erasure that was interrupted can be repeated.
"""

from collections import Counter
from typing import Any, Final
from uuid import UUID

from server.conversation.audit import Action, Actor, AuditDraft
from server.conversation.errors import ReplayBusy, ReplayNotFound
from server.conversation.identifiers import REPLAY, TENANT, encode_id
from server.conversation.store import ErasureReport
from server.postgres.connections import Connection
from server.postgres.conversation.erasure import REPLAY_ROWS
from server.postgres.engine import Statement
from server.postgres.inspection.audit_log import append_on
from server.postgres.replay.statements import ReplayDatabase, change_state, execute, fetch, fetch_one, lock_replay
from server.postgres.rows import Row
from server.replay.rerun.replay import ReplayState

BATCH: Final = 100
"""Items per transaction."""

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


class ReplayErasure(ReplayDatabase):
    """Each batch is deleted in its own transaction, under the lock of the replay's row."""

    async def erase_replay(
        self, tenant_id: str | None, replay_id: str, *, actor: Actor, dry_run: bool = False
    ) -> ErasureReport:
        rows = await (self._count(tenant_id, replay_id) if dry_run else self._delete(tenant_id, replay_id, actor))
        return ErasureReport(rows={name: count for name, count in rows.items() if count})

    async def _count(self, tenant_id: str | None, replay_id: str) -> Counter[str]:
        rows: Counter[str] = Counter(replays=1)
        after = 0
        while True:
            async with self._database.transaction() as connection:
                replay = await lock_replay(connection, tenant_id, replay_id)
                batch = await fetch(connection, _LIST_BATCH, replay=replay["id"], after=after, count=BATCH)
                counted = await fetch_one(connection, _COUNT_RESULTS, **_key(replay["id"], batch))
                rows.update((await REPLAY_ROWS.count(connection, replay["tenant_id"], _conversations(batch)))[0])
            rows.update({"replay_items": len(batch), "replay_results": counted[0] if counted else 0})
            if len(batch) < BATCH:
                return rows
            after = batch[-1]["number"]

    async def _delete(self, tenant_id: str | None, replay_id: str, actor: Actor) -> Counter[str]:
        rows: Counter[str] = Counter()
        while True:
            async with self._database.transaction() as connection:
                replay = await _lock_ended(connection, tenant_id, replay_id)
                batch = await fetch(connection, _LIST_BATCH, replay=replay["id"], after=0, count=BATCH)
                key = _key(replay["id"], batch)
                rows.update(await REPLAY_ROWS.delete(connection, replay["tenant_id"], _conversations(batch)))
                rows["replay_results"] += await execute(connection, _DELETE_RESULTS, **key)
                rows["replay_items"] += await execute(connection, _DELETE_ITEMS, **key)
                if len(batch) < BATCH:
                    rows["replays"] += await execute(connection, _DELETE, replay=replay["id"])
                    audited = AuditDraft(
                        tenant_id=encode_id(TENANT, replay["tenant_id"]),
                        actor=actor,
                        action=Action.ERASE_REPLAY,
                        object_id=encode_id(REPLAY, replay["id"]),
                        details={"item_count": replay["item_count"]},
                    )
                    await append_on(connection, audited)
                    return rows


async def _lock_ended(connection: Connection, tenant_id: str | None, replay_id: str) -> Row:
    """Lock a replay and make sure that it cannot be continued. Raises `ReplayBusy`, `ReplayNotFound`."""
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


def _conversations(batch: list[Row]) -> list[UUID]:
    return [row["replay_conversation_id"] for row in batch if row["replay_conversation_id"] is not None]


def _key(replay: UUID, batch: list[Row]) -> dict[str, Any]:
    return {"replay": replay, "numbers": [row["number"] for row in batch]}
