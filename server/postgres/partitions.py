"""Converting the large tables of conversations to hash partitions, while servers read and write them.

For each table, one after the other:

1. Prepare, under a short lock: create a partitioned copy of the table, with the same columns, constraints, indexes and
   privileges, in schema `partitions`, and a trigger that repeats every change of a row in the copy.
2. Copy the existing rows in batches. A batch locks its rows against changes, so a concurrent change is either read by
   the batch, or waits for it and then finds its row in the copy. Each batch records how far it came: an interrupted
   conversion continues there.
3. Compare the numbers of rows in one snapshot.
4. Swap, under a short lock: drop the table and move the copy to its place. The partitions stay in `partitions`.

The statements of the server are the same before, during and after. Postgres plans prepared statements again when their
table was replaced. A migration must not change a table while its copy exists: `migrations` refuses to run.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import asyncpg
from asyncpg import exceptions as pg

from server.conversation.errors import MigrationFailed
from server.postgres.connections import Connection, DatabaseOptions, connect, translated_errors
from server.postgres.migrations import MIGRATION_LOCK

PARTITIONED_TABLES: Final = ("turns", "calls", "call_chunks")
PARTITION_SCHEMA: Final = "partitions"
_PARTITION_LOCK: Final = 0x5354524154410003
"""Held by the process that converts, so that there is one."""
_BATCH_ROWS: Final = 500
_BRIN_PAGES: Final = 128
"""The pages per range of a BRIN index without partitions: the default of Postgres."""
_LOCK_SECONDS: Final = 4.0
_LOCK_ATTEMPTS: Final = 30
_LOCK_PAUSE_SECONDS: Final = 2.0
_HINT: Final = "Nothing is lost: run `strata migrate partition` again."
_log = logging.getLogger("strata.migrations")

_CREATE_PROGRESS: Final = """
CREATE SCHEMA IF NOT EXISTS partitions;
CREATE TABLE IF NOT EXISTS partitions.progress (
    table_name text PRIMARY KEY,
    partition_count integer NOT NULL,
    last_key text[],
    copied_rows bigint NOT NULL DEFAULT 0
);
COMMENT ON TABLE partitions.progress IS 'Tables that are being copied to partitions. Empty when none is.'
"""
_COLUMNS: Final = """
SELECT a.attname, format_type(a.atttypid, a.atttypmod) AS kind
FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY(i.indkey)
WHERE i.indrelid = $1::text::regclass AND i.indisprimary
ORDER BY array_position(i.indkey::int2[], a.attnum)
"""
_INDEXES: Final = """
SELECT a.amname AS kind, pg_get_indexdef(i.indexrelid) AS definition
FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid JOIN pg_am a ON a.oid = c.relam
WHERE i.indrelid = $1::text::regclass AND NOT i.indisprimary
"""
_PRIVILEGES: Final = """
SELECT acl.privilege_type, coalesce(quote_ident(r.rolname), 'PUBLIC') AS grantee
FROM pg_class c CROSS JOIN aclexplode(c.relacl) AS acl LEFT JOIN pg_roles r ON r.oid = acl.grantee
WHERE c.oid = $1::text::regclass AND acl.grantee <> c.relowner
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyProgress:
    """How far the copy of a table is."""

    table: str
    copied_rows: int
    estimated_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """A table that is being converted."""

    name: str
    schema: str
    """The schema that it is in, quoted."""
    key: tuple[tuple[str, str], ...]
    """The columns of the primary key with their types."""

    @property
    def table(self) -> str:
        return f"{self.schema}.{self.name}"

    @property
    def copy(self) -> str:
        return f"{PARTITION_SCHEMA}.{self.name}"

    @property
    def columns(self) -> str:
        return ", ".join(name for name, _ in self.key)

    def parameter(self, number: int) -> str:
        """Return the key that a parameter holds as an array of texts."""
        values = (f"(${number}::text[])[{place}]::{kind}" for place, (_, kind) in enumerate(self.key, start=1))
        return f"({', '.join(values)})"


