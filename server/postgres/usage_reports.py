"""Reports of usage on Postgres: one statement, which reads the calls of a time and adds them up.

Calls come in the order of time, so the index on it is a summary per range of pages: a report reads the pages of its own
time and no others, and a call costs nothing to be found by it.
"""

from datetime import datetime
from typing import Final

import asyncpg

from server.identifiers import ASSISTANT, CONVERSATION, TENANT, decode_id, encode_id
from server.postgres.codec import decode_text
from server.postgres.engine import Database, Statement
from server.postgres.rows import usage_from
from server.usage_report import ROW_LIMIT, UsageBy, UsageReport, UsageRow

_REPORT_SQL: Final = """
SELECT %key% AS key,
    count(*) AS call_count,
    coalesce(sum(k.fresh_input_tokens), 0)::bigint AS fresh_input_tokens,
    coalesce(sum(k.cache_read_tokens), 0)::bigint AS cache_read_tokens,
    coalesce(sum(k.cache_write_tokens), 0)::bigint AS cache_write_tokens,
    coalesce(sum(k.output_tokens), 0)::bigint AS output_tokens,
    coalesce(sum(k.reasoning_tokens), 0)::bigint AS reasoning_tokens,
    -- Nobody knows what a call that reported nothing would have read.
    coalesce(sum(k.cache_expected_tokens) FILTER (WHERE k.input_tokens > 0), 0)::bigint AS expected_cache_tokens,
    coalesce(sum(k.cost_usd), 0) AS cost_usd,
    count(*) FILTER (WHERE k.cost_usd IS NULL AND k.ended_at IS NOT NULL) AS unpriced_count
FROM (
    SELECT *, fresh_input_tokens + cache_read_tokens + cache_write_tokens AS input_tokens
    FROM calls WHERE started_at >= :since AND started_at < :until
) AS k
JOIN conversations c ON c.id = k.conversation_id
WHERE (c.tenant_id = :tenant) IS TRUE
    -- What a fork brought along was paid for by its source; below zero are summaries of its own.
    AND (k.turn_seq < 0 OR k.turn_seq > coalesce(c.forked_from_seq, 0))
GROUP BY 1
ORDER BY %order%
LIMIT :limit
"""
_BY_TOKENS: Final = "sum(k.input_tokens) DESC NULLS LAST, 1"
_STATEMENTS: Final = {
    by: Statement(_REPORT_SQL.replace("%key%", key).replace("%order%", order))
    for by, key, order in (
        (UsageBy.DAY, "(k.started_at AT TIME ZONE 'UTC')::date", "1"),
        (UsageBy.ASSISTANT, "c.assistant_id", _BY_TOKENS),
        (UsageBy.MODEL, "k.model", _BY_TOKENS),
        (UsageBy.CONVERSATION, "c.id", _BY_TOKENS),
    )
}


class PostgresUsageReports:
    """Implements `server.usage_report.UsageReports`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def report_usage(
        self, tenant_id: str, by: UsageBy, *, since: datetime, until: datetime, limit: int = 100
    ) -> UsageReport:
        shown = max(1, min(limit, ROW_LIMIT))
        rows = await self._database.run(
            _STATEMENTS[by], tenant=decode_id(TENANT, tenant_id), since=since, until=until, limit=shown + 1
        )
        return UsageReport(rows=[_row(row, by) for row in rows[:shown]], is_complete=len(rows) <= shown)


def _row(row: asyncpg.Record, by: UsageBy) -> UsageRow:
    match by:
        case UsageBy.DAY:
            key = row["key"].isoformat()
        case UsageBy.ASSISTANT:
            key = encode_id(ASSISTANT, row["key"])
        case UsageBy.CONVERSATION:
            key = encode_id(CONVERSATION, row["key"])
        case UsageBy.MODEL:
            key = decode_text(row["key"])
    return UsageRow(
        key=key,
        call_count=row["call_count"],
        usage=usage_from(row),
        expected_cache_tokens=row["expected_cache_tokens"],
        cost_usd=None if row["unpriced_count"] else row["cost_usd"],
        unpriced_count=row["unpriced_count"],
    )
