"""Metrics of replays, separate from those of live conversations: calls, tokens, costs, results, items.

Implements `server.replay.rerun.observer`. Nothing here raises or waits.
"""

from typing import Final

from prometheus_client import CollectorRegistry, Counter

from server.conversation.call import CallEnd, CallStart
from server.conversation.errors import every_error
from server.replay.rerun.observer import CallPurpose, Departure
from server.replay.rerun.result import Outcome
from server.telemetry.call_metrics import Spending
from server.telemetry.limits import NameSet, status_class

_SPENDER: Final = ("provider", "model", "purpose")


class ReplayTelemetry:
    """The metrics of the replays of one process. A worker passes no registry, because it has no `/metrics`."""

    def __init__(
        self,
        registry: CollectorRegistry | None = None,
        *,
        providers: NameSet | None = None,
        models: NameSet | None = None,
    ) -> None:
        """`providers` and `models` are the admitted label values."""
        registry = registry or CollectorRegistry()
        self._providers = providers or NameSet()
        self._models = models or NameSet()
        self._codes = NameSet(error.code for error in every_error())
        self._calls = Counter(
            "strata_replay_calls",
            "Calls of replays that ended; each attempt is counted.",
            (*_SPENDER, "status", "error_code"),
            registry=registry,
        )
        self._spending = Spending(registry, "strata_replay", _SPENDER)
        self._results = Counter(
            "strata_replay_results", "Results of replays, by outcome.", ("outcome",), registry=registry
        )
        self._items = Counter(
            "strata_replay_items",
            "Conversations that this process has replayed, by how they ended.",
            ("departure", "error_code"),
            registry=registry,
        )

    def call_ended(self, start: CallStart, end: CallEnd, purpose: CallPurpose) -> None:
        spender = (self._providers.admit(start.provider), self._models.admit(start.model), purpose.value)
        self._calls.labels(*spender, status_class(end.status), self._codes.admit(end.error_code)).inc()
        self._spending.add(spender, end)

    def result_recorded(self, outcome: Outcome) -> None:
        self._results.labels(outcome.value).inc()

    def item_left(self, departure: Departure, *, error_code: str | None = None) -> None:
        self._items.labels(departure.value, self._codes.admit(error_code)).inc()
