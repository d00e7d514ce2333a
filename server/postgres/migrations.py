"""The schema: the revision of the database, and migrations to another one.

The revisions are in `migrations/`, next to the package in a checkout and inside it in an installed wheel. An advisory
lock serialises processes that migrate at the same time; the second has nothing left to do. It polls for the lock
instead of waiting in a statement: `CREATE INDEX CONCURRENTLY` waits for every open transaction, including the waiting
one, which would be a deadlock.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from asyncpg import exceptions as pg
from sqlalchemy import Connection as SyncConnection
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from server.conversation.bundled import find_bundled
from server.conversation.errors import MigrationFailed, SchemaAhead, SchemaBehind
from server.postgres.connections import Connection, DatabaseOptions, connect, translate, translated_errors
from server.postgres.replay.conversation_tables import REPLAY_SCHEMA
from server.postgres.schema import metadata

Result = TypeVar("Result")

MIGRATION_LOCK: Final = 0x5354524154410001
"""The advisory lock of a process that changes the schema."""
_LOCK_PAUSE_SECONDS: Final = 0.1
_log = logging.getLogger("strata.migrations")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaState:
    """The revision of the database and that of this release."""

    current: str | None
    """None: the database is empty."""
    head: str
    pending: tuple[str, ...]
    """Revisions that are not applied yet, oldest first."""
    known: bool
    """False: the database has an unknown revision, from a newer release."""


async def read_schema_state(options: DatabaseOptions) -> SchemaState:
    """Read the revision of the database. Raises `DatabaseUnavailable`."""
    connection = await connect(options)
    try:
        with translated_errors():
            return _state(await _current_revision(connection))
    finally:
        await connection.close()


async def require_current_schema(connection: Connection) -> None:
    """Raise `SchemaBehind` or `SchemaAhead` unless the database has this release's revision."""
    state = _state(await _current_revision(connection))
    if not state.known:
        raise SchemaAhead(f"The database is at revision {state.current}, which this release does not know.")
    if state.pending:
        raise SchemaBehind(f"The database is at revision {state.current or 'none'}, this release needs {state.head}.")


async def migrate_up(options: DatabaseOptions) -> SchemaState:
    """Migrate to this release's revision. Raises `MigrationFailed`, `SchemaAhead`, `DatabaseUnavailable`.

    Each revision is a transaction of its own: a failed one leaves no changes, those before it are kept.
    """
    state = await read_schema_state(options)
    if not state.known:
        raise SchemaAhead(f"The database is at revision {state.current}, which this release does not know.")
    if state.pending:
        await _run(options, lambda config: command.upgrade(config, "head"))
        _log.info(
            "schema.migrated",
            extra={"from_revision": state.current, "to_revision": state.head, "applied": list(state.pending)},
        )
    return await read_schema_state(options)


async def migrate_down_one(options: DatabaseOptions) -> SchemaState:
    """Revert one revision. Raises `MigrationFailed`, also if there is none."""
    state = await read_schema_state(options)
    if state.current is None:
        raise MigrationFailed("The database has no schema to go back from.", hint="Nothing was changed.")
    if not state.known:
        raise SchemaAhead(f"The database is at revision {state.current}, which this release does not know.")
    await _run(options, lambda config: command.downgrade(config, "-1"))
    _log.info("schema.migrated", extra={"from_revision": state.current, "direction": "down"})
    return await read_schema_state(options)


async def find_drift(options: DatabaseOptions) -> list[str]:
    """List the differences between the database and the tables of this release."""

    def compare(connection: SyncConnection) -> list[str]:
        opts = {
            "compare_type": True,
            "compare_server_default": True,
            "include_name": is_described,
            "include_schemas": True,
        }
        context = MigrationContext.configure(connection, opts=opts)
        return [repr(difference) for difference in compare_metadata(context, metadata)]

    async with _sync_connection(options) as run_sync:
        drift: list[str] = await run_sync(compare)
        return drift


def is_described(name: str | None, kind: str, _parents: object) -> bool:
    """Return whether our metadata describes an object. The tables of pgqueuer have a test of their own."""
    if kind == "schema":
        return name in {None, REPLAY_SCHEMA}
    return kind != "table" or name is None or not name.startswith("pgqueuer")


