"""The parts that a server, a worker and some commands have in common: store, rendering, compaction and jobs.

`open_services` builds them once per process. `replays` adds replays, and `wiring` adds turns and the HTTP interface.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from server.app.database import build_replica_options, open_database
from server.app.providers import Providers, open_providers
from server.app.settings import Settings
from server.compaction.background_call import BackgroundCalls
from server.compaction.compactor import Compactor
from server.compaction.report import CompactionObserver
from server.compaction.signed_summary import SignedSummariser
from server.compaction.summary import Summariser
from server.compaction.typical_lengths import KnownLengths, TypicalLengths
from server.conversation.store import Store
from server.jobs.compaction import compaction_job
from server.jobs.indexing import index_job, index_walk_job
from server.jobs.job import Job
from server.jobs.queue import JobSender
from server.jobs.retention import queue_log_job, retention_job
from server.payload.renderer import Renderer
from server.payload.shared_caches import StaticTextCache
from server.postgres.compaction.lengths import PostgresConversationLengths
from server.postgres.engine import Database
from server.postgres.jobs import prune_queue_log, sweep_raw_bytes
from server.postgres.replay.conversations import make_replay_database
from server.postgres.replica import ReplicaDatabase
from server.postgres.store import PostgresStore
from server.prompts.renderer import JinjaRenderer
from server.prompts.templates import load_templates
from server.prompts.worker_pool import RenderLimits
from server.providers.retry_policy import RetryPolicy
from server.providers.token_estimate import TokenEstimate
from server.telemetry.compactions import CompactionTelemetry


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The services of one process, on its database and its providers."""

    settings: Settings
    database: Database
    replica: ReplicaDatabase | None
    """For reports; None if the settings name none."""
    replay_database: Database
    """The same database, with the tables of replayed conversations in place of the others."""
    providers: Providers
    store: PostgresStore
    renderer: JinjaRenderer
    texts: StaticTextCache
    """Shared by turns and the compactor, which read the same static texts."""
    estimate: TokenEstimate
    lengths: TypicalLengths
    compactor: Compactor
    jobs: tuple[Job, ...]
    """All jobs but those of replays."""


@asynccontextmanager
async def open_services(
    settings: Settings, database: Database, providers: Providers, observer: CompactionObserver | None = None
) -> AsyncIterator[Services]:
    """Open the services until the block ends."""
    async with AsyncExitStack() as stack:
        limits = RenderLimits(workers=settings.template_workers, wait_seconds=settings.template_wait_seconds)
        renderer = JinjaRenderer(load_templates(settings.templates_dir), limits)
        stack.push_async_callback(renderer.close)
        replica_options = build_replica_options(settings)
        replica = None if replica_options is None else ReplicaDatabase(replica_options, database)
        if replica is not None:
            stack.push_async_callback(replica.close)
        replay_database = make_replay_database(database)
        stack.push_async_callback(replay_database.close)
        lengths = TypicalLengths(PostgresConversationLengths(database))
        stack.push_async_callback(lengths.close)
        store, texts, estimate = PostgresStore(database), StaticTextCache(), TokenEstimate()
        observer = observer or CompactionTelemetry()
        policy = RetryPolicy(attempts=settings.turn_attempts, budget_seconds=settings.turn_retry_seconds)
        calls = BackgroundCalls(store, providers.by_name, retry_policy=policy, observer=observer)
        compactor = build_compactor(
            settings,
            store,
            renderer,
            calls,
            observer,
            lengths=lengths,
            texts=texts,
            estimate=estimate,
        )
        yield Services(
            settings=settings,
            database=database,
            replica=replica,
            replay_database=replay_database,
            providers=providers,
            store=store,
            renderer=renderer,
            texts=texts,
            estimate=estimate,
            lengths=lengths,
            compactor=compactor,
            jobs=_build_jobs(settings, database, compactor),
        )


@asynccontextmanager
async def open_command_services(settings: Settings, environment: Mapping[str, str]) -> AsyncIterator[Services]:
    """Open the services for a command: the database of the settings, and the providers whose keys are set."""
    async with (
        open_database(settings) as database,
        open_providers(settings, None, environment) as providers,
        open_services(settings, database, providers) as services,
    ):
        yield services


def build_compactor(
    settings: Settings,
    store: Store,
    renderer: Renderer,
    calls: BackgroundCalls,
    observer: CompactionObserver,
    *,
    lengths: KnownLengths,
    texts: StaticTextCache,
    estimate: TokenEstimate,
) -> Compactor:
    """Build a compactor. Without providers it compacts, but writes no summaries."""
    return Compactor(
        store=store,
        renderer=renderer,
        summariser=Summariser(calls, renderer, limit_tokens=settings.summary_limit_tokens),
        signed_summariser=SignedSummariser(store, calls),
        observer=observer,
        texts=texts,
        estimate=estimate,
        lengths=lengths,
        result_limit_chars=settings.compaction_result_limit_chars,
    )


def _build_jobs(settings: Settings, database: Database, compactor: Compactor) -> tuple[Job, ...]:
    async def compact(tenant_id: str, conversation_id: str) -> datetime | None:
        return (await compactor.compact(tenant_id, conversation_id)).recheck_at

    return (
        retention_job(settings.raw_retention_days, partial(sweep_raw_bytes, database)),
        compaction_job(compact, JobSender(database)),
        queue_log_job(settings.queue_log_days, partial(prune_queue_log, database)),
        index_job(database),
        index_walk_job(database),
    )
