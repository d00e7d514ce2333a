"""Build what a process needs for replays: their store, the service, and the jobs that run their items."""

import os
import secrets
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial

from server.app.providers import FOLDS
from server.app.services import Services, build_compactor, open_command_services
from server.app.settings import Settings
from server.compaction.background_call import BackgroundCalls
from server.compaction.compactor import Compactor
from server.compaction.report import CompactionObserver
from server.compaction.typical_lengths import KnownLengths
from server.conversation.errors import ReplayNotFound
from server.conversation.shutdown import Shutdown
from server.jobs.job import Job
from server.jobs.queue import JobSender
from server.jobs.replay import queue_replay, replay_job, replay_tick_job
from server.payload.renderer import Renderer
from server.payload.shared_caches import StaticTextCache
from server.postgres.engine import Database
from server.postgres.inspection.inspector import PostgresInspector
from server.postgres.replay.replays import PostgresReplays
from server.postgres.store import PostgresStore
from server.prompts.assertions import ConfinedAssertions
from server.providers.calls import Admission
from server.providers.retry_policy import BATCH_RATE_LIMITS, RetryPolicy
from server.providers.token_estimate import TokenEstimate
from server.replay.rerun.items import ReplayItems
from server.replay.rerun.observer import ReplayObserver
from server.replay.rerun.service import ReplayService
from server.telemetry.replays import ReplayTelemetry


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayParts:
    """The parts of a process for replays."""

    database: Database
    replays: PostgresReplays
    replay_store: PostgresStore
    """The conversations that replays write."""
    replay_inspector: PostgresInspector
    """Views of these conversations for operators."""
    service: ReplayService
    items: ReplayItems
    jobs: tuple[Job, ...]
    shutdown: Shutdown
    """Set by the worker that runs the jobs."""


@asynccontextmanager
async def open_replays(settings: Settings, environment: Mapping[str, str]) -> AsyncIterator[ReplayParts]:
    """Open the parts for a command until the block ends. Provider keys are needed only if it runs items itself."""
    async with open_command_services(settings, environment) as services:
        yield build_replays(services, ReplayTelemetry())


def build_replays(services: Services, observer: ReplayObserver) -> ReplayParts:
    """Build the parts on the services of the process."""
    database, replay_database = services.database, services.replay_database
    replays, store = PostgresReplays(database, replay_database), PostgresStore(replay_database)
    items = _build_items(services, store, replays, observer)
    sender = JobSender(database)

    async def find_work() -> Sequence[tuple[str, str, int]]:
        await replays.end_abandoned_items()
        found: list[tuple[str, str, int]] = []
        for work in await replays.list_open_work():
            # A replay that was erased meanwhile has no work.
            with suppress(ReplayNotFound):
                replay = await replays.load_replay(None, work.replay_id)
                found.append((replay.tenant_id, replay.id, work.slot_count))
        return found

    service = ReplayService(replays, items.store, partial(queue_replay, sender), items.renderer_of, items.assertions)
    return ReplayParts(
        database=database,
        replays=replays,
        replay_store=store,
        replay_inspector=PostgresInspector(replay_database),
        service=service,
        items=items,
        jobs=(replay_job(items.run_all), replay_tick_job(find_work, sender)),
        shutdown=items.shutdown,
    )


def _build_items(
    services: Services, replay_store: PostgresStore, replays: PostgresReplays, observer: ReplayObserver
) -> ReplayItems:
    settings, providers, renderer = services.settings, services.providers, services.renderer
    texts, estimate = StaticTextCache(), TokenEstimate()
    policy = RetryPolicy(
        attempts=settings.turn_attempts, budget_seconds=settings.turn_retry_seconds, rate_limits=BATCH_RATE_LIMITS
    )

    def compactor_of(
        own_renderer: Renderer, watch: CompactionObserver, own_lengths: KnownLengths, admission: Admission
    ) -> Compactor:
        calls = BackgroundCalls(
            replay_store, providers.by_name, retry_policy=policy, observer=watch, admission=admission
        )
        return build_compactor(
            settings, replay_store, own_renderer, calls, watch, lengths=own_lengths, texts=texts, estimate=estimate
        )

    return ReplayItems(
        owner=f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}",
        replays=replays,
        store=services.store,
        replay_store=replay_store,
        renderer_of=renderer.with_templates,
        compactor_of=compactor_of,
        assertions=ConfinedAssertions(renderer.pool),
        lengths=services.lengths,
        providers=providers.by_name,
        observer=observer,
        folds=FOLDS,
        texts=texts,
        estimate=estimate,
        retry_policy=policy,
        lease_seconds=settings.lease_seconds,
    )
