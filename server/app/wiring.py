"""The server and the worker as values: this module builds and connects all their parts.

`strata serve`, `strata demo` and the tests open a `Program` here, so the tests run the program that is deployed.
`strata worker` opens a `Worker`. `services` builds what both have in common.
"""

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import Final

from server import __version__
from server.app.database import open_database
from server.app.providers import FOLDS, Providers, open_offline_providers
from server.app.replays import ReplayParts, build_replays
from server.app.services import open_services
from server.app.settings import Settings
from server.caching.maintainer import CacheMaintainer
from server.compaction.compactor import Compactor
from server.compaction.typical_lengths import TypicalLengths
from server.compaction.watch import CompactionWatch
from server.conversation.errors import DatabaseUnavailable, StrataError
from server.conversation.shutdown import Shutdown
from server.inspection.admin_sessions import SessionLimits
from server.inspection.assistant_editor import AssistantEditor
from server.inspection.calls import CallInspector
from server.inspection.jobs import JobStatus, Watch, report_all_jobs
from server.jobs.compaction import SentCompactions
from server.jobs.job import Job
from server.jobs.queue import JobSender
from server.jobs.worker import StopRequest, Worker, WorkerOptions
from server.payload.preparation import PayloadPreparation
from server.postgres.access.admin_sessions import PostgresAdminSessions
from server.postgres.access.key_cache import KeyCache
from server.postgres.access.key_ring import PostgresKeyRing
from server.postgres.access.rate_limit import PostgresRateLimiter
from server.postgres.archive.exporter import PostgresArchives
from server.postgres.caching import PostgresCacheRegister
from server.postgres.connections import DatabaseOptions, connect, translated_errors
from server.postgres.engine import Database, DatabaseProbe
from server.postgres.inspection.audit_log import PostgresAuditLog
from server.postgres.inspection.inspector import PostgresInspector
from server.postgres.inspection.overviews import PostgresCompactionAlarms
from server.postgres.inspection.saved_views import PostgresSavedViews
from server.postgres.inspection.search_index import load_lag_seconds
from server.postgres.migrations import require_current_schema
from server.postgres.notifications import PostgresNotifications
from server.postgres.replica import ReplicaDatabase
from server.postgres.store import PostgresStore
from server.prompts.worker_pool import WorkerPool
from server.providers.retry_policy import RetryPolicy
from server.providers.wire.frames import read_frames
from server.replay.rerun.calls import ReplayCalls
from server.telemetry.metrics import Metrics
from server.telemetry.replays import ReplayTelemetry
from server.telemetry.spans import open_tracing
from server.telemetry.turns import TurnTelemetry
from server.turns.recovery import TurnRecovery
from server.turns.running import RunningTurns
from server.turns.service import TurnService
from server.turns.tools import TurnLimits, TurnTools
from server.web.app import WebParts, build_app
from server.web.body_budget import BodyBudget
from server.web.forwarded import TrustedProxies
from server.web.middleware import RequestMiddleware

