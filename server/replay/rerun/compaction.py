"""Compaction of replay conversations: right after each answer, by the candidate's policy, within the replay's
budget.
"""

import logging
from collections.abc import Callable
from typing import TypeAlias

from server.compaction.compactor import Compactor
from server.compaction.report import CompactionObserver, CompactionOutcome, CompactionReport
from server.compaction.typical_lengths import KnownLengths
from server.conversation.assistant import AssistantDefinition
from server.conversation.call import CallEnd, CallStart
from server.conversation.errors import SummaryUnavailable
from server.payload.call_records import add_costs
from server.payload.renderer import Renderer
from server.replay.rerun.call import CandidateCalls
from server.replay.rerun.call_estimate import count_tokens, estimate_call
from server.replay.rerun.observer import CallPurpose, ReplayObserver
from server.replay.rerun.replay import CallSpending

CompactorOf: TypeAlias = Callable[[Renderer, CompactionObserver, KnownLengths], Compactor]
"""A compactor of replay conversations."""

_log = logging.getLogger("strata.replay")


class SpendingObserver:
    """Implements `server.compaction.report.CompactionObserver`: counts, and tells the operators of live
    conversations nothing.
    """

    def __init__(self, observer: ReplayObserver) -> None:
        self._observer = observer
        self.ends: list[CallEnd] = []

    def compaction_ended(self, report: CompactionReport) -> None:
        """Seen in the replay conversation."""

    def compaction_queued(self, conversation_id: str, reason: str) -> None:
        """Nothing is queued for replay conversations."""

    def compaction_blocked(self, conversation_id: str, reason: str, buffer_tokens: int) -> None:
        """The next call says so if it is too long."""

    def compaction_unblocked(self, conversation_id: str) -> None:
        """As above."""

    def call_ended(self, start: CallStart, end: CallEnd, *, assistant_id: str) -> None:  # noqa: ARG002  reason: the port's
        self._observer.call_ended(start, end, CallPurpose.COMPACTION)
        self.ends.append(end)


class SourceLengths:
    """Implements `server.compaction.typical_lengths.KnownLengths` for replay conversations: each has an assistant of
    its own, and what is typical is known of the one that the recorded conversation is with.
    """

    def __init__(self, lengths: KnownLengths, assistant_id: str) -> None:
        self._lengths = lengths
        self._assistant_id = assistant_id

    async def load(self, tenant_id: str, assistant_id: str) -> float | None:  # noqa: ARG002  reason: the port's
        return await self._lengths.load(tenant_id, self._assistant_id)


class ReplayCompaction:
    """Compacts the replay conversation of one item."""

    def __init__(
        self,
        compactor_of: CompactorOf,
        renderer: Renderer,
        lengths: KnownLengths,
        calls: CandidateCalls,
        tenant_id: str,
    ) -> None:
        self._observer = SpendingObserver(calls.observer)
        self._compactor = compactor_of(renderer, self._observer, lengths)
        self._calls = calls
        self._tenant_id = tenant_id

    async def compact(self, replay_conversation_id: str, definition: AssistantDefinition) -> None:
        """Does what the policy says. A summary that cannot be had now is asked for after the next answer again.

        Raises `ItemHalted` where a summary is needed and no call may leave.
        """
        estimated = await self._compactor.compact(self._tenant_id, replay_conversation_id, dry_run=True)
        if estimated.outcome is CompactionOutcome.UNCHANGED:
            return
        if estimated.outcome is CompactionOutcome.COMPACTED and not estimated.is_window_short:
            # Else what is moved may be summed up too.
            await self._act(replay_conversation_id)
            return
        size = estimated.request_tokens or 0
        estimate = estimate_call(definition.provider, definition.model, size, size)
        reservation = await self._calls.permit(definition.provider, estimate)
        self._observer.ends.clear()
        try:
            await self._act(replay_conversation_id)
        finally:
            ends = self._observer.ends
            spending = CallSpending(
                usd=add_costs([end.cost_usd for end in ends]),
                tokens=sum(count_tokens(end.usage) for end in ends),
            )
            await self._calls.settle(reservation, spending)

    async def _act(self, replay_conversation_id: str) -> None:
        try:
            await self._compactor.compact(self._tenant_id, replay_conversation_id)
        except SummaryUnavailable as error:
            _log.warning(
                "replay.compaction_postponed", extra={"conversation_id": replay_conversation_id, "code": error.code}
            )
