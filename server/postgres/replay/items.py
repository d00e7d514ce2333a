"""Items: claimed, renewed, given a replay conversation, ended, released, listed."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final
from uuid import UUID, uuid4

from server.conversation.assistant import AssistantDefinition
from server.conversation.conversation import Conversation, ConversationDraft
from server.conversation.errors import LeaseLost, ReplayNotFound
from server.conversation.identifiers import CONVERSATION, REPLAY, TENANT, decode_id, encode_id
from server.conversation.page import Page
from server.postgres.codec import decode_cursor
from server.postgres.connections import Connection
from server.postgres.conversation.assistants import create_assistant_on
from server.postgres.conversation.conversations import create_conversation_on, load_conversation_on
from server.postgres.engine import Statement
from server.postgres.paging import bounded, page_of
from server.postgres.replay.rows import ITEM_COLUMNS, draft_from, item_from
from server.postgres.replay.runs import ReplayRuns
from server.postgres.replay.statements import (
    ITEMS_END_AS,
    end_if_done,
    execute,
    fetch,
    fetch_one,
    item_key,
    lock_item,
    lock_leased_replay,
    lock_replay,
    lose_calls,
    replay_key,
)
from server.postgres.rows import Row
from server.replay.rerun.replay import ITEM_LIMIT, ClaimedItem, ItemLease, ItemState, OpenWork, ReplayItem, ReplayState

_COUNT_RUNNING: Final = Statement("""
SELECT count(*) FROM replay_items
WHERE replay_id = :replay AND state = 'running' AND lease_expires_at > clock_timestamp()
""")
_FIND_EXPIRED: Final = Statement("""
SELECT number, call_id FROM replay_items
WHERE replay_id = :replay AND state = 'running' AND lease_expires_at <= clock_timestamp()
ORDER BY number LIMIT 1 FOR UPDATE SKIP LOCKED
""")
_FIND_WAITING: Final = Statement("""
SELECT number, call_id FROM replay_items WHERE replay_id = :replay AND state = 'waiting'
ORDER BY number LIMIT 1 FOR UPDATE SKIP LOCKED
""")
_CLAIM: Final = Statement(f"""
UPDATE replay_items i SET state = 'running', lease_token = :token, lease_owner = :owner,
    lease_expires_at = clock_timestamp() + make_interval(secs => :lease_seconds),
    started_at = coalesce(i.started_at, now())
