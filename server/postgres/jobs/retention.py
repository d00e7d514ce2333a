"""Raw provider bytes past their time: removed, with everything else about the call left in its place.

The tables are walked in the order of their primary keys, a page per statement and a statement per transaction. So every
statement is short however large the table is and however few of its rows are due, no index has to be kept up for it by
the turns that are served meanwhile, and a walk that was cut off leaves nothing but what it has already done. A row that
somebody else holds is left for the next walk.
"""

from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Table

from server.postgres.engine import Database, Statement
from server.postgres.replay.conversation_tables import REPLAY_TABLES
from server.postgres.tables import calls

PAGE_ROWS: Final = 500
_BEFORE_ALL: Final[Mapping[type[object], Any]] = {UUID: UUID(int=0), int: -1}


class _Walk:
    """How one table of calls is walked. A call that never ended is not due."""

    __slots__ = ("start", "statement", "table_name")

    def __init__(self, table: Table) -> None:
        keys = list(table.primary_key)
        names = ", ".join(key.name for key in keys)
        places = ", ".join(f":{key.name}::{key.type.compile()}" for key in keys)
        self.table_name = table.fullname.replace(".", "_")
        self.start = {key.name: _BEFORE_ALL[key.type.python_type] for key in keys}
        self.statement = Statement(f"""
WITH page AS (
    SELECT {names} FROM {table.fullname} WHERE ({names}) > ({places}) ORDER BY {names} LIMIT :page_rows
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


_WALKS: Final = (_Walk(calls), _Walk(REPLAY_TABLES["calls"]))


async def sweep_raw_bytes(database: Database, days: int, *, page_rows: int = PAGE_ROWS) -> dict[str, int]:
    """Removes the raw bytes of calls that ended more than `days` days ago, by the database's clock.

    Can be cut off and repeated at any point. How many rows were changed, by table. Raises `DatabaseUnavailable`.
    """
    return {walk.table_name: await _walk(database, walk, days, page_rows) for walk in _WALKS}


async def _walk(database: Database, walk: _Walk, days: int, page_rows: int) -> int:
    total = 0
    place: Mapping[str, Any] = walk.start
    while rows := await database.run(walk.statement, days=days, page_rows=page_rows, **place):
        total += rows[0]["swept_count"]
        place = {name: rows[0][name] for name in walk.start}
    return total
