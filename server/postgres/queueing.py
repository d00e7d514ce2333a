"""The queue for a busy conversation: tickets, of which the lowest live one is the next.

A ticket is drawn under the conversation's lock, so that tickets become visible in the order of their numbers, no more
of them are drawn than the limit allows, and none is left behind by an erasure.
"""

from typing import Final

from server.announcements import News
from server.errors import ConversationNotFound, QueueFull
from server.identifiers import CONVERSATION, TENANT, decode_id
from server.postgres.channels import announce_sql
from server.postgres.engine import Database, Statement

_LOCK: Final = Statement("""
SELECT id FROM conversations WHERE id = :conversation AND (tenant_id = :tenant) IS TRUE FOR NO KEY UPDATE
""")
# A statement of its own, after the lock: it has to see what was drawn while it waited for that.
_ENTER: Final = Statement("""
WITH lapsed AS (
    DELETE FROM waiting_turns WHERE conversation_id = :conversation AND expires_at <= now()
)
INSERT INTO waiting_turns (conversation_id, ticket, expires_at)
SELECT :conversation, nextval('waiting_tickets') * CASE WHEN :first THEN -1 ELSE 1 END,
    now() + :seconds::float8 * interval '1 second'
WHERE :first OR :limit::bigint > (
    SELECT count(*) FROM waiting_turns WHERE conversation_id = :conversation AND expires_at > now()
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
SELECT {announce_sql(News.ENDED, "conversation_id")} FROM gone
""")  # noqa: S608  reason: constants of this module only


async def enter_queue(
    database: Database, tenant_id: str, conversation_id: str, *, limit: int, seconds: float, first: bool
) -> int:
    """See the port."""
    key = {"conversation": decode_id(CONVERSATION, conversation_id), "tenant": decode_id(TENANT, tenant_id)}
    async with database.transaction() as connection:
        if await connection.fetchrow(_LOCK.sql, *_LOCK.arguments(key)) is None:
            raise ConversationNotFound
        values = {**key, "limit": limit, "seconds": seconds, "first": first}
        ticket: int | None = await connection.fetchval(_ENTER.sql, *_ENTER.arguments(values))
    if ticket is None:
        raise QueueFull(limit=limit)
    return ticket


async def keep_ticket(database: Database, conversation_id: str, ticket: int, seconds: float) -> bool:
    """See the port."""
    conversation = decode_id(CONVERSATION, conversation_id)
    return bool(await database.run(_KEEP, conversation=conversation, ticket=ticket, seconds=seconds))


async def leave_queue(database: Database, conversation_id: str, ticket: int) -> None:
    """See the port."""
    await database.run(_LEAVE, conversation=decode_id(CONVERSATION, conversation_id), ticket=ticket)