def write_revision(name: str) -> Path:
    """Create an empty revision from the template, for developers in a checkout."""
    slug = "_".join(name.lower().split())
    today = datetime.now(UTC).strftime("%Y%m%d")
    taken = {script.revision for script in _scripts().walk_revisions()}
    number = next(number for number in range(1, 100) if f"{today}_{number:02d}" not in taken)
    script = ScriptDirectory.from_config(_config()).generate_revision(
        f"{today}_{number:02d}", slug, refresh=True, head="head"
    )
    if script is None:
        raise MigrationFailed("Alembic wrote no file.")
    return Path(script.path)


def _state(current: str | None) -> SchemaState:
    scripts = _scripts()
    head = scripts.get_current_head()
    if head is None:
        raise MigrationFailed("This installation has no migrations.", hint="Reinstall Strata.")
    newest_first = [script.revision for script in scripts.walk_revisions()]
    known = current is None or current in newest_first
    pending = newest_first if current is None else newest_first[: newest_first.index(current)] if known else []
    return SchemaState(current=current, head=head, pending=tuple(reversed(pending)), known=known)


async def _current_revision(connection: Connection) -> str | None:
    try:
        revision: str | None = await connection.fetchval("SELECT version_num FROM alembic_version")
    except pg.UndefinedTableError:
        return None
    return revision


async def _run(options: DatabaseOptions, step: Callable[[Config], None]) -> None:
    def migrate(connection: SyncConnection) -> None:
        config = _config()
        config.attributes["connection"] = connection
        step(config)

    async with _sync_connection(options) as run_sync:
        if not await run_sync(_try_lock):
            _log.info("schema.lock_awaited")
            while not await run_sync(_try_lock):  # noqa: ASYNC110  reason: another process has the lock
                await asyncio.sleep(_LOCK_PAUSE_SECONDS)
        await run_sync(_require_no_copy)
        await run_sync(migrate)


def _try_lock(connection: SyncConnection) -> bool:
    """Try to take the lock of migrations, which ends with the session. Leaves no transaction open."""
    taken = connection.execute(text("SELECT pg_try_advisory_lock(:key)"), {"key": MIGRATION_LOCK}).scalar_one()
    connection.commit()
    return bool(taken)


def _require_no_copy(connection: SyncConnection) -> None:
    """Raise `MigrationFailed` if a table is being copied to partitions, see `partitions`: the copy would differ."""
    if connection.execute(text("SELECT to_regclass('partitions.progress') IS NOT NULL")).scalar_one():
        tables = connection.execute(text("SELECT table_name FROM partitions.progress ORDER BY 1")).scalars().all()
        if tables:
            raise MigrationFailed(
                f"These tables are being copied to partitions: {', '.join(tables)}.",
                hint="Finish with `strata migrate partition`, or remove the copies with its option --abandon.",
            )
    connection.commit()


@asynccontextmanager
async def _sync_connection(
    options: DatabaseOptions,
) -> AsyncIterator[Callable[[Callable[[SyncConnection], Result]], Any]]:
    """Open a SQLAlchemy connection for Alembic over one that is made like all others."""
    # Each revision sets its own limits, and CREATE INDEX CONCURRENTLY waits for running transactions.
    own = replace(options, lock_seconds=0, idle_transaction_seconds=0)
    engine = create_async_engine("postgresql+asyncpg://", async_creator=lambda: connect(own), poolclass=NullPool)
    try:
        async with engine.connect() as connection:
            yield connection.run_sync
            await connection.commit()
    except DBAPIError as error:
        cause = error.orig.__cause__ if error.orig is not None else None
        if isinstance(cause, pg.InsufficientPrivilegeError):
            raise MigrationFailed(
                f"The role of STRATA_DATABASE_URL may not change the schema: {cause}.",
                hint="Migrate as the role that owns the database; docs/operations/running.md describes the two roles.",
            ) from error
        # The database is available if a revision does not get a lock.
        is_locked = isinstance(cause, pg.LockNotAvailableError)
        translated = translate(cause) if cause is not None and not is_locked else None
        if translated is not None:
            raise translated from error
        raise MigrationFailed(f"The database refused a migration: {cause or error.orig}.") from error
    finally:
        await asyncio.shield(engine.dispose())


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(find_bundled("migrations")).replace("%", "%%"))
    config.set_main_option("file_template", "%%(year)d-%%(month).2d-%%(day).2d_%%(slug)s")
    config.set_main_option("timezone", "UTC")
    return config


def _scripts() -> ScriptDirectory:
    return ScriptDirectory.from_config(_config())
