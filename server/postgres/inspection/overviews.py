"""Overviews on Postgres: one pass over the calls of a period, found by a BRIN index, and alarms."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from server.conversation.identifiers import ASSISTANT, CONVERSATION, TENANT, decode_id, encode_id
from server.inspection.conversation_list import InspectionFilter
from server.inspection.overview import (
    ALARM_LIMIT,
    CELL_KEY_LIMIT,
    ERROR_LIMIT,
    KEY_LIMIT,
    TOP_LIMIT,
    Alarm,
    ErrorCount,
    Overview,
    OverviewBy,
    OverviewCell,
    StuckCompaction,
    TopConversation,
    choose_step,
)
from server.postgres.codec import decode_text
from server.postgres.engine import Database, Statement
from server.postgres.inspection.conversation_list import ConversationReader
from server.postgres.rows import Row, text_or_none, usage_from

_OF_PERIOD: Final = """
FROM calls k JOIN conversations c ON c.id = k.conversation_id
WHERE k.started_at >= :since AND k.started_at < :until
    AND (:everybody::boolean OR c.tenant_id = :tenant::uuid) IS TRUE
    -- A fork does not count the calls copied from its source. Negative numbers are its own background calls.
    AND (k.turn_seq < 0 OR k.turn_seq > coalesce(c.forked_from_seq, 0))
"""
_NAME: Final = "(SELECT a.name FROM assistants a WHERE a.id = c.assistant_id ORDER BY a.version DESC LIMIT 1)"
_CELLS_SQL: Final = f"""
WITH counted AS (
    SELECT date_trunc(:step, k.started_at, 'UTC') AS at, %key% AS key, k.*,
        extract(epoch FROM k.ended_at - k.started_at)::float8 AS seconds,
        extract(epoch FROM k.first_byte_at - k.started_at)::float8 AS first_seconds
    {_OF_PERIOD}
),
grouped AS MATERIALIZED (
    SELECT at, key, grouping(at) = 1 AS is_whole_time, grouping(key) = 1 AS is_all,
        count(*) AS call_count, count(error_code) AS error_count,
        coalesce(sum(fresh_input_tokens), 0)::bigint AS fresh_input_tokens,
        coalesce(sum(cache_read_tokens), 0)::bigint AS cache_read_tokens,
        coalesce(sum(cache_write_tokens), 0)::bigint AS cache_write_tokens,
        coalesce(sum(output_tokens), 0)::bigint AS output_tokens,
        coalesce(sum(reasoning_tokens), 0)::bigint AS reasoning_tokens,
        coalesce(sum(cost_usd), 0) AS cost_usd,
        count(*) FILTER (WHERE cost_usd IS NULL AND ended_at IS NOT NULL) AS unpriced_count,
        percentile_cont(0.5) WITHIN GROUP (ORDER BY seconds) AS median_seconds,
        percentile_cont(0.95) WITHIN GROUP (ORDER BY seconds) AS slow_seconds,
        percentile_cont(0.5) WITHIN GROUP (ORDER BY first_seconds) AS first_byte_seconds
    FROM counted
    GROUP BY GROUPING SETS ((at, key), (at), (key), ())
),
ranked AS (
    SELECT key, row_number() OVER (
        ORDER BY fresh_input_tokens + cache_read_tokens + cache_write_tokens + output_tokens + reasoning_tokens DESC,
            key
    ) AS place
    FROM grouped WHERE is_whole_time AND NOT is_all
)
SELECT g.* FROM grouped g LEFT JOIN ranked r ON r.key = g.key AND NOT g.is_all
WHERE g.is_all OR r.place <= CASE WHEN g.is_whole_time THEN :keys::bigint ELSE :cell_keys::bigint END
ORDER BY g.is_whole_time AND g.is_all DESC, g.at, r.place
"""  # noqa: S608  reason: constants of this module only
_CELLS: Final = {
    by: Statement(_CELLS_SQL.replace("%key%", key))
    for by, key in (
        (OverviewBy.ASSISTANT, "c.assistant_id::text"),
        (OverviewBy.MODEL, "k.model"),
        (OverviewBy.PROVIDER, "k.provider"),
    )
}
_TOP_SQL: Final = f"""
SELECT c.id, {_NAME} AS assistant_name, count(*) AS call_count, coalesce(sum(k.cost_usd), 0) AS cost_usd,
    max(extract(epoch FROM k.ended_at - k.started_at))::float8 AS slowest_seconds
{_OF_PERIOD}
GROUP BY c.id
ORDER BY %order% DESC NULLS LAST, c.id
LIMIT :limit
"""  # noqa: S608  reason: constants of this module only
_MOST_EXPENSIVE: Final = Statement(_TOP_SQL.replace("%order%", "sum(k.cost_usd)"))
_SLOWEST: Final = Statement(_TOP_SQL.replace("%order%", "max(k.ended_at - k.started_at)"))
_ERRORS: Final = Statement(f"""
SELECT k.error_code, count(*) AS call_count, max(k.started_at) AS last_at
{_OF_PERIOD} AND k.error_code IS NOT NULL
GROUP BY k.error_code
ORDER BY count(*) DESC, k.error_code
LIMIT :limit
""")
_NAMES: Final = Statement("""
SELECT DISTINCT ON (id) id::text AS id, name FROM assistants WHERE id = ANY(:ids::uuid[]) ORDER BY id, version DESC
""")
_STUCK: Final = Statement("""
SELECT a.conversation_id, a.reason, a.request_tokens, a.began_at
FROM compaction_alarms a JOIN conversations c ON c.id = a.conversation_id
WHERE (:everybody::boolean OR a.tenant_id = :tenant::uuid) IS TRUE
    -- Still true: no new epoch, and no later answer without the problem.
    AND c.epoch = a.epoch AND c.next_seq - CASE WHEN c.lease_token IS NULL THEN 1 ELSE 3 END <= a.seq