_SCHEMA_PAUSE_SECONDS: Final = 10.0
"""How long the worker inside a server waits while the schema is of another release."""
_log = logging.getLogger("strata.program")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A server, ready to serve `app`."""

    settings: Settings
    database: Database
    replica: ReplicaDatabase | None
    providers: Providers
    store: PostgresStore
    key_ring: PostgresKeyRing
    running_turns: RunningTurns
    turn_service: TurnService
    cache_maintainer: CacheMaintainer
    compactor: Compactor
    compaction_watch: CompactionWatch
    lengths: TypicalLengths
    replays: ReplayParts
    jobs: tuple[Job, ...]
    job_watch: Watch[Sequence[JobStatus]]
    index_watch: Watch[float]
    template_workers: WorkerPool
    owner: str
    """The name of this process on the leases that it holds."""
    metrics: Metrics
    app: RequestMiddleware


@asynccontextmanager
async def open_program(
    settings: Settings, *, providers: Providers | None = None, migrate: bool = False
) -> AsyncIterator[Program]:
    """Open a server until the block ends. Leaving the block lets running turns finish first.

    `migrate`: also migrate an external database; an embedded one always is. Raises `SchemaBehind` or `SchemaAhead` if
    the database is not at this release's revision. If an external database is unavailable, the program starts anyway:
    `/readyz` reports it, and the schema is checked with the first connection.
    """
    providers = providers or Providers()
    async with AsyncExitStack() as stack:
        database = await stack.enter_async_context(open_database(settings, migrate=migrate))
        if not settings.embedded and not migrate:
            await _check_schema(database.options)
        otlp_headers = settings.otlp_headers.get_secret_value() if settings.otlp_headers else None
        tracing = open_tracing(settings.otlp_endpoint, otlp_headers, settings.service_name, __version__)
        stack.callback(tracing.shutdown)
        metrics = Metrics(version=__version__, assistant_labels=settings.metrics_assistant_labels)
        notifications = await stack.enter_async_context(PostgresNotifications(database.options))
        services = await stack.enter_async_context(open_services(settings, database, providers, metrics.compactions))
        offline_providers = await stack.enter_async_context(open_offline_providers(settings))
        store, renderer, estimate = services.store, services.renderer, services.estimate

        # Turns
        cache_maintainer = CacheMaintainer(
            PostgresCacheRegister(database),
            providers.by_name,
            estimate,
            budget_usd_per_hour=Decimal(str(settings.cache_storage_usd_per_hour)),
        )
        compaction_watch = CompactionWatch(
            SentCompactions(JobSender(database)),
            metrics.compactions,
            estimate,
            alarm_tokens=settings.compaction_alarm_tokens,
            lengths=services.lengths,
            alarms=PostgresCompactionAlarms(database),
        )
        tools = TurnTools(
            owner=f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}",
            store=store,
            preparation=PayloadPreparation(store, renderer, providers.by_name, texts=services.texts),
            notifications=notifications,
            observer=TurnTelemetry(metrics, tracing),
            folds=FOLDS,
            limits=TurnLimits(
                lease_seconds=settings.lease_seconds,
                flush_seconds=settings.flush_seconds,
                ending_seconds=settings.turn_ending_seconds,
                queue_limit=settings.queue_limit,
                queue_seconds=settings.queue_seconds,
            ),
            retry_policy=RetryPolicy(attempts=settings.turn_attempts, budget_seconds=settings.turn_retry_seconds),
            estimate=estimate,
            cache_maintainer=cache_maintainer,
            follower=compaction_watch,
            call_slots=providers.call_slots,
        )
        running_turns = RunningTurns()
        turn_service = TurnService(tools, running_turns)

        # Replays and jobs
        replays = build_replays(services, metrics.replays)
        jobs = (*services.jobs, *replays.jobs)

        # The HTTP interface
        inspector, audit_log = PostgresInspector(database, services.replica), PostgresAuditLog(database)
        bodies = BodyBudget(
            settings.body_total_bytes,
            max_body_bytes=settings.body_limit_bytes,
            wait_seconds=settings.body_wait_seconds,
            body_seconds=settings.body_seconds,
        )
        app = build_app(
            WebParts(
                key_ring=PostgresKeyRing(database, KeyCache(notifications)),
                store=store,
                turn_service=turn_service,
                compactor=services.compactor,
                renderer=renderer,
                rate_limiter=PostgresRateLimiter(database, settings.rate_limit_per_minute),
                inspector=inspector,
                saved_views=PostgresSavedViews(database),
                replay_service=replays.service,
                replay_calls=ReplayCalls(
                    replays.replays,
                    replays.replay_inspector,
                    CallInspector(
                        replays.replay_inspector, replays.replay_store, offline_providers, read_frames, estimate
                    ),
                ),
                call_inspector=CallInspector(inspector, store, offline_providers, read_frames, estimate),
                archives=PostgresArchives(database),
                assistant_editor=AssistantEditor(
                    store=store, renderer=renderer, estimate=estimate, audit_log=audit_log
                ),
                admin_sessions=PostgresAdminSessions(
                    database,
                    SessionLimits(
                        idle_seconds=settings.admin_idle_seconds,
                        age_seconds=settings.admin_session_seconds,
                        max_failures=settings.admin_login_failures,
                        lock_seconds=settings.admin_lock_seconds,
                    ),
                ),
                audit_log=audit_log,
                metrics_token=settings.metrics_token.get_secret_value() if settings.metrics_token else None,
                trusted_proxies=TrustedProxies(settings.trusted_proxies),
                default_provider=providers.default,
                provider_names=tuple(providers.by_name),
                image_limit_bytes=settings.image_limit_bytes,
                keep_alive_seconds=settings.keep_alive_seconds,
                stall_seconds=settings.stream_stall_seconds,
                probes=[DatabaseProbe(database)],
                running_turns=running_turns,
                metrics=metrics,
                tracing=tracing,
                body_limit_bytes=settings.body_limit_bytes,
                bodies=bodies,
                cors_origins=settings.cors_origins,
                version=__version__,
            )
        )
        program = Program(
            settings=settings,
            database=database,
            replica=services.replica,
            providers=providers,
            store=store,
            key_ring=PostgresKeyRing(database),
            running_turns=running_turns,
            turn_service=turn_service,
            cache_maintainer=cache_maintainer,
            compactor=services.compactor,
            compaction_watch=compaction_watch,
            lengths=services.lengths,
            replays=replays,
            jobs=jobs,
            job_watch=Watch(
                partial(report_all_jobs, inspector.report_jobs, [job.name for job in jobs]), metrics.jobs.publish
            ),
            index_watch=Watch(partial(load_lag_seconds, database)),
            template_workers=renderer.pool,
            owner=tools.owner,
            metrics=metrics,
            app=app,
        )
        _add_gauges(program, bodies)

        # Background tasks. They end in the reverse order, after running turns have finished.
        watches = {
            "recovery": TurnRecovery(tools).watch,
            "job watch": program.job_watch.run,
            "index watch": program.index_watch.run,
            "cache maintainer": cache_maintainer.watch,
        }
        for name, watch in watches.items():
            stack.push_async_callback(_end, asyncio.create_task(watch(), name=name))
        stack.push_async_callback(cache_maintainer.close)
        if settings.worker_inside:
            await stack.enter_async_context(_working_inside(settings, database, jobs, replays.shutdown))
        stack.push_async_callback(compaction_watch.close)
        stack.push_async_callback(_stop, program)
        yield program


@asynccontextmanager
async def open_worker(
    settings: Settings, *, providers: Providers | None = None, options: WorkerOptions | None = None
) -> AsyncIterator[Worker]:
    """Open a worker until the block ends.

    An embedded database is migrated. The schema of an external one is checked when it is reached, which may be after
    the start. Summaries and replays need providers: without them summaries are left to other workers, and items of
    replays fail.
    """
    async with (
        open_database(settings) as database,
        open_services(settings, database, providers or Providers()) as services,
    ):
        replays = build_replays(services, ReplayTelemetry())
        yield Worker(
            database,
            (*services.jobs, *replays.jobs),
            shutdown=replays.shutdown,
            options=options or _worker_options(settings),
        )


def _add_gauges(program: Program, bodies: BodyBudget) -> None:
    """Add the metrics that are read from the parts when they are scraped."""
    database, slots, pool = program.database, program.providers.call_slots, program.template_workers
    gauge, counter = program.metrics.gauge_callback, program.metrics.counter_callback
    gauge("strata_database_connections", "Open database connections.", lambda: database.pool_counts()[0])
    gauge("strata_database_connections_in_use", "Database connections in use.", lambda: database.pool_counts()[1])
    replica = program.replica
    if replica is not None:
        gauge(
            "strata_database_replica_available",
            "Whether reports read the replica: 1, or 0 while they read the primary instead.",
            lambda: float(replica.is_available),
        )
    gauge(
        "strata_provider_calls_in_use",
        "Provider calls that run now or are reserved by turns.",
        lambda: slots.in_use,
    )
    gauge("strata_provider_calls_limit", "Maximum number of concurrent provider calls.", lambda: slots.limit)
    gauge("strata_provider_calls_waiting", "Provider calls that wait for another one to end.", lambda: slots.waiting)
    counter(
        "strata_provider_calls_refused_total",
        "Provider calls that were refused because no other call ended in time.",
        lambda: slots.refused_count,
    )
    gauge(
        "strata_template_workers_busy",
        "Worker processes that render a template or evaluate an assertion.",
        lambda: pool.busy_count,
    )
    gauge("strata_template_tasks_waiting", "Tasks that wait for a worker process.", lambda: pool.waiting_count)
    gauge(
        "strata_index_lag_seconds",
        "How far the lists and searches of operators lag behind the turns.",
        lambda: float("nan") if program.index_watch.value is None else program.index_watch.value,
    )
    gauge("strata_http_body_bytes", "Bytes of large request bodies that are read now.", lambda: bodies.in_use_bytes)
    gauge("strata_http_bodies_waiting", "Large request bodies that wait to be read.", lambda: bodies.waiting)
    counter(
        "strata_http_bodies_refused_total",
        "Large request bodies that were refused because too many others were read.",
        lambda: bodies.refused_count,
    )


def _worker_options(settings: Settings) -> WorkerOptions:
    return WorkerOptions(shutdown_limit_seconds=settings.shutdown_limit_seconds)


@asynccontextmanager
async def _working_inside(
    settings: Settings, database: Database, jobs: Sequence[Job], shutdown: Shutdown
) -> AsyncIterator[None]:
    """Run a worker in this process while the block lasts."""
    stop = StopRequest()

    async def work() -> None:
        while not stop.requested.is_set():
            try:
                await Worker(database, jobs, shutdown=shutdown, options=_worker_options(settings)).run(stop)
            except StrataError as error:
                # The schema is of another release. The server reports that itself, and may outlive the migration.
                _log.warning("worker.paused", extra={"code": error.code})
                await asyncio.wait({asyncio.ensure_future(stop.requested.wait())}, timeout=_SCHEMA_PAUSE_SECONDS)

    working = asyncio.create_task(work(), name="worker")
    try:
        yield
    finally:
        stop.request()
        await asyncio.wait({working})


async def _end(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _check_schema(options: DatabaseOptions) -> None:
    try:
        connection = await connect(options)
        try:
            with translated_errors():
                await require_current_schema(connection)
        finally:
            await connection.close()
    except DatabaseUnavailable as error:
        _log.warning("program.started_without_database", extra={"reason": str(error)})


async def _stop(program: Program) -> None:
    """Let running turns finish within the limit, and surrender the leases of those that did not."""
    report = await program.running_turns.drain(program.settings.shutdown_limit_seconds)
    try:
        surrendered = await program.store.expire_leases(program.owner)
    except StrataError as error:
        # The leases expire by themselves.
        _log.warning("program.leases_not_surrendered", extra={"reason": str(error)})
        surrendered = 0
    _log.info(
        "program.stopped",
        extra={
            "turns_finished": report.finished_count,
            "turns_cancelled": report.cancelled_count,
            "leases_surrendered": surrendered,
        },
    )
