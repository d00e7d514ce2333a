"""Deletion of the records that pgqueuer keeps about finished jobs."""

from typing import Final

from server.postgres.engine import Database, Statement

_PAGE_ROWS: Final = 5_000
_TABLES: Final = ("pgqueuer_log", "pgqueuer_statistics")


def _statement(table: str) -> Statement:
    """Delete a page of rows, so that no statement takes long and no lock is held for long."""
    return Statement(f"""
WITH gone AS (
    DELETE FROM {table} WHERE id IN (
        SELECT id FROM {table} WHERE created < now() - make_interval(days => :days) ORDER BY created LIMIT :page_rows
    )
    RETURNING 1
)
SELECT count(*) AS gone_count FROM gone
""")  # noqa: S608  reason: constants of this module only


_PRUNE: Final = {table: _statement(table) for table in _TABLES}


async def prune_queue_log(database: Database, days: int, *, page_rows: int = _PAGE_ROWS) -> dict[str, int]:
    """Delete records that are older than `days` days. Returns their number by table. Raises `DatabaseUnavailable`."""
    counts = dict.fromkeys(_TABLES, 0)
    for table, statement in _PRUNE.items():
        while gone := (await database.run(statement, days=days, page_rows=page_rows))[0]["gone_count"]:
            counts[table] += gone
    return counts
