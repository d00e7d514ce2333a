"""The typical length of conversations on Postgres: one statement over a bounded number of rows.

Ids begin with the time of creation, so the index on a tenant's conversations by assistant finds the newest ones that
are old enough to be over, and reads no others. Those that are still in use are excluded.
"""

from datetime import UTC, datetime, timedelta
from typing import Final

from server.conversation.identifiers import ASSISTANT, TENANT, decode_id
from server.postgres.engine import Database, Statement
from server.postgres.paging import ids_within

_IDLE_TIME: Final = timedelta(days=1)
"""A conversation without a turn for this long is considered to be over."""
_MAX_CONVERSATIONS: Final = 300
_MIN_CONVERSATIONS: Final = 10
"""A mean over fewer conversations is not meaningful."""
_TYPICAL: Final = Statement("""
SELECT count(*) AS found, avg(exchange_count)::float8 AS mean
FROM (
    SELECT exchange_count, updated_at, lease_token FROM conversations
    WHERE tenant_id = :tenant AND assistant_id = :assistant AND id < :before
    ORDER BY id DESC
    LIMIT :count
) AS newest
-- Null: the last turn is older than the counter. 0: the conversation has no exchange.
WHERE exchange_count > 0 AND lease_token IS NULL AND updated_at < :idle_since
""")


class PostgresConversationLengths:
    """Implements `server.compaction.typical_lengths.ConversationLengths`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def load_typical_length(self, tenant_id: str, assistant_id: str) -> float | None:
        idle_since = datetime.now(UTC) - _IDLE_TIME
        rows = await self._database.run(
            _TYPICAL,
            tenant=decode_id(TENANT, tenant_id),
            assistant=decode_id(ASSISTANT, assistant_id),
            before=ids_within(idle_since, None)[0],
            idle_since=idle_since,
            count=_MAX_CONVERSATIONS,
        )
        mean: float | None = rows[0]["mean"]
        return mean if rows[0]["found"] >= _MIN_CONVERSATIONS else None
