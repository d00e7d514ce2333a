"""Erasing a conversation: every row, in every table, in one transaction, and with it what replays have made of it.

What belongs to a conversation is said in `erasable`. A replay that loses an item by it goes on with the others.
"""

from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

from server.conversation.errors import ConversationBusy, ConversationNotFound
from server.conversation.identifiers import CONVERSATION, TENANT, decode_id
from server.conversation.store import ErasureReport
from server.postgres.connections import Connection
from server.postgres.conversation.erasable import LIVE, REPLAY_ERASABLE
from server.postgres.engine import Database, Statement
from server.postgres.replay.statements import end_if_done, fetch, lose_calls

# A turn whose lease has expired is nobody's: whatever its process still writes finds no conversation.
_LOCK: Final = Statement("""
SELECT CASE WHEN lease_expires_at > now() THEN lease_turn_seq END AS lease_turn_seq
FROM conversations WHERE id = :conversation AND tenant_id = :tenant FOR UPDATE
""")
_LIST_SHADOWS: Final = Statement("""
SELECT replay_conversation_id FROM replay_items
WHERE conversation_id = :conversation AND replay_conversation_id IS NOT NULL
""")
# In the order in which everybody takes them: the replays, then their items.
_LOCK_REPLAYS: Final = Statement("""
SELECT id, state FROM replays
WHERE id IN (SELECT replay_id FROM replay_items WHERE conversation_id = :conversation)
ORDER BY id FOR NO KEY UPDATE
""")
_LOCK_ITEMS: Final = Statement("""
SELECT replay_id, number, replay_conversation_id FROM replay_items WHERE conversation_id = :conversation
ORDER BY replay_id, number FOR UPDATE
""")
_UNENDED: Final = ("running", "paused")


async def erase_conversation(
    database: Database, tenant_id: str, conversation_id: str, *, dry_run: bool
) -> ErasureReport:
    """See the port."""
    conversation, tenant = decode_id(CONVERSATION, conversation_id), decode_id(TENANT, tenant_id)
    async with database.transaction() as connection:
        row = await connection.fetchrow(_LOCK.sql, *_LOCK.arguments({"conversation": conversation, "tenant": tenant}))
        if row is None or conversation is None:
            raise ConversationNotFound
        if dry_run:
            return await _foresee(connection, tenant, conversation)
        if row["lease_turn_seq"] is not None:
            raise ConversationBusy(running_seq=row["lease_turn_seq"])
        rows = await _delete(connection, tenant, conversation)
    return ErasureReport(rows={name: count for name, count in rows.items() if count})


async def _foresee(connection: Connection, tenant: UUID | None, conversation: UUID) -> ErasureReport:
    shadows = [
        row["replay_conversation_id"] for row in await fetch(connection, _LIST_SHADOWS, conversation=conversation)
    ]
    live, live_bytes = await LIVE.count(connection, tenant, [conversation])
    in_replays, replay_bytes = await REPLAY_ERASABLE.count(connection, tenant, shadows)
    rows = {name: count for name, count in (live | in_replays).items() if count}
    return ErasureReport(rows=rows, stored_bytes=live_bytes + replay_bytes)


async def _delete(connection: Connection, tenant: UUID | None, conversation: UUID) -> Mapping[str, int]:
    replays = await fetch(connection, _LOCK_REPLAYS, conversation=conversation)
    items = await fetch(connection, _LOCK_ITEMS, conversation=conversation)
    for replay in replays:
        await lose_calls(
            connection, replay["id"], [item["number"] for item in items if item["replay_id"] == replay["id"]]
        )
    rows: dict[str, Any] = await LIVE.delete(connection, tenant, [conversation])
    shadows = [item["replay_conversation_id"] for item in items if item["replay_conversation_id"] is not None]
    rows |= await REPLAY_ERASABLE.delete(connection, tenant, shadows)
    for replay in replays:
        if replay["state"] in _UNENDED:
            await end_if_done(connection, replay["id"])
    return rows
