"""Compaction of replay conversations: after each answer, by the candidate's policy, within the replay's limits."""

import logging
from collections.abc import Callable
from typing import TypeAlias

from server.compaction.compactor import Compactor
from server.compaction.report import CompactionObserver, CompactionReport
from server.compaction.typical_lengths import KnownLengths
from server.conversation.call import CallEnd, CallStart
from server.conversation.errors import SummaryUnavailable
from server.payload.renderer import Renderer
from server.providers.calls import Admission
from server.replay.rerun.observer import CallPurpose, ReplayObserver

CompactorOf: TypeAlias = Callable[[Renderer, CompactionObserver, KnownLengths, Admission], Compactor]
"""Builds a compactor of replay conversations."""

_log = logging.getLogger("strata.replay")


class CompactionCalls:
    """Implements `server.compaction.report.CompactionObserver`: counts calls as calls of replays.

    Compactions of replay conversations are not part of the metrics of live conversations.
    """

    def __init__(self, observer: ReplayObserver) -> None:
        self._observer = observer

    def compaction_ended(self, report: CompactionReport) -> None:
        """Do nothing: the replay conversation shows it."""

    def compaction_queued(self, conversation_id: str, reason: str) -> None:
        """Do nothing: no job is queued for replay conversations."""

    def compaction_blocked(self, conversation_id: str, reason: str, buffer_tokens: int) -> None:
        """Do nothing: the next call fails if it is too long."""

    def compaction_unblocked(self, conversation_id: str) -> None:
        """Do nothing."""

    def call_ended(self, start: CallStart, end: CallEnd, *, assistant_id: str) -> None:  # noqa: ARG002  reason: the port's
        self._observer.call_ended(start, end, CallPurpose.COMPACTION)


class SourceLengths:
    """Implements `server.compaction.typical_lengths.KnownLengths` for replay conversations.

    Each of them has its own assistant, so the lengths are those of the recorded conversation's assistant.
    """

    def __init__(self, lengths: KnownLengths, assistant_id: str) -> None:
        self._lengths = lengths
        self._assistant_id = assistant_id

    async def load(self, tenant_id: str, assistant_id: str) -> float | None:  # noqa: ARG002  reason: the port's
        return await self._lengths.load(tenant_id, self._assistant_id)


async def compact_if_due(compactor: Compactor, tenant_id: str, replay_conversation_id: str) -> None:
    """Compact the replay conversation if its policy requires it.

    A summary that is not available now is requested again after the next answer. Raises `ItemHalted` if a summary is
    needed and its call is not admitted.
    """
    try:
        await compactor.compact(tenant_id, replay_conversation_id)
    except SummaryUnavailable as error:
        _log.warning(
            "replay.compaction_postponed", extra={"conversation_id": replay_conversation_id, "code": error.code}
        )
