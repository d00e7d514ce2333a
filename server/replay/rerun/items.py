"""The items of replays: claimed one after the other, run while their lease is renewed, and ended or released."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from server.compaction.compactor import Compactor
from server.compaction.report import CompactionObserver
from server.compaction.typical_lengths import KnownLengths
from server.conversation.errors import DatabaseUnavailable, Internal, LeaseLost, StrataError
from server.conversation.outages import keep_lease
from server.conversation.shutdown import Shutdown, run_to_completion
from server.conversation.store import Store
from server.payload.renderer import Renderer
from server.payload.shared_caches import StaticTextCache
from server.providers.calls import Admission
from server.providers.provider import Provider
from server.providers.retry_policy import RetryPolicy
from server.providers.token_estimate import TokenEstimate
from server.replay.rerun.admission import ItemAdmission, ItemHalted
from server.replay.rerun.assertions import AssertionChecker
from server.replay.rerun.judge import JudgeCalls
from server.replay.rerun.observer import CandidateTurns, CompactionCalls, Departure, ReplayObserver
from server.replay.rerun.payload import RendererOf, ReplayPreparation, ReplayRenderer
from server.replay.rerun.port import Replays
from server.replay.rerun.replay import ClaimedItem, ItemState
from server.replay.rerun.runner import ItemEnd, ItemRunner
from server.replay.rerun.source import open_source
from server.turns.stored import OpenFold
from server.turns.tools import TurnLimits, TurnTools

CompactorOf: TypeAlias = Callable[[Renderer, CompactionObserver, KnownLengths, Admission], Compactor]
"""Builds a compactor of replay conversations."""
_TURN_LIMITS: Final = TurnLimits(lease_seconds=0.0, flush_seconds=5.0)
"""The lease of a turn expires at once, see `server.replay.rerun.conversation`. No reader follows the checkpoints."""
_log = logging.getLogger("strata.replay")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayItems:
    """Runs the items of replays in this process."""

    owner: str
    """The name of this process in the leases of items."""
    replays: Replays
    store: Store
    """The store of the source conversations."""
    replay_store: Store
    """The store of the replay conversations."""
    renderer_of: RendererOf
    compactor_of: CompactorOf
    assertions: AssertionChecker
    lengths: KnownLengths
    """The typical lengths of live conversations."""
    providers: Mapping[str, Provider]
    observer: ReplayObserver
    folds: Mapping[str, OpenFold]
    """By provider, including providers that this process has no key for."""
    texts: StaticTextCache = field(default_factory=StaticTextCache)
    estimate: TokenEstimate = field(default_factory=TokenEstimate)
    retry_policy: RetryPolicy = field(default_factory=RetryPolicy)
    shutdown: Shutdown = field(default_factory=Shutdown)
    lease_seconds: float = 30.0
    """How long the lease of an item is valid without renewal. Then another process may claim the item."""

    async def run_all(self, replay_id: str) -> int:
        """Run items until there is none left for this process, or it shuts down. Return how many were run.

        Raises `DatabaseUnavailable`.
        """
        count = 0
        while not self.shutdown.requested.is_set():
            claimed = await self.replays.claim_item(replay_id, owner=self.owner, lease_seconds=self.lease_seconds)
            if claimed is None:
                return count
            await self.run(claimed)
            count += 1
        return count

    async def run(self, claimed: ClaimedItem) -> None:
        """Run one item while this process holds its lease. If the task is cancelled, the item is released."""
        work = asyncio.create_task(self._run(claimed), name="replay item")
        beat = asyncio.create_task(self._renew_lease(claimed), name="replay heartbeat")
        try:
            await asyncio.wait({work, beat}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            else:
                self._lose(claimed)
        except asyncio.CancelledError:
            await _end(work, beat)
            await run_to_completion(self._release_cancelled(claimed))
            raise
        finally:
            await _end(work, beat)

    async def _release_cancelled(self, claimed: ClaimedItem) -> None:
        try:
            await self._release(claimed)
        except StrataError as error:
            # Another process can claim it when its lease has expired.
            _log.warning("replay.item_not_released", extra=_facts(claimed, code=error.code))

    async def _run(self, claimed: ClaimedItem) -> None:
        try:
            end = await self._run_to_end(claimed)
            if end is None:
                await self._release(claimed)
                return
            await self.replays.end_item(claimed.lease, end.state, error_code=end.error_code)
        except LeaseLost:
            self._lose(claimed)
        else:
            departure = Departure.DONE if end.state is ItemState.DONE else Departure.FAILED
            self.observer.item_left(departure, error_code=end.error_code)

    async def _release(self, claimed: ClaimedItem) -> None:
        await self.replays.release_item(claimed.lease)
        self.observer.item_left(Departure.GIVEN_BACK)

    def _lose(self, claimed: ClaimedItem) -> None:
        _log.warning("replay.item_lost", extra=_facts(claimed))
        self.observer.item_left(Departure.LOST)

    async def _run_to_end(self, claimed: ClaimedItem) -> ItemEnd | None:
        """Run the item and return how it ended; None if it has to be continued later."""
        try:
            return await (await self._open(claimed)).run()
        except ItemHalted:
            return None
        except (LeaseLost, DatabaseUnavailable):
            raise
        except StrataError as error:
            _log.warning("replay.item_failed", extra=_facts(claimed, code=error.code))
            return ItemEnd(state=ItemState.FAILED, error_code=error.code)
        # A bug must end the item too, or every other process would run into it again.
        except Exception:  # noqa: BLE001  reason: logged with its traceback, and the item fails with `internal`
            _log.exception("replay.item_crashed", extra=_facts(claimed))
            return ItemEnd(state=ItemState.FAILED, error_code=Internal.code)

    async def _open(self, claimed: ClaimedItem) -> ItemRunner:
        """Build the runner of an item. Raises `ConversationNotFound` and `ProviderNotConfigured`."""
        draft, tenant_id = claimed.draft, claimed.tenant_id
        source = await open_source(self.store, tenant_id, claimed.item.conversation_id, until=claimed.replay_created_at)
        renderer = ReplayRenderer(self.renderer_of(draft.candidate.templates), draft.candidate, source.conversation)
        preparation = ReplayPreparation(self.replay_store, renderer, self.providers, texts=self.texts)
        admission = ItemAdmission(self.replays, claimed.lease, estimate=self.estimate, shutdown=self.shutdown)
        judge = None
        if draft.judge is not None:
            judge = JudgeCalls(
                self.replay_store,
                tenant_id,
                draft.judge,
                self.providers,
                self.retry_policy,
                admission.limits(),
                self.observer,
            )
        return ItemRunner(
            claimed=claimed,
            source=source,
            replays=self.replays,
            turns=TurnTools(
                owner=self.owner,
                store=self.replay_store,
                preparation=preparation,
                observer=CandidateTurns(self.observer),
                folds=self.folds,
                limits=_TURN_LIMITS,
                retry_policy=self.retry_policy,
                estimate=self.estimate,
            ),
            renderer=renderer,
            preparation=preparation,
            admission=admission,
            compactor=self.compactor_of(
                renderer,
                CompactionCalls(self.observer),
                SourceLengths(self.lengths, source.conversation.assistant_id),
                admission.limits(),
            ),
            assertions=self.assertions,
            judge=judge,
            observer=self.observer,
        )

    async def _renew_lease(self, claimed: ClaimedItem) -> None:
        """Renew the lease of the item until another process has claimed it."""
        seconds = self.lease_seconds

        async def beat() -> bool:
            await asyncio.sleep(seconds / 3)
            await self.replays.renew_lease(claimed.lease, lease_seconds=seconds)
            return True

        await keep_lease(beat, _facts(claimed))


class SourceLengths:
    """Implements `server.compaction.typical_lengths.KnownLengths` for replay conversations.

    Each of them has its own assistant, so the lengths are those of the recorded conversation's assistant.
    """

    def __init__(self, lengths: KnownLengths, assistant_id: str) -> None:
        self._lengths = lengths
        self._assistant_id = assistant_id

    async def load(self, tenant_id: str, assistant_id: str) -> float | None:  # noqa: ARG002  reason: the port's
        return await self._lengths.load(tenant_id, self._assistant_id)


async def _end(*tasks: "asyncio.Task[None]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _facts(claimed: ClaimedItem, **more: object) -> dict[str, object]:
    return {"replay_id": claimed.lease.replay_id, "item": claimed.lease.number, **more}
