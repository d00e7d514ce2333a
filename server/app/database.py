"""Open the database of the settings: an embedded Postgres, or an external one."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from server.app.settings import Settings
from server.postgres.connections import DatabaseOptions
from server.postgres.embedded.service import open_embedded
from server.postgres.engine import Database
from server.postgres.migrations import migrate_up, require_current_schema


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


def _options(settings: Settings, url: str) -> DatabaseOptions:
    return DatabaseOptions(
        url=url,
        pool_size=settings.database_pool_size,
        pool_wait_seconds=settings.database_pool_wait_seconds,
        connect_seconds=settings.database_connect_seconds,
        statement_seconds=settings.database_statement_seconds,
        application_name=settings.database_application_name,
    )