async def partition_tables(
    options: DatabaseOptions, *, count: int, on_progress: Callable[[CopyProgress], None], batch_rows: int = _BATCH_ROWS
) -> list[str]:
    """Convert the tables that are not partitioned yet, and return their names. Raises `MigrationFailed`.

    `count`: the number of partitions of each table; a conversion that was interrupted keeps its own.
    """
    # Nothing but the wait for a lock has a limit here.
    own = replace(options, statement_seconds=0, idle_transaction_seconds=0, lock_seconds=_LOCK_SECONDS)
    connection = await connect(own)
    try:
        with translated_errors():
            if not await connection.fetchval("SELECT pg_try_advisory_lock($1)", _PARTITION_LOCK):
                raise MigrationFailed("Another process is partitioning the tables.", hint="Wait until it has ended.")
            await connection.execute(_CREATE_PROGRESS)
            converted = []
            for table in PARTITIONED_TABLES:
                if not await is_partitioned(connection, table):
                    await _convert(connection, table, count, batch_rows, on_progress)
                    converted.append(table)
            return converted
    except pg.PostgresError as error:
        raise MigrationFailed(f"The tables could not be partitioned: {error}.", hint=_HINT) from error
    finally:
        await connection.close()


async def abandon_partitioning(options: DatabaseOptions) -> list[str]:
    """Remove unfinished copies and their triggers, and return the names of the tables. Raises `MigrationFailed`."""
    connection = await connect(replace(options, lock_seconds=_LOCK_SECONDS))
    try:
        with translated_errors():
            if not await connection.fetchval("SELECT pg_try_advisory_lock($1)", _PARTITION_LOCK):
                raise MigrationFailed("Another process is partitioning the tables.", hint="Stop it first.")
            tables = await list_unfinished(connection)
            for table in tables:
                source = await _read_source(connection, table)
                await _with_lock(connection, partial(_drop_copy, connection, source))
            return tables
    finally:
        await connection.close()


async def is_partitioned(connection: Connection, table: str) -> bool:
    """Return whether a table has partitions."""
    found: bool = await connection.fetchval("SELECT relkind = 'p' FROM pg_class WHERE oid = $1::text::regclass", table)
    return found


async def list_unfinished(connection: Connection) -> list[str]:
    """List the tables that have an unfinished copy."""
    if await connection.fetchval("SELECT to_regclass('partitions.progress') IS NULL"):
        return []
    return [row[0] for row in await connection.fetch("SELECT table_name FROM partitions.progress ORDER BY 1")]


async def _convert(
    connection: "asyncpg.Connection[asyncpg.Record]",
    table: str,
    count: int,
    batch_rows: int,
    on_progress: Callable[[CopyProgress], None],
) -> None:
    source = await _read_source(connection, table)
    if table not in await list_unfinished(connection):
        await _with_lock(connection, partial(_prepare, connection, source, count))
        _log.info("partitions.copy_began", extra={"table": table, "partition_count": count})
    estimated = await _estimate_rows(connection, source)
    while True:
        copied, is_last = await _copy_batch(connection, source, batch_rows)
        on_progress(CopyProgress(table=table, copied_rows=copied, estimated_rows=max(estimated, copied)))
        if is_last:
            break
    await _compare(connection, source)
    await _with_lock(connection, partial(_swap, connection, source))
    _log.info("partitions.table_replaced", extra={"table": table, "copied_rows": copied})


async def _read_source(connection: Connection, table: str) -> _Source:
    schema = await connection.fetchval(
        "SELECT relnamespace::regnamespace::text FROM pg_class WHERE oid = $1::text::regclass", table
    )
    key = await connection.fetch(_COLUMNS, table)
    return _Source(name=table, schema=schema, key=tuple((row["attname"], row["kind"]) for row in key))


