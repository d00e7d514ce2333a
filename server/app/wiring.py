"""The program as a value: the one place that knows every part and builds them all.

`strata serve`, `strata demo` and the tests build it here, so what is tested is what runs.
"""

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial

from server import __version__
from server.app.database import open_database_options
from server.app.jobs import Background, build_background, build_lengths, render_limits, working_inside
from server.app.providers import FOLDS, Providers, open_offline_providers
from server.app.replays import ReplayParts, build_replays
from server.app.settings import Settings
from server.caching.maintainer import CacheKeeper
from server.compaction.typical_lengths import TypicalLengths
from server.conversation.errors import DatabaseUnavailable, StrataError
from server.inspection.admin_sessions import SessionLimits
from server.inspection.assistant_editor import AssistantEditor, EditorTools
from server.inspection.call_view import CallInspector
from server.inspection.index_watch import IndexWatch
from server.inspection.job_watch import JobWatch
from server.payload.preparation import PayloadPreparation
from server.postgres.access.admin_sessions import PostgresAdminSessions
from server.postgres.access.key_cache import RememberedKeys
from server.postgres.access.key_ring import PostgresKeyRing
from server.postgres.access.rate_limit import PostgresRateLimiter
from server.postgres.archive.exporter import PostgresArchives
from server.postgres.caching.register import PostgresCacheRegister
from server.postgres.connections import DatabaseOptions, connect, translated_errors
from server.postgres.engine import Database
from server.postgres.inspection.assistants import PostgresAssistantInspector
from server.postgres.inspection.audit_log import PostgresAuditLog
from server.postgres.inspection.indexer import find_progress
from server.postgres.inspection.inspector import PostgresInspector
from server.postgres.inspection.job_reports import PostgresJobReports
from server.postgres.inspection.overviews import PostgresOverviews
from server.postgres.inspection.saved_views import PostgresSavedViews
from server.postgres.inspection.usage_reports import PostgresUsageReports
from server.postgres.migrations import migrate_up, require_current_schema
from server.postgres.probe import DatabaseProbe
from server.postgres.replay.conversations import make_replay_database
from server.postgres.store import PostgresStore
from server.postgres.turns.notifications import PostgresNotifications
from server.prompts.renderer import JinjaRenderer
from server.prompts.templates import load_templates
from server.prompts.worker_pool import WorkerPool
from server.providers.call_slots import CallSlots
from server.providers.provider import Provider
from server.providers.retry_policy import RetryPolicy
from server.providers.token_estimate import TokenEstimate
from server.providers.wire.frames import read_frames
from server.replay.rerun.calls import ReplayCalls
from server.telemetry.metrics import Metrics
from server.telemetry.spans import Tracing, open_tracing
from server.telemetry.turns import TurnTelemetry
from server.turns.reaper import Reaper
from server.turns.running import RunningTurns
from server.turns.service import TurnService
from server.turns.tools import TurnLimits, TurnTools
from server.web.app import WebParts, build_app
from server.web.body_budget import BodyBudget
from server.web.forwarded import TrustedProxies
from server.web.middleware import RequestMiddleware

