"""Background work as values: the compactor and the jobs, for a server that does them itself and for a worker."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Final

from server.app.database import open_database
from server.app.providers import Providers, open_available_providers
from server.app.settings import Settings
from server.compaction.background_call import BackgroundCalls
from server.compaction.compactor import Compactor, CompactorTools
from server.compaction.report import CompactionObserver
from server.compaction.signed_summary import SignedSummariser
from server.compaction.summary import Summariser
from server.compaction.typical_lengths import KnownLengths, TypicalLengths
from server.compaction.watch import CompactionWatch
from server.conversation.errors import StrataError
from server.conversation.shutdown import Shutdown
from server.conversation.store import Store
from server.jobs.compaction import SentCompactions, compaction_job
from server.jobs.indexing import index_job, index_walk_job
from server.jobs.job import Job
from server.jobs.queue_log import queue_log_job
from server.jobs.retention import retention_job
from server.jobs.sending import JobSender
from server.jobs.worker import StopRequest, Worker, WorkerOptions, WorkerParts
from server.payload.renderer import Renderer
from server.payload.shared_caches import StaticTextCache
from server.postgres.compaction.lengths import PostgresConversationLengths
from server.postgres.connections import connect, translate
from server.postgres.engine import Database
from server.postgres.inspection.indexer import index_all, index_news
from server.postgres.inspection.overviews import PostgresOverviews
from server.postgres.jobs.queue_log import prune_queue_log
from server.postgres.jobs.retention import sweep_raw_bytes
from server.postgres.store import PostgresStore
from server.prompts.limits import RenderLimits
from server.prompts.renderer import JinjaRenderer
from server.prompts.templates import load_templates
from server.providers.retry_policy import RetryPolicy
from server.providers.token_estimate import TokenEstimate
from server.telemetry.compactions import CompactionTelemetry

_PAUSE_SECONDS: Final = 10.0
_log = logging.getLogger("strata.jobs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Background:
    """What a server has beside its turns."""

    texts: StaticTextCache
    """Of the turns and of the compactor: what one has written the other need not read."""
    lengths: TypicalLengths
    compactor: Compactor
    watch: CompactionWatch
    jobs: tuple[Job, ...]


def build_background(
    settings: Settings,
    database: Database,
    store: Store,
    renderer: Renderer,
    providers: Providers,
    observer: CompactionObserver,
    estimate: TokenEstimate,
    *,
    lengths: TypicalLengths,
) -> Background:
    """The parts for a server."""
    texts = StaticTextCache()
    compactor = build_compactor(
        settings, store, renderer, providers, observer, lengths=lengths, texts=texts, estimate=estimate
    )
    queue = SentCompactions(JobSender(database.connection))
    return Background(
        texts=texts,
        lengths=lengths,
        compactor=compactor,
        watch=CompactionWatch(
            queue,
            observer,
            estimate,
            alarm_tokens=settings.compaction_alarm_tokens,
            lengths=lengths,
            alarms=PostgresOverviews(database),
        ),
        jobs=build_jobs(settings, database, compactor),
    )


@asynccontextmanager
async def open_compactor(
    settings: Settings, environment: Mapping[str, str]
) -> AsyncIterator[tuple[Database, Compactor]]:
    """A compactor by itself, for a command: with the database of the settings and the keys of the environment."""
    async with (
        open_database(settings) as database,
        open_available_providers(settings, environment) as providers,
    ):
        renderer = JinjaRenderer(load_templates(settings.templates_dir), render_limits(settings))
        lengths = build_lengths(database)
        try:
            store = PostgresStore(database)
            yield (
                database,
                build_compactor(settings, store, renderer, providers, CompactionTelemetry(), lengths=lengths),
            )
        finally:
            await lengths.close()
            await renderer.close()


@asynccontextmanager
async def working_inside(
    settings: Settings, database: Database, jobs: Sequence[Job], shutdown: Shutdown
) -> AsyncIterator[None]:
    """Does the jobs in this process while the block lasts, unless the settings leave them to others."""
    if not settings.worker_inside:
        yield
        return
    stop = StopRequest()
    working = asyncio.create_task(_work(settings, database, jobs, stop, shutdown), name="worker")
    try:
        yield
    finally:
        stop.ask()
        await asyncio.wait({working})


async def _work(
    settings: Settings, database: Database, jobs: Sequence[Job], stop: StopRequest, shutdown: Shutdown
) -> None:
    async def check_schema() -> None:
        async with database.connection():
            pass  # the pool looks at the schema with its first connection

    parts = WorkerParts(
        jobs=jobs,
        connect=partial(connect, database.options),
        check_schema=check_schema,
        translate=translate,
        shutdown=shutdown,
    )
    options = WorkerOptions(shutdown_limit_seconds=settings.shutdown_limit_seconds)
    while not stop.asked.is_set():
        try:
            await Worker(parts, options).run(stop)
        except StrataError as error:
            # A schema of another release: the server says so itself, and may outlive the migration.
            _log.warning("worker.paused", extra={"code": error.code})
            await asyncio.wait({asyncio.ensure_future(stop.asked.wait())}, timeout=_PAUSE_SECONDS)


def render_limits(settings: Settings) -> RenderLimits:
    """The limits of the processes that render templates."""
    return RenderLimits(workers=settings.template_workers, wait_seconds=settings.template_wait_seconds)


def build_lengths(database: Database) -> TypicalLengths:
    """What a process knows about how long conversations get; to be closed at its end."""
    return TypicalLengths(PostgresConversationLengths(database))


def build_compactor(
    settings: Settings,
    store: Store,
    renderer: Renderer,
    providers: Providers,
    observer: CompactionObserver,
    *,
    lengths: KnownLengths,
    texts: StaticTextCache | None = None,
    estimate: TokenEstimate | None = None,
) -> Compactor:
    """The compactor. Without providers it does everything but summaries, signed ones included."""
    calls = BackgroundCalls(
        store,
        providers.by_name,
        retry_policy=RetryPolicy(attempts=settings.turn_attempts, budget_seconds=settings.turn_retry_seconds),
        observer=observer,
    )
    summariser = Summariser(calls, renderer, limit_tokens=settings.summary_limit_tokens)
    return Compactor(
        CompactorTools(
            store=store,
            renderer=renderer,
            summariser=summariser,
            signed_summariser=SignedSummariser(store, calls),
            observer=observer,
            texts=texts or StaticTextCache(),
            estimate=estimate or TokenEstimate(),
            lengths=lengths,
            result_limit_chars=settings.compaction_result_limit_chars,
        )
    )


def build_jobs(settings: Settings, database: Database, compactor: Compactor) -> tuple[Job, ...]:
    """All jobs but those of replays."""

    async def compact(tenant_id: str, conversation_id: str) -> datetime | None:
        return (await compactor.compact(tenant_id, conversation_id)).look_again_at

    async def index() -> tuple[int, int]:
        report = await index_news(database)
        return report.conversation_count, report.turn_count

    async def walk() -> tuple[int, int]:
        report = await index_all(database)
        return report.conversation_count, report.turn_count

    return (
        retention_job(settings.raw_retention_days, partial(sweep_raw_bytes, database)),
        compaction_job(compact, JobSender(database.connection)),
        queue_log_job(settings.queue_log_days, partial(prune_queue_log, database)),
        index_job(index),
        index_walk_job(walk),
    )
