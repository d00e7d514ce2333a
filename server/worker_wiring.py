"""The worker as a value, as `wiring` is the server."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from server.database_wiring import open_database_options
from server.jobs.retention import retention_job
from server.jobs.worker import WorkerParts
from server.postgres.connecting import connect, translate
from server.postgres.engine import Database
from server.postgres.migrations import migrate_up, require_current_schema
from server.postgres.retention import sweep_raw_bytes
from server.settings import Settings


@asynccontextmanager
async def open_worker(settings: Settings) -> AsyncIterator[WorkerParts]:
    """What a worker is made of, for as long as the block lasts.

    An embedded database is migrated; an external one is looked at when it answers, which may be later than the start.
    """
    async with AsyncExitStack() as stack:
        options = await stack.enter_async_context(open_database_options(settings))
        if settings.embedded:
            await migrate_up(options)
        database = Database(options, on_first_contact=require_current_schema)
        stack.push_async_callback(database.close)

        async def check_schema() -> None:
            async with database.connection():
                pass  # the pool looks at the schema with its first connection

        yield WorkerParts(
            jobs=(retention_job(settings.raw_retention_days, partial(sweep_raw_bytes, database)),),
            connect=partial(connect, options),
            check_schema=check_schema,
            translate=translate,
        )