_log = logging.getLogger("strata.program")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Everything that serves, ready to use."""

    settings: Settings
    options: DatabaseOptions
    database: Database
    store: PostgresStore
    key_ring: PostgresKeyRing
    running_turns: RunningTurns
    turn_service: TurnService
    cache_keeper: CacheKeeper
    background: Background
    replays: ReplayParts
    job_watch: JobWatch
    index_watch: IndexWatch
    providers: Providers
    template_workers: WorkerPool
    owner: str
    """What this process is called on the leases that it holds."""
    metrics: Metrics
    app: RequestMiddleware


@asynccontextmanager
async def open_program(
    settings: Settings, *, providers: Providers | None = None, migrate: bool = False
) -> AsyncIterator[Program]:
    """The program from its first connection to its last. Leaving the block lets running turns finish first.

    `migrate`: also an external database is migrated. Raises `SchemaBehind` or `SchemaAhead` where it is not, and must
    be, at this release's revision. An external database that does not answer is no reason to give up: the program
    starts, says so in `/readyz`, and checks the schema when it gets through.
    """
    async with AsyncExitStack() as stack:
        options = await stack.enter_async_context(open_database_options(settings))
        if settings.embedded or migrate:
            await migrate_up(options)
        else:
            await _check_schema(options)
        database = Database(options, on_first_contact=require_current_schema)
        stack.push_async_callback(database.close)
        tracing = open_tracing(
            settings.otlp_endpoint,
            settings.otlp_headers.get_secret_value() if settings.otlp_headers else None,
            settings.service_name,
            __version__,
        )
        stack.callback(tracing.shutdown)
        notifications = await stack.enter_async_context(PostgresNotifications(options))
        renderer = JinjaRenderer(load_templates(settings.templates_dir), render_limits(settings))
        stack.push_async_callback(renderer.close)
        replay_store = make_replay_database(database)
        stack.push_async_callback(replay_store.close)
        providers = providers or Providers()
        metrics = _build_metrics(settings, database, providers.call_slots, renderer.pool)
        lengths = build_lengths(database)
        stack.push_async_callback(lengths.close)
        program, reaper = _assemble(
            _Parts(
                settings=settings,
                options=options,
                database=database,
                tracing=tracing,
                providers=providers,
                notifications=notifications,
                renderer=renderer,
                offline_providers=await stack.enter_async_context(open_offline_providers(settings)),
                metrics=metrics,
                lengths=lengths,
                replays=build_replays(
                    settings, database, replay_store, renderer, providers, lengths=lengths, observer=metrics.replays
                ),
            )
        )
        watches = {
            "reaper": reaper.watch,
            "job watch": program.job_watch.watch,
            "index watch": program.index_watch.watch,
            "cache keeper": program.cache_keeper.watch,
        }
        for name, watch in watches.items():
            stack.push_async_callback(_end, asyncio.create_task(watch(), name=name))
        stack.push_async_callback(program.cache_keeper.close)
        await stack.enter_async_context(
            working_inside(settings, database, program.background.jobs, program.replays.shutdown)
        )
        stack.push_async_callback(program.background.watch.close)
        stack.push_async_callback(_stop, program)
        yield program


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What is opened and closed by itself."""

    settings: Settings
    options: DatabaseOptions
    database: Database
    tracing: Tracing
    providers: Providers
    notifications: PostgresNotifications
    renderer: JinjaRenderer
    offline_providers: Mapping[str, Provider]
    metrics: Metrics
    lengths: TypicalLengths
    replays: ReplayParts


def _build_metrics(settings: Settings, database: Database, slots: CallSlots, pool: WorkerPool) -> Metrics:
    metrics = Metrics(version=__version__, assistant_labels=settings.metrics_assistant_labels)
    metrics.gauge_callback(
        "strata_database_connections", "Open database connections.", lambda: database.pool_counts()[0]
    )
    metrics.gauge_callback(
        "strata_database_connections_in_use", "Database connections in use.", lambda: database.pool_counts()[1]
    )
    metrics.gauge_callback(
        "strata_provider_calls_in_use", "Provider calls that are made now, or reserved by turns.", lambda: slots.in_use
    )
    metrics.gauge_callback("strata_provider_calls_limit", "Maximum number of them.", lambda: slots.limit)
    metrics.gauge_callback(
        "strata_provider_calls_waiting", "Provider calls that wait for another one to end.", lambda: slots.waiting
    )
    metrics.counter_callback(
        "strata_provider_calls_refused_total",
        "Provider calls that were refused because none of the others ended in time.",
        lambda: slots.refused_count,
    )
    metrics.gauge_callback(
        "strata_template_workers_busy",
        "Worker processes that have a task: templates, assertions.",
        lambda: pool.busy_count,
    )
    metrics.gauge_callback(
        "strata_template_tasks_waiting", "Tasks that wait for such a process.", lambda: pool.waiting_count
    )
    return metrics


def _build_cache_keeper(parts: _Parts, estimate: TokenEstimate) -> CacheKeeper:
    return CacheKeeper(
        PostgresCacheRegister(parts.database),
        parts.providers.by_name,
        estimate,
        budget_usd_per_hour=Decimal(str(parts.settings.cache_storage_usd_per_hour)),
    )


def _assemble(parts: _Parts) -> tuple[Program, Reaper]:
    settings, database = parts.settings, parts.database
    running_turns = RunningTurns()
    metrics = parts.metrics
    store = PostgresStore(database)
    estimate = TokenEstimate()
    cache_keeper = _build_cache_keeper(parts, estimate)
    background = build_background(
        settings,
        database,
        store,
        parts.renderer,
        parts.providers,
        metrics.compactions,
        estimate,
        lengths=parts.lengths,
    )
    background = replace(background, jobs=(*background.jobs, *parts.replays.jobs))
    tools = _build_tools(parts, store, metrics, cache_keeper, estimate, background)
    turn_service = TurnService(tools, running_turns)
    index_watch = IndexWatch(partial(find_progress, database))
    metrics.gauge_callback(
        "strata_index_lag_seconds", "How far lists and searches are behind the turns.", lambda: index_watch.lag_seconds
    )
    program = Program(
        settings=settings,
        options=parts.options,
        database=database,
        store=store,
        key_ring=PostgresKeyRing(database),
        running_turns=running_turns,
        turn_service=turn_service,
        cache_keeper=cache_keeper,
        background=background,
        replays=parts.replays,
        job_watch=JobWatch(PostgresJobReports(database), metrics.jobs, names=[job.name for job in background.jobs]),
        index_watch=index_watch,
        providers=parts.providers,
        template_workers=parts.renderer.pool,
        owner=tools.owner,
        metrics=metrics,
        app=build_app(_build_web_parts(parts, store, turn_service, running_turns, background, estimate)),
    )
    return program, Reaper(tools)


