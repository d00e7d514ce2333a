"""Daily maintenance on Postgres: retention of raw provider bytes, and deletion of pgqueuer's records of finished jobs.

Old raw bytes are removed, and the rest of the call is kept. The tables are scanned in the order of their primary keys,
one page per statement and one statement per transaction. So every statement is short, for any size of the table and any
number of due rows; no index is needed, which turns would have to maintain; and an interrupted scan keeps what it has
done. Rows that are locked are left for the next scan.
"""

from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Table

from server.postgres.engine import Database, Statement
from server.postgres.replay.conversation_tables import REPLAY_TABLES
from server.postgres.tables import calls

_PAGE_ROWS: Final = 500
_FIRST_VALUES: Final[Mapping[type[object], Any]] = {UUID: UUID(int=0), int: -1}


class _Scan:
    """The scan of one table of calls. A call that has not ended is not due."""

    __slots__ = ("start", "statement", "table_name")

    def __init__(self, table: Table) -> None:
        keys = list(table.primary_key)
        names = ", ".join(key.name for key in keys)
        after = ", ".join(f":{key.name}::{key.type.compile()}" for key in keys)
        self.table_name = table.fullname.replace(".", "_")
        self.start = {key.name: _FIRST_VALUES[key.type.python_type] for key in keys}
        self.statement = Statement(f"""
WITH page AS (
    SELECT {names} FROM {table.fullname} WHERE ({names}) > ({after}) ORDER BY {names} LIMIT :page_rows
),
due AS (
    SELECT {names} FROM {table.fullname}
    WHERE ({names}) IN (SELECT {names} FROM page)
        AND raw_response IS NOT NULL
        AND ended_at < now() - make_interval(days => :days)
    FOR UPDATE SKIP LOCKED
),
swept AS (
    UPDATE {table.fullname} SET raw_response = NULL WHERE ({names}) IN (SELECT {names} FROM due) RETURNING 1
)
SELECT {names}, (SELECT count(*) FROM swept) AS swept_count
FROM page ORDER BY ({names}) DESC LIMIT 1
""")  # noqa: S608  reason: names from our own tables only


_SCANS: Final = (_Scan(calls), _Scan(REPLAY_TABLES["calls"]))


async def sweep_raw_bytes(database: Database, days: int, *, page_rows: int = _PAGE_ROWS) -> dict[str, int]:
    """Remove the raw bytes of calls that ended more than `days` days ago, by the clock of the database.

    Can be interrupted and repeated. Returns the number of changed rows by table. Raises `DatabaseUnavailable`.
    """
    counts = {}
    for scan in _SCANS:
        counts[scan.table_name] = 0
        after: Mapping[str, Any] = scan.start
        while rows := await database.run(scan.statement, days=days, page_rows=page_rows, **after):
            counts[scan.table_name] += rows[0]["swept_count"]
            after = {name: rows[0][name] for name in scan.start}
    return counts


_LOG_PAGE_ROWS: Final = 5_000
_LOG_TABLES: Final = ("pgqueuer_log", "pgqueuer_statistics")


def _prune_statement(table: str) -> Statement:
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


_PRUNE: Final = {table: _prune_statement(table) for table in _LOG_TABLES}


async def prune_queue_log(database: Database, days: int, *, page_rows: int = _LOG_PAGE_ROWS) -> dict[str, int]:
    """Delete records that are older than `days` days. Returns their number by table. Raises `DatabaseUnavailable`."""
    counts = dict.fromkeys(_LOG_TABLES, 0)
    for table, statement in _PRUNE.items():
        while gone := (await database.run(statement, days=days, page_rows=page_rows))[0]["gone_count"]:
            counts[table] += gone
    return counts