async def _with_lock(connection: Connection, step: Callable[[], Awaitable[None]]) -> None:
    """Run a step in a transaction. It waits for its lock briefly, and is repeated if it does not get the lock.

    A longer wait would also stop all statements that need the table after it.
    """
    for attempt in range(1, _LOCK_ATTEMPTS + 1):
        try:
            async with connection.transaction():
                if not await connection.fetchval("SELECT pg_try_advisory_xact_lock($1)", MIGRATION_LOCK):
                    raise MigrationFailed("The schema is being migrated.", hint=_HINT)
                await step()
        except pg.LockNotAvailableError as error:
            if attempt == _LOCK_ATTEMPTS:
                raise MigrationFailed("A table stayed in use for too long.", hint=_HINT) from error
            await asyncio.sleep(_LOCK_PAUSE_SECONDS)
        else:
            return


async def _prepare(connection: Connection, source: _Source, count: int) -> None:
    copy, key = source.copy, source.columns
    primary_key = await connection.fetchval(
        "SELECT quote_ident(conname) FROM pg_constraint WHERE conrelid = $1::text::regclass AND contype = 'p'",
        source.table,
    )
    statements = [
        (
            f"CREATE TABLE {copy} (LIKE {source.table} INCLUDING ALL EXCLUDING INDEXES) "
            "PARTITION BY HASH (conversation_id)"
        ),
        f"ALTER TABLE {copy} ADD CONSTRAINT {primary_key} PRIMARY KEY ({key})",
        *await _index_statements(connection, source, count),
        *(
            f"CREATE TABLE {copy}_{number} PARTITION OF {copy} FOR VALUES WITH (MODULUS {count}, REMAINDER {number})"
            for number in range(count)
        ),
        *await _grants(connection, source),
        _mirror_function(source),
        (
            f"CREATE TRIGGER mirror AFTER INSERT OR UPDATE OR DELETE ON {source.table} "
            f"FOR EACH ROW EXECUTE FUNCTION {PARTITION_SCHEMA}.mirror_{source.name}()"
        ),
        f"INSERT INTO partitions.progress (table_name, partition_count) VALUES ('{source.name}', {count})",  # noqa: S608  reason: constants of this module only
    ]
    comment = await connection.fetchval(
        "SELECT quote_literal(obj_description($1::text::regclass, 'pg_class'))", source.table
    )
    if comment is not None:
        statements.append(f"COMMENT ON TABLE {copy} IS {comment}")
    for statement in statements:
        await connection.execute(statement)


async def _index_statements(connection: Connection, source: _Source, count: int) -> list[str]:
    """Return the statements that create the same indexes on the copy, with the same names in its own schema.

    A range of a BRIN index covers as much time as before: each partition gets a part of the rows of that time.
    """
    rows = await connection.fetch(_INDEXES, source.table)
    return [
        row["definition"].replace(f" ON {source.table} ", f" ON {source.copy} ")
        + (f" WITH (pages_per_range = {max(1, _BRIN_PAGES // count)})" if row["kind"] == "brin" else "")
        for row in rows
    ]


async def _grants(connection: Connection, source: _Source) -> list[str]:
    rows = await connection.fetch(_PRIVILEGES, source.table)
    return [f"GRANT {row['privilege_type']} ON {source.copy} TO {row['grantee']}" for row in rows]


def _mirror_function(source: _Source) -> str:
    """Return the statement that creates the trigger's function.

    It runs with the privileges of its owner: the role of the server need not know schema `partitions`.
    """
    old = ", ".join(f"OLD.{name}" for name, _ in source.key)
    return f"""
CREATE FUNCTION {PARTITION_SCHEMA}.mirror_{source.name}() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog AS $$
BEGIN
    IF TG_OP <> 'INSERT' THEN
        DELETE FROM {source.copy} WHERE ({source.columns}) = ({old});
    END IF;
    IF TG_OP <> 'DELETE' THEN
        INSERT INTO {source.copy} SELECT NEW.*;
    END IF;
    RETURN NULL;
END
$$"""  # noqa: S608  reason: constants of this module only


