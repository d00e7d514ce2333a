"""The queue for a busy conversation: tickets, of which the lowest live one is the next.

A ticket is drawn under the conversation's lock, so that tickets become visible in the order of their numbers and none
is left behind by an erasure. That is one statement: a process that freezes after it holds no lock.

Its snapshot dates from before it waited for the lock, so tickets that were drawn meanwhile are missing from its count.
A second statement counts again. All tickets below the new one are visible by then, since they were drawn under the same
lock: a ticket beyond the limit is found to be one, and is removed.
"""

from typing import Final

from server.conversation.errors import ConversationNotFound, QueueFull
from server.conversation.identifiers import CONVERSATION, TENANT, decode_id
from server.conversation.notifications import Notification
from server.postgres.engine import Statement, StorePart
from server.postgres.notifications import notify_sql

# Materialized, and the number is drawn from its row: not before the lock is held.
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
    SELECT id, nextval('waiting_tickets') * CASE WHEN :first THEN -1 ELSE 1 END,
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
# Announced like the end of a turn: whoever is next now may find the conversation free.
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
            # A second run would draw a second ticket, and the first would block the queue until it lapses.
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
