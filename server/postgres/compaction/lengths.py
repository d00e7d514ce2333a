"""How long conversations get, on Postgres: one statement over a bounded number of rows.

Ids begin with the time of creation, so the index on a tenant's conversations by assistant finds the newest ones that
are old enough to be over, and reads no others. Of these, the ones that somebody still talks to are left out.
"""

from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import UUID

from server.conversation.identifiers import ASSISTANT, TENANT, decode_id
from server.postgres.engine import Database, Statement

_REST: Final = timedelta(days=1)
"""Nobody has said anything for so long: the conversation is taken to be over."""
_MAX_CONVERSATIONS: Final = 300
_MIN_CONVERSATIONS: Final = 10
"""A mean over fewer says too little."""
_TYPICAL: Final = Statement("""
SELECT count(*) AS found, avg(exchange_count)::float8 AS mean
FROM (
    SELECT exchange_count, updated_at, lease_token FROM conversations
    WHERE tenant_id = :tenant AND assistant_id = :assistant AND id < :before
    ORDER BY id DESC
    LIMIT :count
) AS newest
-- Nobody has counted those that were last talked to before anybody counted; those without an exchange never began.
WHERE exchange_count > 0 AND lease_token IS NULL AND updated_at < :rests_since
""")


class PostgresConversationLengths:
    """Implements `server.compaction.typical_lengths.ConversationLengths`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def load_typical_length(self, tenant_id: str, assistant_id: str) -> float | None:
        rests_since = datetime.now(UTC) - _REST
        rows = await self._database.run(
            _TYPICAL,
            tenant=decode_id(TENANT, tenant_id),
            assistant=decode_id(ASSISTANT, assistant_id),
            before=_first_id_at(rests_since),
            rests_since=rests_since,
            count=_MAX_CONVERSATIONS,
        )
        mean: float | None = rows[0]["mean"]
        return mean if rows[0]["found"] >= _MIN_CONVERSATIONS else None


def _first_id_at(moment: datetime) -> UUID:
    """No id that was made at that moment or later is smaller."""
    return UUID(int=int(moment.timestamp() * 1000) << 80)
