"""The worker as a value, as `wiring` is the server."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from server.app.database import open_database_options
from server.app.jobs import build_compactor, build_jobs, build_lengths, render_limits
from server.app.providers import open_available_providers
from server.app.replays import build_replays
from server.app.settings import Settings
from server.jobs.worker import WorkerParts
from server.postgres.connections import connect, translate
from server.postgres.engine import Database
from server.postgres.migrations import migrate_up, require_current_schema
from server.postgres.replay.conversations import make_replay_database
from server.postgres.store import PostgresStore
from server.prompts.renderer import JinjaRenderer
from server.prompts.templates import load_templates
from server.telemetry.compactions import CompactionTelemetry
from server.telemetry.replays import ReplayTelemetry


@asynccontextmanager
async def open_worker(settings: Settings, environment: Mapping[str, str]) -> AsyncIterator[WorkerParts]:
    """What a worker is made of, for as long as the block lasts.

    An embedded database is migrated; an external one is looked at when it answers, which may be later than the start.
    Keys of providers are needed for summaries and replays; a worker without them leaves summaries to others, and what
    it takes of a replay fails and says so.
    """
    async with AsyncExitStack() as stack:
        options = await stack.enter_async_context(open_database_options(settings))
        if settings.embedded:
            await migrate_up(options)
        database = Database(options, on_first_contact=require_current_schema)
        stack.push_async_callback(database.close)
        providers = await stack.enter_async_context(open_available_providers(settings, environment))
        renderer = JinjaRenderer(load_templates(settings.templates_dir), render_limits(settings))
        stack.push_async_callback(renderer.close)
        lengths = build_lengths(database)
        stack.push_async_callback(lengths.close)
        store = PostgresStore(database)
        compactor = build_compactor(settings, store, renderer, providers, CompactionTelemetry(), lengths=lengths)
        replay_store = make_replay_database(database)
        stack.push_async_callback(replay_store.close)
        replays = build_replays(
            settings, database, replay_store, renderer, providers, lengths=lengths, observer=ReplayTelemetry()
        )

        async def check_schema() -> None:
            async with database.connection():
                pass  # the pool looks at the schema with its first connection

        yield WorkerParts(
            jobs=(*build_jobs(settings, database, compactor), *replays.jobs),
            connect=partial(connect, options),
            check_schema=check_schema,
            translate=translate,
            shutdown=replays.shutdown,
        )