async def _estimate_rows(connection: Connection, source: _Source) -> int:
    estimate: int = await connection.fetchval(
        "SELECT reltuples::bigint FROM pg_class WHERE oid = $1::text::regclass", source.table
    )
    if estimate < 0:
        # The table was never analysed, so it is small or new.
        estimate = await connection.fetchval(f"SELECT count(*) FROM {source.table}")  # noqa: S608  reason: as above
    return estimate


async def _copy_batch(
    connection: "asyncpg.Connection[asyncpg.Record]", source: _Source, batch_rows: int
) -> tuple[int, bool]:
    """Copy the next rows. Returns the number of rows so far, and whether these were the last."""
    async with connection.transaction():
        progress = await connection.fetchrow(
            "SELECT last_key, copied_rows FROM partitions.progress WHERE table_name = $1 FOR UPDATE", source.name
        )
        if progress is None:
            raise MigrationFailed("The copy of a table was abandoned meanwhile.", hint=_HINT)
        last_key: Sequence[str] | None = progress["last_key"]
        key = f"({source.columns})"
        after = "" if last_key is None else f"WHERE {key} > {source.parameter(1)}"
        found = await connection.fetch(
            f"SELECT ARRAY[{', '.join(f'{name}::text' for name, _ in source.key)}] AS key FROM {source.table} "  # noqa: S608  reason: as above
            f"{after} ORDER BY {source.columns} LIMIT {batch_rows}",
            *([] if last_key is None else [last_key]),
        )
        if not found:
            return progress["copied_rows"], True
        until: list[str] = found[-1]["key"]
        after = "" if last_key is None else f"AND {key} > {source.parameter(2)}"
        # Rows that were written since have been mirrored.
        await connection.execute(
            f"INSERT INTO {source.copy} SELECT * FROM {source.table} "  # noqa: S608  reason: as above
            f"WHERE {key} <= {source.parameter(1)} {after} FOR SHARE ON CONFLICT DO NOTHING",
            *([until] if last_key is None else [until, last_key]),
        )
        copied: int = progress["copied_rows"] + len(found)
        await connection.execute(
            "UPDATE partitions.progress SET last_key = $2, copied_rows = $3 WHERE table_name = $1",
            source.name,
            until,
            copied,
        )
    return copied, len(found) < batch_rows


async def _compare(connection: "asyncpg.Connection[asyncpg.Record]", source: _Source) -> None:
    """Raise `MigrationFailed` unless both tables have the same number of rows in one snapshot."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        row = await connection.fetchrow(
            f"SELECT (SELECT count(*) FROM {source.table}) AS rows, (SELECT count(*) FROM {source.copy}) AS copied"  # noqa: S608  reason: as above
        )
    if row is None or row["rows"] != row["copied"]:
        raise MigrationFailed(
            f"The copy of table {source.name} has a different number of rows.",
            hint="Remove the copy with `strata migrate partition --abandon`, and begin again.",
        )


async def _swap(connection: Connection, source: _Source) -> None:
    await connection.execute(f"LOCK TABLE {source.table} IN ACCESS EXCLUSIVE MODE")
    await connection.execute(f"DROP TABLE {source.table}")
    await connection.execute(f"ALTER TABLE {source.copy} SET SCHEMA {source.schema}")
    await connection.execute(f"DROP FUNCTION {PARTITION_SCHEMA}.mirror_{source.name}()")
    await connection.execute("DELETE FROM partitions.progress WHERE table_name = $1", source.name)


async def _drop_copy(connection: Connection, source: _Source) -> None:
    await connection.execute(f"DROP TRIGGER mirror ON {source.table}")
    await connection.execute(f"DROP FUNCTION {PARTITION_SCHEMA}.mirror_{source.name}()")
    await connection.execute(f"DROP TABLE {source.copy}")
    await connection.execute("DELETE FROM partitions.progress WHERE table_name = $1", source.name)
