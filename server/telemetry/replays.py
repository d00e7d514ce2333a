"""What is counted about replays, apart from live conversations: calls, tokens, money, results, items.

Implements `server.replay.rerun.observer`. Neither raises nor waits.
"""

from typing import Final

from prometheus_client import CollectorRegistry, Counter

from server.conversation.call import CallEnd, CallStart
from server.conversation.errors import every_error
from server.replay.rerun.observer import CallPurpose, Departure
from server.replay.rerun.result import Outcome
from server.telemetry.call_metrics import BUCKETS, bucket_counts
from server.telemetry.limits import NameSet, finite_usd, status_class

_SPENDER: Final = ("provider", "model", "purpose")


class ReplayTelemetry:
    """Told about the replays of one process. Without a registry nobody reads it: a worker has no `/metrics`."""

    def __init__(
        self,
        registry: CollectorRegistry | None = None,
        *,
        providers: NameSet | None = None,
        models: NameSet | None = None,
    ) -> None:
        """`providers` and `models` are the names that labels may have."""
        registry = registry or CollectorRegistry()
        self._providers = providers or NameSet()
        self._models = models or NameSet()
        self._codes = NameSet(error.code for error in every_error())
        self._calls = Counter(
            "strata_replay_calls",
            "Calls of replays that ended, each attempt counted.",
            (*_SPENDER, "status", "error_code"),
            registry=registry,
        )
        self._tokens = Counter(
            "strata_replay_tokens",
            "Tokens of replays, each in exactly one bucket.",
            (*_SPENDER, "bucket"),
            registry=registry,
        )
        self._cost = Counter(
            "strata_replay_cost_usd", "What calls of replays cost, in US dollars.", _SPENDER, registry=registry
        )
        self._unpriced = Counter(
            "strata_replay_unpriced_calls",
            "Calls of replays that used tokens whose price is not known.",
            _SPENDER,
            registry=registry,
        )
        self._results = Counter(
            "strata_replay_results", "Answers of candidates, by what became of them.", ("outcome",), registry=registry
        )
        self._items = Counter(
            "strata_replay_items",
            "Conversations that this process has run, by how it left them.",
            ("departure", "error_code"),
            registry=registry,
        )

    def call_ended(self, start: CallStart, end: CallEnd, purpose: CallPurpose) -> None:
        spender = (self._providers.admit(start.provider), self._models.admit(start.model), purpose.value)
        self._calls.labels(*spender, status_class(end.status), self._codes.admit(end.error_code)).inc()
        counts = bucket_counts(end.usage)
        for bucket, count in zip(BUCKETS, counts, strict=True):
            if count:
                self._tokens.labels(*spender, bucket).inc(count)
        usd = finite_usd(end.cost_usd)
        if usd is not None:
            self._cost.labels(*spender).inc(usd)
        elif any(counts):
            self._unpriced.labels(*spender).inc()

    def result_recorded(self, outcome: Outcome) -> None:
        self._results.labels(outcome.value).inc()

    def item_left(self, departure: Departure, *, error_code: str | None = None) -> None:
        self._items.labels(departure.value, self._codes.admit(error_code)).inc()
