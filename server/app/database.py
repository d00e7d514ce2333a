"""Open the database of the settings: an embedded Postgres, or an external one."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from server.app.settings import Settings
from server.postgres.connections import DatabaseOptions
from server.postgres.embedded.service import open_embedded
from server.postgres.engine import Database
from server.postgres.migrations import migrate_up, require_current_schema
from server.postgres.replica import is_reachable


@asynccontextmanager
async def open_database_options(settings: Settings) -> AsyncIterator[DatabaseOptions]:
    """Yield the options to connect to the database.

    An embedded Postgres is started, and stopped after the block unless other processes use it. Raises the `Setup`
    errors of `open_embedded`.
    """
    if settings.database_url is not None:
        yield _options(settings, settings.database_url.get_secret_value())
        return
    with open_embedded(settings.data_dir, user=settings.embedded_user) as embedded:
        yield _options(settings, embedded.url)


@asynccontextmanager
async def open_database(settings: Settings, *, migrate: bool = False) -> AsyncIterator[Database]:
    """Open the database until the block ends. An embedded one is migrated, an external one only with `migrate`.

    If the schema is not at the revision of this release, the first use raises `SchemaBehind` or `SchemaAhead`.
    """
    async with open_database_options(settings) as options:
        if settings.embedded or migrate:
            await migrate_up(options)
        database = Database(options, on_first_contact=require_current_schema)
        try:
            yield database
        finally:
            await database.close()


@asynccontextmanager
async def open_report_database(settings: Settings) -> AsyncIterator[Database]:
    """Open the database for a command that only reads: the replica of the settings if it answers, else the primary."""
    options = build_replica_options(settings)
    if options is None or not await is_reachable(options):
        async with open_database(settings) as database:
            yield database
        return
    database = Database(options, on_first_contact=require_current_schema)
    try:
        yield database
    finally:
        await database.close()


def build_replica_options(settings: Settings) -> DatabaseOptions | None:
    """Return the options to connect to the replica, or None if the settings name none."""
    if settings.database_read_url is None:
        return None
    return replace(_options(settings, settings.database_read_url.get_secret_value()), is_replica=True)


def _options(settings: Settings, url: str) -> DatabaseOptions:
    return DatabaseOptions(
        url=url,
        pool_size=settings.database_pool_size,
        pool_wait_seconds=settings.database_pool_wait_seconds,
        connect_seconds=settings.database_connect_seconds,
        statement_seconds=settings.database_statement_seconds,
        plan_cache_mode=settings.database_plan_mode,
        application_name=settings.database_application_name,
    )
