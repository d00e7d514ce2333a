"""Compaction of shadows: right after each answer, by the candidate's policy, within the replay's budget."""

import logging
from collections.abc import Callable
from typing import TypeAlias

from server.assistant import AssistantDefinition
from server.call import CallEnd, CallStart
from server.call_records import add_costs
from server.compaction_observer import CompactionObserver
from server.compaction_report import CompactionOutcome, CompactionReport
from server.compactor import Compactor
from server.errors import SummaryUnavailable
from server.renderer import Renderer
from server.replay import CallSpending
from server.replay_call import CandidateCalls, count_tokens, foresee_call

CompactorOf: TypeAlias = Callable[[Renderer, CompactionObserver], Compactor]
"""A compactor of shadows."""

_log = logging.getLogger("strata.replay")


class SpendingObserver:
    """Implements `server.compaction_observer.CompactionObserver`: counts, and tells the operators of live
    conversations nothing.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[CallStart, CallEnd]] = []

    def compaction_ended(self, report: CompactionReport) -> None:
        """Seen in the shadow."""

    def compaction_needed(self, conversation_id: str, reason: str) -> None:
        """Nothing is queued for shadows."""

    def compaction_blocked(self, conversation_id: str, reason: str, buffer_tokens: int) -> None:
        """The next call says so if it is too long."""

    def compaction_unblocked(self, conversation_id: str) -> None:
        """As above."""

    def call_ended(self, start: CallStart, end: CallEnd, *, assistant_id: str) -> None:  # noqa: ARG002  reason: the port's
        self.calls.append((start, end))


class ShadowCompaction:
    """Compacts the shadow of one item."""

    def __init__(self, compactor_of: CompactorOf, renderer: Renderer, calls: CandidateCalls, tenant_id: str) -> None:
        self._observer = SpendingObserver()
        self._compactor = compactor_of(renderer, self._observer)
        self._calls = calls
        self._tenant_id = tenant_id

    async def compact(self, shadow_id: str, definition: AssistantDefinition) -> None:
        """Does what the policy says. A summary that cannot be had now is asked for after the next answer again.

        Raises `ItemHalted` where a summary is needed and no call may leave.
        """
        foreseen = await self._compactor.compact(self._tenant_id, shadow_id, dry_run=True)
        if foreseen.outcome is CompactionOutcome.UNCHANGED:
            return
        if foreseen.outcome is CompactionOutcome.COMPACTED:
            await self._act(shadow_id)
            return
        size = foreseen.request_tokens or 0
        estimate = foresee_call(definition.provider, definition.model, size, size)
        reservation = await self._calls.permit(definition.provider, estimate)
        self._observer.calls.clear()
        try:
            await self._act(shadow_id)
        finally:
            ends = [end for _, end in self._observer.calls]
            spending = CallSpending(
                usd=add_costs([end.cost_usd for end in ends]),
                tokens=sum(count_tokens(end.usage) for end in ends),
            )
            await self._calls.settle(reservation, spending)

    async def _act(self, shadow_id: str) -> None:
        try:
            await self._compactor.compact(self._tenant_id, shadow_id)
        except SummaryUnavailable as error:
            _log.warning("replay.compaction_postponed", extra={"conversation_id": shadow_id, "code": error.code})
