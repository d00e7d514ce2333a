"""Telemetry of compactions: metrics, one log line for each, and the alarm for blocked ones.

Implements `server.compaction.report.CompactionObserver`. Nothing here raises or waits.
"""

import logging
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge

from server.compaction.report import CompactionOutcome, CompactionReport
from server.conversation.call import CallEnd, CallStart
from server.conversation.lru import LruCache
from server.telemetry.call_metrics import CallMetrics
from server.telemetry.limits import NameSet, bounded_count, finite_usd

_REASONS: Final = 40
_MAX_BLOCKED: Final = 10_000
_log = logging.getLogger("strata.compaction")


class CompactionTelemetry:
    """The telemetry of the compactions of one process."""

    def __init__(self, registry: CollectorRegistry | None = None, calls: CallMetrics | None = None) -> None:
        """A worker passes no registry, because it has no `/metrics`. `calls` counts the calls for summaries."""
        registry = registry or CollectorRegistry()
        self._calls = calls
        self._reasons = NameSet(others=_REASONS)
        self._blocked: LruCache[str, str] = LruCache(_MAX_BLOCKED)
        self._ended = Counter(
            "strata_compactions",
            "Compactions that ended, including those without anything to do.",
            ("outcome", "reason"),
            registry=registry,
        )
        self._queued = Counter(
            "strata_compactions_queued", "Compactions that the policy decided on.", ("reason",), registry=registry
        )
        self._moved = Counter(
            "strata_compacted_tokens", "Estimated tokens of turns that were moved into segments.", registry=registry
        )
        self._alarms = Counter(
            "strata_compaction_alarms", "Conversations that must be compacted and cannot be.", registry=registry
        )
        Gauge(
            "strata_compaction_blocked",
            "Conversations that must be compacted and cannot be, as seen by this process.",
            registry=registry,
        ).set_function(lambda: len(self._blocked))

    def compaction_ended(self, report: CompactionReport) -> None:
        self._ended.labels(report.outcome.value, self._reasons.admit(report.reason)).inc()
        if report.outcome is CompactionOutcome.UNCHANGED:
            return
        if report.outcome in {CompactionOutcome.COMPACTED, CompactionOutcome.SIGNED}:
            self._moved.inc(bounded_count(report.moved_tokens) or 0)
        _log.info(
            f"compaction.{report.outcome.value}",
            extra={
                "conversation_id": report.conversation_id,
                "reason": report.reason,
                "epoch": report.epoch,
                "first_seq": report.first_seq,
                "last_seq": report.last_seq,
                "moved_tokens": report.moved_tokens,
                "segment_tokens": report.segment_tokens,
                "request_tokens": report.request_tokens,
                "saved_usd_per_call": finite_usd(report.saved_usd_per_call),
            },
        )

    def compaction_queued(self, conversation_id: str, reason: str) -> None:
        self._queued.labels(self._reasons.admit(reason)).inc()
        _log.debug("compaction.queued", extra={"conversation_id": conversation_id, "reason": reason})

    def compaction_blocked(self, conversation_id: str, reason: str, buffer_tokens: int) -> None:
        if conversation_id in self._blocked:
            return
        self._blocked.put(conversation_id, reason)
        self._alarms.inc()
        _log.warning(
            "compaction.blocked",
            extra={"conversation_id": conversation_id, "reason": reason, "request_tokens": buffer_tokens},
        )

    def compaction_unblocked(self, conversation_id: str) -> None:
        if self._blocked.pop(conversation_id) is not None:
            _log.info("compaction.unblocked", extra={"conversation_id": conversation_id})

    def call_ended(self, start: CallStart, end: CallEnd, *, assistant_id: str) -> None:
        if self._calls is not None:
            self._calls.call_ended(start, end, assistant_id=assistant_id)
