"""The database as a value: what commands need that do not serve. `wiring` builds the whole program on top of it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from server.app.settings import Settings
from server.postgres.connections import DatabaseOptions
from server.postgres.embedded.service import open_embedded
from server.postgres.engine import Database
from server.postgres.migrations import migrate_up, require_current_schema


@asynccontextmanager
async def open_database_options(settings: Settings) -> AsyncIterator[DatabaseOptions]:
    """How to reach the database. An embedded one runs from here to the end of the block, or longer if others use it.

    Raises the `Setup` errors of `open_embedded`.
    """
    if settings.database_url is not None:
        yield _options(settings, settings.database_url.get_secret_value())
        return
    with open_embedded(settings.data_dir, user=settings.embedded_user) as embedded:
        yield _options(settings, embedded.url)


@asynccontextmanager
async def open_database(settings: Settings) -> AsyncIterator[Database]:
    """The database for a command: an embedded one is migrated, an external one must be up to date already.

    Raises `SchemaBehind` and `SchemaAhead` on first use.
    """
    async with open_database_options(settings) as options:
        if settings.embedded:
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