ORDER BY a.began_at DESC
LIMIT :limit
""")
_NOTE: Final = Statement("""
INSERT INTO compaction_alarms AS known (conversation_id, tenant_id, reason, request_tokens, seq, epoch)
SELECT id, tenant_id, :reason, :request_tokens, :seq, :epoch
FROM conversations WHERE id = :conversation AND (tenant_id = :tenant) IS TRUE FOR KEY SHARE
ON CONFLICT (conversation_id) DO UPDATE SET reason = excluded.reason, request_tokens = excluded.request_tokens,
    seq = excluded.seq, epoch = excluded.epoch,
    -- The previous turn had it too: it is the same problem.
    began_at = CASE WHEN known.epoch = excluded.epoch AND known.seq >= excluded.seq - 2 THEN known.began_at
        ELSE excluded.began_at END
WHERE known.seq <= excluded.seq
""")
_ALARMS: Final = ("has_prefix_break", "has_missing_signature", "has_withheld_signature", "was_recovered")


class OverviewReader(ConversationReader):
    """Reads overviews; see `server.inspection.port.Inspector`."""

    async def load_overview(
        self, tenant_id: str | None, by: OverviewBy, *, since: datetime, until: datetime
    ) -> Overview:
        scope: dict[str, Any] = {
            "everybody": tenant_id is None,
            "tenant": None if tenant_id is None else decode_id(TENANT, tenant_id),
        }
        period: dict[str, Any] = {"since": since, "until": until}
        step = choose_step(since, until)
        rows = await self._reports.run(
            _CELLS[by], step=step.value, keys=KEY_LIMIT, cell_keys=CELL_KEY_LIMIT, **scope, **period
        )
        names = await self._load_names(rows) if by is OverviewBy.ASSISTANT else {}
        cells = [_cell_from(row, by, names) for row in rows]
        expensive = await self._reports.run(_MOST_EXPENSIVE, limit=TOP_LIMIT, **scope, **period)
        slowest = await self._reports.run(_SLOWEST, limit=TOP_LIMIT, **scope, **period)
        errors = await self._reports.run(_ERRORS, limit=ERROR_LIMIT, **scope, **period)
        stuck = await self._reports.run(_STUCK, limit=ALARM_LIMIT, **scope)
        return Overview(
            step=step,
            total=cells[0],
            by_step=[cell for cell in cells[1:] if cell.key is None],
            by_key=[cell for cell in cells[1:] if cell.at is None],
            cells=[cell for cell in cells[1:] if cell.at is not None and cell.key is not None],
            errors=[_error_from(row) for row in errors],
            most_expensive=[_top_from(row) for row in expensive],
            slowest=[_top_from(row) for row in slowest],
            stuck_compactions=[_stuck_from(row) for row in stuck],
            alarms=[await self._load_alarm(tenant_id, kind, since, until) for kind in _ALARMS],
        )

    async def _load_alarm(self, tenant_id: str | None, kind: str, since: datetime, until: datetime) -> Alarm:
        flags: dict[str, Any] = {kind: True}
        filters = InspectionFilter(**flags, active_after=since, active_before=until)
        page = await self.list_conversations(tenant_id, filters=filters, limit=ALARM_LIMIT)
        return Alarm(kind=kind, estimated_count=page.estimated_count, conversations=page.items)

    async def _load_names(self, rows: Sequence[Row]) -> dict[str, str]:
        ids = list({row["key"] for row in rows if row["key"] is not None})
        found = await self._reports.run(_NAMES, ids=ids)
        return {row["id"]: decode_text(row["name"]) for row in found}


class PostgresCompactionAlarms:
    """Implements `server.compaction.observer.CompactionAlarms`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def record_blocked(
        self, tenant_id: str, conversation_id: str, *, reason: str, request_tokens: int, seq: int, epoch: int
    ) -> None:
        await self._database.run(
            _NOTE,
            conversation=decode_id(CONVERSATION, conversation_id),
            tenant=decode_id(TENANT, tenant_id),
            reason=reason,
            request_tokens=request_tokens,
            seq=seq,
            epoch=epoch,
        )