def _build_web_parts(
    parts: _Parts,
    store: PostgresStore,
    turn_service: TurnService,
    running_turns: RunningTurns,
    background: Background,
    estimate: TokenEstimate,
) -> WebParts:
    settings, database, replays = parts.settings, parts.database, parts.replays
    inspector = PostgresInspector(database)
    return WebParts(
        key_ring=RememberedKeys(PostgresKeyRing(database), parts.notifications),
        store=store,
        turn_service=turn_service,
        compactor=background.compactor,
        renderer=parts.renderer,
        rate_limiter=PostgresRateLimiter(database, settings.rate_limit_per_minute),
        usage_reports=PostgresUsageReports(database),
        inspector=inspector,
        overviews=PostgresOverviews(database),
        saved_views=PostgresSavedViews(database),
        replay_service=replays.service,
        replay_calls=ReplayCalls(
            replays.replays,
            replays.replay_inspector,
            CallInspector(
                replays.replay_inspector, replays.replay_store, parts.offline_providers, read_frames, estimate
            ),
        ),
        call_inspector=CallInspector(inspector, store, parts.offline_providers, read_frames, estimate),
        job_reports=PostgresJobReports(database),
        archives=PostgresArchives(database),
        assistant_inspector=PostgresAssistantInspector(database),
        assistant_editor=_build_editor(parts, store, estimate),
        admin_sessions=PostgresAdminSessions(database, _session_limits(settings)),
        audit_log=PostgresAuditLog(database),
        metrics_token=settings.metrics_token.get_secret_value() if settings.metrics_token else None,
        trusted_proxies=TrustedProxies(settings.trusted_proxies),
        default_provider=parts.providers.default,
        provider_names=tuple(parts.providers.by_name),
        image_limit_bytes=settings.image_limit_bytes,
        keep_alive_seconds=settings.keep_alive_seconds,
        stall_seconds=settings.stream_stall_seconds,
        probes=[DatabaseProbe(database)],
        running_turns=running_turns,
        metrics=parts.metrics,
        tracing=parts.tracing,
        body_limit_bytes=settings.body_limit_bytes,
        bodies=_build_body_budget(settings, parts.metrics),
        cors_origins=settings.cors_origins,
        version=__version__,
    )


def _build_body_budget(settings: Settings, metrics: Metrics) -> BodyBudget:
    bodies = BodyBudget(
        settings.body_total_bytes,
        largest_bytes=settings.body_limit_bytes,
        wait_seconds=settings.body_wait_seconds,
        body_seconds=settings.body_seconds,
    )
    metrics.gauge_callback(
        "strata_http_body_bytes", "Bytes of large request bodies being read now.", lambda: bodies.in_use_bytes
    )
    metrics.gauge_callback(
        "strata_http_bodies_waiting", "Large request bodies that wait to be read.", lambda: bodies.waiting
    )
    metrics.counter_callback(
        "strata_http_bodies_refused_total",
        "Large request bodies that were refused because others were being read.",
        lambda: bodies.refused_count,
    )
    return bodies


def _build_editor(parts: _Parts, store: PostgresStore, estimate: TokenEstimate) -> AssistantEditor:
    audit_log = PostgresAuditLog(parts.database)
    return AssistantEditor(EditorTools(store=store, renderer=parts.renderer, estimate=estimate, audit_log=audit_log))


def _session_limits(settings: Settings) -> SessionLimits:
    return SessionLimits(
        idle_seconds=settings.admin_idle_seconds,
        age_seconds=settings.admin_session_seconds,
        max_failures=settings.admin_login_failures,
        lock_seconds=settings.admin_lock_seconds,
    )


def _build_tools(
    parts: _Parts,
    store: PostgresStore,
    metrics: Metrics,
    cache_keeper: CacheKeeper,
    estimate: TokenEstimate,
    background: Background,
) -> TurnTools:
    settings = parts.settings
    return TurnTools(
        owner=f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}",
        store=store,
        preparation=PayloadPreparation(store, parts.renderer, parts.providers.by_name, texts=background.texts),
        notifications=parts.notifications,
        observer=TurnTelemetry(metrics, parts.tracing),
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
        cache_keeper=cache_keeper,
        follower=background.watch,
        call_slots=parts.providers.call_slots,
    )


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
    """Running turns get their time, what is left of them is handed to whoever comes next."""
    report = await program.running_turns.drain(program.settings.shutdown_limit_seconds)
    try:
        surrendered = await program.store.surrender_leases(program.owner)
    except StrataError as error:
        # The leases end by themselves when their time is over.
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
