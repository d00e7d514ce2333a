"""The queue for a busy conversation: tickets, of which the lowest one that has not expired is next.

A ticket is issued under the lock of the conversation's row, so that tickets become visible in the order of their
numbers and an erasure leaves none. This is one statement: a process that freezes after it holds no lock.

The snapshot of that statement is older than its wait for the lock, so its count omits tickets that were issued
meanwhile. A second statement counts again. By then all lower tickets are visible, because they were issued under the
same lock, and a ticket beyond the limit is removed.
"""

from typing import Final

from server.conversation.errors import ConversationNotFound, QueueFull
from server.conversation.identifiers import CONVERSATION, TENANT, decode_id
from server.conversation.notifications import Notification
from server.postgres.engine import Statement, StorePart
from server.postgres.notifications import notify_sql

# Materialized, and the number is taken per row of it, so that it is taken only after the row is locked.
_ENTER: Final = Statement("""
WITH locked AS MATERIALIZED (
    SELECT id FROM conversations WHERE id = :conversation AND (tenant_id = :tenant) IS TRUE FOR NO KEY UPDATE
),
lapsed AS (
    DELETE FROM waiting_turns
    WHERE conversation_id = :conversation AND expires_at <= now() AND EXISTS (SELECT FROM locked)
),
drawn AS (
    INSERT INTO waiting_turns (conversation_id, ticket, expires_at)
    SELECT :conversation::uuid, nextval('waiting_tickets') * CASE WHEN :first THEN -1 ELSE 1 END,
        now() + :seconds::float8 * interval '1 second'
    FROM locked
    WHERE :first OR :limit::bigint > (
        SELECT count(*) FROM waiting_turns WHERE conversation_id = :conversation AND expires_at > now()
    )
    RETURNING ticket
)
SELECT locked.id, drawn.ticket FROM locked LEFT JOIN drawn ON true
""")
_LEAVE_IF_FULL: Final = Statement("""
DELETE FROM waiting_turns
WHERE conversation_id = :conversation AND ticket = :ticket AND :limit::bigint <= (
    SELECT count(*) FROM waiting_turns
    WHERE conversation_id = :conversation AND ticket < :ticket AND expires_at > now()
)
RETURNING ticket
""")
_KEEP: Final = Statement("""
UPDATE waiting_turns SET expires_at = now() + :seconds::float8 * interval '1 second'
WHERE conversation_id = :conversation AND ticket = :ticket
RETURNING ticket
""")
# Notified like the end of a turn: the conversation may be free for the next ticket.
_LEAVE: Final = Statement(f"""
WITH gone AS (
    DELETE FROM waiting_turns WHERE conversation_id = :conversation AND ticket = :ticket RETURNING conversation_id
)
SELECT {notify_sql(Notification.ENDED, "conversation_id")} FROM gone
""")  # noqa: S608  reason: constants of this module only


class QueueStore(StorePart):
    """Issues and keeps the tickets of turns that wait for a busy conversation."""

    async def enter_queue(
        self, tenant_id: str, conversation_id: str, *, limit: int, seconds: float, first: bool = False
    ) -> int:
        conversation = decode_id(CONVERSATION, conversation_id)
        rows = await self._database.run(
            _ENTER,
            # A second run would issue a second ticket, and the first would block the queue until it expires.
            repeatable=False,
            conversation=conversation,
            tenant=decode_id(TENANT, tenant_id),
            limit=limit,
            seconds=seconds,
            first=first,
        )
        if not rows:
            raise ConversationNotFound
        ticket: int | None = rows[0]["ticket"]
        if ticket is None:
            raise QueueFull(limit=limit)
        if not first and await self._database.run(
            _LEAVE_IF_FULL, conversation=conversation, ticket=ticket, limit=limit
        ):
            raise QueueFull(limit=limit)
        return ticket

    async def renew_ticket(self, conversation_id: str, ticket: int, *, seconds: float) -> bool:
        conversation = decode_id(CONVERSATION, conversation_id)
        return bool(await self._database.run(_KEEP, conversation=conversation, ticket=ticket, seconds=seconds))

    async def leave_queue(self, conversation_id: str, ticket: int) -> None:
        await self._database.run(_LEAVE, conversation=decode_id(CONVERSATION, conversation_id), ticket=ticket)