def _cell_from(row: Row, by: OverviewBy, names: dict[str, str]) -> OverviewCell:
    key = None if row["is_all"] else decode_text(row["key"])
    is_assistant = key is not None and by is OverviewBy.ASSISTANT
    return OverviewCell(
        at=None if row["is_whole_time"] else row["at"],
        key=encode_id(ASSISTANT, UUID(key)) if key is not None and is_assistant else key,
        name=names.get(key) if key is not None and is_assistant else None,
        call_count=row["call_count"],
        error_count=row["error_count"],
        usage=usage_from(row),
        cost_usd=row["cost_usd"],
        unpriced_count=row["unpriced_count"],
        median_seconds=row["median_seconds"],
        slow_seconds=row["slow_seconds"],
        first_byte_seconds=row["first_byte_seconds"],
    )


def _top_from(row: Row) -> TopConversation:
    return TopConversation(
        id=encode_id(CONVERSATION, row["id"]),
        assistant_name=text_or_none(row["assistant_name"]) or "",
        call_count=row["call_count"],
        cost_usd=row["cost_usd"],
        slowest_seconds=row["slowest_seconds"],
    )


def _error_from(row: Row) -> ErrorCount:
    return ErrorCount(code=decode_text(row["error_code"]), call_count=row["call_count"], last_at=row["last_at"])


def _stuck_from(row: Row) -> StuckCompaction:
    return StuckCompaction(
        conversation_id=encode_id(CONVERSATION, row["conversation_id"]),
        reason=decode_text(row["reason"]),
        request_tokens=row["request_tokens"],
        began_at=row["began_at"],
    )
