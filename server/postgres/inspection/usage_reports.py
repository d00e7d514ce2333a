"""Usage reports on Postgres: one statement that adds up the calls of a period.

Calls are inserted in order of time, so a BRIN index on the start time is enough: a report reads the pages of its period
only, and the index costs almost nothing per call.
"""

from datetime import datetime
from typing import Final

import asyncpg

from server.conversation.identifiers import ASSISTANT, CONVERSATION, TENANT, decode_id, encode_id
from server.inspection.usage_report import ROW_LIMIT, TOTAL, UsageBy, UsageReport, UsageRow
from server.postgres.codec import decode_text
from server.postgres.engine import ReportPart, Statement
from server.postgres.rows import usage_from

_REPORT_SQL: Final = """
SELECT %key% AS key,
    %name% AS name,
    grouping(%key%) = 1 AS is_total,
    count(*) AS call_count,
    coalesce(sum(k.fresh_input_tokens), 0)::bigint AS fresh_input_tokens,
    coalesce(sum(k.cache_read_tokens), 0)::bigint AS cache_read_tokens,
    coalesce(sum(k.cache_write_tokens), 0)::bigint AS cache_write_tokens,
    coalesce(sum(k.output_tokens), 0)::bigint AS output_tokens,
    coalesce(sum(k.reasoning_tokens), 0)::bigint AS reasoning_tokens,
    -- Calls without reported tokens have no meaningful expectation.
    coalesce(sum(k.cache_expected_tokens) FILTER (WHERE k.input_tokens > 0), 0)::bigint AS expected_cache_tokens,
    coalesce(sum(k.cost_usd), 0) AS cost_usd,
    count(*) FILTER (WHERE k.cost_usd IS NULL AND k.ended_at IS NOT NULL) AS unpriced_count
FROM (
    SELECT *, fresh_input_tokens + cache_read_tokens + cache_write_tokens AS input_tokens
    FROM calls WHERE started_at >= :since AND started_at < :until
) AS k
JOIN conversations c ON c.id = k.conversation_id
WHERE (:everybody::boolean OR c.tenant_id = :tenant::uuid) IS TRUE
    -- A fork does not count the calls copied from its source. Negative numbers are its own background calls.
    AND (k.turn_seq < 0 OR k.turn_seq > coalesce(c.forked_from_seq, 0))
GROUP BY GROUPING SETS ((%key%), ())
-- The total comes first, so that no limit cuts it off.
ORDER BY grouping(%key%) DESC, %order%
LIMIT :limit
"""
_BY_TOKENS: Final = "sum(k.input_tokens) DESC NULLS LAST, 1"
_NEWEST_NAME: Final = "(SELECT a.name FROM assistants a WHERE a.id = c.assistant_id ORDER BY a.version DESC LIMIT 1)"
_NO_NAME: Final = "NULL::text"
_STATEMENTS: Final = {
    by: Statement(_REPORT_SQL.replace("%key%", key).replace("%name%", name).replace("%order%", order))
    for by, key, name, order in (
        (UsageBy.DAY, "(k.started_at AT TIME ZONE 'UTC')::date", _NO_NAME, "1"),
        (UsageBy.ASSISTANT, "c.assistant_id", _NEWEST_NAME, _BY_TOKENS),
        (UsageBy.MODEL, "k.model", _NO_NAME, _BY_TOKENS),
        (UsageBy.CONVERSATION, "c.id", _NO_NAME, _BY_TOKENS),
    )
}


class UsageReader(ReportPart):
    """Reports usage; see `server.inspection.port.Inspector`."""

    async def report_usage(
        self, tenant_id: str | None, by: UsageBy, *, since: datetime, until: datetime, limit: int = 100
    ) -> UsageReport:
        shown = max(1, min(limit, ROW_LIMIT))
        total, *rows = await self._reports.run(
            _STATEMENTS[by],
            everybody=tenant_id is None,
            tenant=None if tenant_id is None else decode_id(TENANT, tenant_id),
            since=since,
            until=until,
            # One row for the total, and one more to know whether there are more.
            limit=shown + 2,
        )
        return UsageReport(
            rows=[_row(row, _key_of(row, by)) for row in rows[:shown]],
            total=_row(total, TOTAL),
            is_complete=len(rows) <= shown,
        )


def _key_of(row: asyncpg.Record, by: UsageBy) -> str:
    match by:
        case UsageBy.DAY:
            day: str = row["key"].isoformat()
            return day
        case UsageBy.ASSISTANT:
            return encode_id(ASSISTANT, row["key"])
        case UsageBy.CONVERSATION:
            return encode_id(CONVERSATION, row["key"])
        case UsageBy.MODEL:
            return decode_text(row["key"])


def _row(row: asyncpg.Record, key: str) -> UsageRow:
    return UsageRow(
        key=key,
        name=None if row["name"] is None else decode_text(row["name"]),
        call_count=row["call_count"],
        usage=usage_from(row),
        expected_cache_tokens=row["expected_cache_tokens"],
        cost_usd=None if row["unpriced_count"] else row["cost_usd"],
        unpriced_count=row["unpriced_count"],
    )
