"""Job reports on Postgres. The tables belong to pgqueuer; `server.jobs.queue` describes the rows.

The queue contains only jobs that have not ended, so it is usually short; a limit keeps the report fast if it is not.
Ended jobs are in the log, by time.
"""

from collections.abc import Sequence
from typing import Final

import asyncpg

from server.inspection.jobs import FAILURE_HOURS, MAX_JOBS, JobStatus
from server.postgres.engine import Statement, StorePart

_REPORT: Final = Statement("""
WITH held AS MATERIALIZED (
    SELECT id, entrypoint, status, attempts, execute_after, updated
    FROM pgqueuer
    WHERE (:everybody::boolean OR headers ->> 'tenant_id' = :tenant::text) IS TRUE
    LIMIT :job_limit
),
counted AS (
    SELECT entrypoint,
        count(*) FILTER (WHERE status = 'queued' AND execute_after <= now()) AS waiting_count,
        count(*) FILTER (WHERE status = 'picked') AS running_count,
        count(*) FILTER (WHERE status = 'queued' AND execute_after > now()) AS later_count,
        count(*) FILTER (WHERE status = 'queued' AND attempts > 0) AS postponed_count,
        min(execute_after) FILTER (WHERE status = 'queued' AND execute_after <= now()) AS oldest_waiting_at
    FROM held
    GROUP BY entrypoint
),
given_up AS MATERIALIZED (
    -- The message is the name of the error, followed by the tenant.
    SELECT entrypoint, created, split_part(traceback ->> 'exception_message', ' ', 1) AS error
    FROM pgqueuer_log
    WHERE status = 'exception' AND created > now() - make_interval(hours => :hours)
        AND (:everybody OR split_part(traceback ->> 'exception_message', ' ', 2) = :tenant) IS TRUE
    ORDER BY created DESC
    LIMIT :job_limit
),
postponed AS (
    SELECT late.entrypoint, note.created, note.error
    FROM (SELECT id, entrypoint FROM held WHERE attempts > 0 ORDER BY updated DESC LIMIT 100) AS late
    CROSS JOIN LATERAL (
        SELECT created, traceback -> 'additional_context' ->> 'reason' AS error
        FROM pgqueuer_log WHERE job_id = late.id AND traceback IS NOT NULL
        ORDER BY created DESC
        LIMIT 1
    ) AS note
),
latest AS (
    SELECT DISTINCT ON (entrypoint) entrypoint, error, created
    FROM (SELECT * FROM given_up UNION ALL SELECT * FROM postponed) AS errors
    ORDER BY entrypoint, created DESC
),
failed AS (SELECT entrypoint, count(*) AS failed_count FROM given_up GROUP BY entrypoint)
SELECT entrypoint, waiting_count, running_count, later_count, postponed_count, oldest_waiting_at,
    coalesce(failed_count, 0) AS failed_count, latest.error AS last_error, latest.created AS last_error_at
FROM counted
FULL JOIN failed USING (entrypoint)
FULL JOIN latest USING (entrypoint)
ORDER BY entrypoint
""")


class JobReader(StorePart):
    """Reports jobs; see `server.inspection.port.Inspector`."""

    async def report_jobs(self, tenant_id: str | None) -> Sequence[JobStatus]:
        rows = await self._database.run(
            _REPORT, everybody=tenant_id is None, tenant=tenant_id, hours=FAILURE_HOURS, job_limit=MAX_JOBS
        )
        return [_status(row) for row in rows]


def _status(row: asyncpg.Record) -> JobStatus:
    return JobStatus(
        name=row["entrypoint"],
        waiting_count=row["waiting_count"] or 0,
        running_count=row["running_count"] or 0,
        later_count=row["later_count"] or 0,
        postponed_count=row["postponed_count"] or 0,
        failed_count=row["failed_count"],
        oldest_waiting_at=row["oldest_waiting_at"],
        last_error=row["last_error"],
        last_error_at=row["last_error_at"],
    )