WHERE i.replay_id = :replay AND i.number = :number
RETURNING {ITEM_COLUMNS}, (
    SELECT count(*) FROM replay_results s WHERE s.replay_id = i.replay_id AND s.number = i.number
) AS result_count
""")  # noqa: S608  reason: constants of our own only
_RENEW: Final = Statement("""
UPDATE replay_items SET lease_expires_at = now() + make_interval(secs => :lease_seconds)
WHERE replay_id = :replay AND number = :number AND lease_token = :token AND state = 'running'
RETURNING number
""")
_SET_CONVERSATION: Final = Statement("""
UPDATE replay_items SET replay_conversation_id = :conversation WHERE replay_id = :replay AND number = :number
""")
# The token stays, so that ending an item twice succeeds.
_END: Final = Statement("""
UPDATE replay_items SET state = :state, error_code = :error_code, ended_at = now(), lease_expires_at = NULL
WHERE replay_id = :replay AND number = :number
""")
_RELEASE: Final = Statement("""
UPDATE replay_items SET state = 'waiting', lease_token = NULL, lease_owner = NULL, lease_expires_at = NULL
WHERE replay_id = :replay AND number = :number
""")
_LIST_SQL: Final = f"""
SELECT {ITEM_COLUMNS} FROM replay_items i
WHERE i.replay_id = :replay AND i.number > :after %state% ORDER BY i.number LIMIT :count
"""  # noqa: S608  reason: constants of our own only
_LIST: Final = Statement(_LIST_SQL.replace("%state%", ""))
_LIST_IN_STATE: Final = Statement(_LIST_SQL.replace("%state%", "AND i.state = :state"))
_LOAD: Final = Statement(f"""
SELECT {ITEM_COLUMNS} FROM replay_items i JOIN replays r ON r.id = i.replay_id
WHERE i.replay_id = :replay AND i.number = :number AND (:tenant::uuid IS NULL OR r.tenant_id = :tenant)
""")  # noqa: S608  reason: constants of our own only
_LIST_ABANDONED: Final = Statement("""
SELECT DISTINCT i.replay_id, r.state FROM replay_items i JOIN replays r ON r.id = i.replay_id
WHERE i.state = 'running' AND i.lease_expires_at <= now() AND r.state = ANY(:states::text[])
""")
_END_ABANDONED: Final = Statement("""
UPDATE replay_items SET state = :state, ended_at = now()
WHERE replay_id = :replay AND state = 'running' AND lease_expires_at <= now()
RETURNING number
""")
_LIST_OPEN: Final = Statement("""
SELECT r.id, least(r.parallelism - live.total, open.total) AS slot_count
FROM replays r
CROSS JOIN LATERAL (
    SELECT count(*) AS total FROM replay_items i
    WHERE i.replay_id = r.id AND i.state = 'running' AND i.lease_expires_at > now()
) AS live
CROSS JOIN LATERAL (
    SELECT count(*) AS total FROM (
        SELECT FROM replay_items i WHERE i.replay_id = r.id AND i.state = 'waiting'
        UNION ALL
        SELECT FROM replay_items i WHERE i.replay_id = r.id AND i.state = 'running' AND i.lease_expires_at <= now()
        LIMIT r.parallelism
    ) AS claimable
) AS open
WHERE r.state = 'running' AND open.total > 0 AND live.total < r.parallelism
ORDER BY r.id LIMIT :count
""")


class LeasedItems(ReplayRuns):
    """Items are leased as turns are: the token of the newest lease is the right to write."""

    async def claim_item(self, replay_id: str, *, owner: str, lease_seconds: float) -> ClaimedItem | None:
        async with self._database.transaction() as connection:
            try:
                row = await lock_replay(connection, None, replay_id)
            except ReplayNotFound:
                return None
            if ReplayState(row["state"]) is not ReplayState.RUNNING:
                return None
            replay: UUID = row["id"]
            running = await fetch_one(connection, _COUNT_RUNNING, replay=replay)
            if running is None or running[0] >= row["parallelism"]:
                return None
            found = await fetch_one(connection, _FIND_EXPIRED, replay=replay) or await fetch_one(
                connection, _FIND_WAITING, replay=replay
            )
            if found is None:
                return None
            await lose_calls(connection, replay, [found["number"]])
            lease = ItemLease(replay_id=replay_id, number=found["number"], token=uuid4())
            claimed = await fetch_one(
                connection, _CLAIM, token=lease.token, owner=owner, lease_seconds=lease_seconds, **item_key(lease)
            )
            if claimed is None:
                return None
            return ClaimedItem(
                lease=lease,
                item=item_from(claimed),
                tenant_id=encode_id(TENANT, row["tenant_id"]),
                draft=draft_from(row),
                replay_created_at=row["created_at"],
                result_count=claimed["result_count"],
                was_lost=found["call_id"] is not None,
            )

    async def renew_lease(self, lease: ItemLease, *, lease_seconds: float) -> None:
        if not await self._database.run(_RENEW, token=lease.token, lease_seconds=lease_seconds, **item_key(lease)):
            raise LeaseLost("Another process runs the item now.")

    async def open_replay_conversation(
        self, lease: ItemLease, tenant_id: str, definition: AssistantDefinition, draft: ConversationDraft
    ) -> Conversation:
        # The connections of the replay conversations find the item too, so both are written in one transaction.
        async with self._replay_store.transaction() as connection:
            item = await lock_item(connection, lease)
            if item["replay_conversation_id"] is not None:
                return await load_conversation_on(
                    connection, tenant_id, encode_id(CONVERSATION, item["replay_conversation_id"])
                )
            assistant = await create_assistant_on(connection, tenant_id, definition)
            own = replace(draft, assistant_id=assistant.id, assistant_version=assistant.version)
            conversation = await create_conversation_on(connection, tenant_id, own)
            await execute(
                connection,
                _SET_CONVERSATION,
                conversation=decode_id(CONVERSATION, conversation.id),
                **item_key(lease),
            )
            return conversation

    async def end_item(self, lease: ItemLease, state: ItemState, *, error_code: str | None = None) -> None:
        async with self._database.transaction() as connection:
            replay = await lock_leased_replay(connection, lease)
            item = await lock_item(connection, lease, may_have_ended=True)
            if ItemState(item["state"]) is ItemState.RUNNING:
                await _end(connection, lease, replay, state, error_code)

    async def release_item(self, lease: ItemLease) -> None:
        async with self._database.transaction() as connection:
            replay = await lock_leased_replay(connection, lease)
            await lock_item(connection, lease)
            ended = ITEMS_END_AS.get(ReplayState(replay["state"]))
            if ended is not None:
                await _end(connection, lease, replay, ended, None)
                return
            await lose_calls(connection, replay["id"], [lease.number])
            await execute(connection, _RELEASE, **item_key(lease))

    async def end_abandoned_items(self) -> int:
        total = 0
        for row in await self._database.run(_LIST_ABANDONED, states=[str(state) for state in ITEMS_END_AS]):
            # A replay that was erased meanwhile has no items.
            with suppress(ReplayNotFound):
                total += await self._end_abandoned_items_of(encode_id(REPLAY, row["replay_id"]))
        return total

    async def _end_abandoned_items_of(self, replay_id: str) -> int:
        async with self._database.transaction() as connection:
            replay = await lock_replay(connection, None, replay_id)
            ended = ITEMS_END_AS.get(ReplayState(replay["state"]))
            if ended is None:
                return 0
            rows = await fetch(connection, _END_ABANDONED, replay=replay["id"], state=str(ended))
            await lose_calls(connection, replay["id"], [row["number"] for row in rows])
        return len(rows)

    async def list_open_work(self, *, limit: int = 100) -> Sequence[OpenWork]:
        rows = await self._database.run(_LIST_OPEN, count=bounded(limit))
        return [OpenWork(replay_id=encode_id(REPLAY, row["id"]), slot_count=row["slot_count"]) for row in rows]

    async def list_items(
        self,
        tenant_id: str | None,
        replay_id: str,
        *,
        state: ItemState | None = None,
        cursor: str | None = None,
        limit: int = 20,
    ) -> Page[ReplayItem]:
        await self._require_replay(tenant_id, replay_id)
        page: dict[str, Any] = {
            "replay": decode_id(REPLAY, replay_id),
            "after": 0 if cursor is None else decode_cursor(cursor, int),
            "count": bounded(limit) + 1,
        }
        if state is None:
            rows = await self._database.run(_LIST, **page)
        else:
            rows = await self._database.run(_LIST_IN_STATE, state=str(state), **page)
        return page_of(rows, limit, item_from, lambda item: item.number)

    async def load_item(self, tenant_id: str | None, replay_id: str, number: int) -> ReplayItem:
        is_possible = 1 <= number <= ITEM_LIMIT
        key = replay_key(tenant_id, replay_id)
        rows = await self._database.run(_LOAD, number=number, **key) if is_possible else ()
        if not rows:
            raise ReplayNotFound("There is no such item.")
        return item_from(rows[0])


async def _end(connection: Connection, lease: ItemLease, replay: Row, state: ItemState, error_code: str | None) -> None:
    await lose_calls(connection, replay["id"], [lease.number])
    await execute(connection, _END, state=str(state), error_code=error_code, **item_key(lease))
    if ReplayState(replay["state"]) in {ReplayState.RUNNING, ReplayState.PAUSED}:
        await end_if_done(connection, replay["id"])
