"""Metrics of calls to providers: tokens, costs, caches, failures, and the counters that operators set alerts on.

Tokens and costs are counted by call and not by turn, because an attempt that fails half-way is billed too. They have an
assistant label only if the operator enables it, because `/metrics` is often readable by more people than the data of
tenants, and because each assistant adds series. The usage report has figures by conversation.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram

from server.caching.expectation import MissReason
from server.conversation.block import JsonValue
from server.conversation.call import CallEnd, CallStart
from server.conversation.errors import every_error
from server.conversation.usage import Usage
from server.payload.signatures import WithheldReason
from server.telemetry.limits import NameSet, bounded_count, finite_usd, seconds_between, status_class
from server.telemetry.turn_metrics import FIRST_SECONDS, WHOLE_SECONDS

_SOURCE: Final = ("provider", "model")
_SPENDER: Final = (*_SOURCE, "assistant")
_ASSISTANTS: Final = 200
"""How many assistants get a label of their own. Each has about ten series for each model that it uses."""
BUCKETS: Final = ("fresh_input", "cache_read", "cache_write", "output", "reasoning")
_PREFIX_BREAK: Final = "prefix_break"
_SIGNATURES_WITHHELD: Final = "signatures_withheld"
_TEMPLATE_FAILURES: Final = ("parse", "render", "too_long", "too_large", "not_json")
_OTHER_KINDS: Final = 20
"""The kinds are few and defined in this program; the limit guards against a mistake there."""


class CallMetrics:
    """The metrics of the provider calls of one server. `providers` and `models` are the admitted label values."""

    def __init__(
        self, registry: CollectorRegistry, *, providers: NameSet, models: NameSet, assistant_labels: bool
    ) -> None:
        self._providers = providers
        self._models = models
        self._assistants = NameSet(others=_ASSISTANTS) if assistant_labels else None
        self._miss_reasons = NameSet((reason.value for reason in MissReason), others=_OTHER_KINDS)
        self._codes = NameSet(error.code for error in every_error())
        self._spending = Spending(registry, "strata", _SPENDER)
        self._caching = _Caching(registry)
        self._oddities = _Oddities(registry, providers)
        self._ended = Counter(
            "strata_calls",
            "Calls to providers that ended; each attempt is counted.",
            (*_SOURCE, "status", "error_code"),
            registry=registry,
        )
        self._retries = Counter(
            "strata_call_retries", "Calls that were made because the previous one failed.", _SOURCE, registry=registry
        )
        self._misses = Counter(
            "strata_cache_misses",
            "Calls that read less from the provider's cache than expected, by reason.",
            (*_SOURCE, "reason"),
            registry=registry,
        )
        self._first_bytes = Histogram(
            "strata_call_time_to_first_byte_seconds",
            "From the start of the call to the first byte of the response.",
            _SOURCE,
            buckets=FIRST_SECONDS,
            registry=registry,
        )
        self._durations = Histogram(
            "strata_call_duration_seconds",
            "From the start of the call to its end.",
            _SOURCE,
            buckets=WHOLE_SECONDS,
            registry=registry,
        )

    def call_ended(self, start: CallStart, end: CallEnd, *, assistant_id: str | None) -> None:
        """Count and time a call that ended, in any way."""
        source = (self._providers.admit(start.provider), self._models.admit(start.model))
        self._ended.labels(*source, status_class(end.status), self._codes.admit(end.error_code)).inc()
        if start.attempt > 1:
            self._retries.labels(*source).inc()
        for histogram, until in ((self._first_bytes, end.first_byte_at), (self._durations, end.ended_at)):
            seconds = seconds_between(start.started_at, until)
            if seconds is not None:
                histogram.labels(*source).observe(seconds)
        # Prometheus treats an empty label as a missing one.
        assistant = "" if self._assistants is None else self._assistants.admit(assistant_id)
        spender = (*source, assistant)
        self._spending.add(spender, end)
        self._caching.add(spender, start, end)
        if end.cache_miss_reason is not None:
            self._misses.labels(*source, self._miss_reasons.admit(end.cache_miss_reason)).inc()
        self._oddities.add(source[0], start)


class Spending:
    """Counters of tokens and costs, for calls of turns and for calls of replays."""

    def __init__(self, registry: CollectorRegistry, prefix: str, labels: Sequence[str]) -> None:
        """`prefix` begins the names of the counters."""
        self._tokens = Counter(
            f"{prefix}_tokens", "Tokens, each in exactly one bucket.", (*labels, "bucket"), registry=registry
        )
        self._cost = Counter(f"{prefix}_cost_usd", "Cost of calls in US dollars.", labels, registry=registry)
        self._unpriced = Counter(
            f"{prefix}_unpriced_calls", "Calls that used tokens without a known price.", labels, registry=registry
        )

    def add(self, label_values: Sequence[str], end: CallEnd) -> None:
        """Add the tokens and the cost of a call."""
        counts = bucket_counts(end.usage)
        for bucket, count in zip(BUCKETS, counts, strict=True):
            if count:
                self._tokens.labels(*label_values, bucket).inc(count)
        usd = finite_usd(end.cost_usd)
        if usd is not None:
            self._cost.labels(*label_values).inc(usd)
        elif any(counts):
            self._unpriced.labels(*label_values).inc()


class _Caching:
    """How much of the input was read from the providers' caches, and how much was expected to be."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._inputs = Counter("strata_input_tokens", "Input tokens, cached or not.", _SPENDER, registry=registry)
        self._cached = Counter(
            "strata_cached_input_tokens",
            "Input tokens that the provider read from its cache.",
            _SPENDER,
            registry=registry,
        )
        self._expected = Counter(
            "strata_expected_cached_input_tokens",
            "Input tokens that were expected to be read from the cache.",
            _SPENDER,
            registry=registry,
        )

    def add(self, spender: tuple[str, str, str], start: CallStart, end: CallEnd) -> None:
        fresh, read, write = bucket_counts(end.usage)[:3]
        if not fresh + read + write:
            return  # a call without reported usage must not count as a cache miss
        self._inputs.labels(*spender).inc(fresh + read + write)
        self._cached.labels(*spender).inc(read)
        self._expected.labels(*spender).inc(bounded_count(start.cache_expected_tokens or 0))


class _Oddities:
    """Repairs, prefix breaks, template failures and withheld signatures, counted for each call that has one."""

    def __init__(self, registry: CollectorRegistry, providers: NameSet) -> None:
        self._repair_kinds = NameSet(others=_OTHER_KINDS)
        self._failure_kinds = NameSet(_TEMPLATE_FAILURES)
        self._reasons = NameSet(reason.value for reason in WithheldReason)
        self._repairs = Counter(
            "strata_history_repairs", "Repairs of histories, by kind.", ("kind",), registry=registry
        )
        self._breaks = Counter(
            "strata_prefix_breaks",
            "Requests whose prefix unexpectedly differs from that of the previous request.",
            ("provider",),
            registry=registry,
        )
        self._failures = Counter(
            "strata_template_failures",
            "Templates that failed and were replaced by their source, by kind.",
            ("kind",),
            registry=registry,
        )
        self._withheld = Counter(
            "strata_signatures_withheld",
            "Calls without the signatures of their history, by reason.",
            ("reason",),
            registry=registry,
        )
        # `increase()` does not see a series that begins with its first event, and these are used for alerts.
        for counter, names in (
            (self._breaks, providers),
            (self._failures, self._failure_kinds),
            (self._withheld, self._reasons),
        ):
            for name in names:
                counter.labels(name)

    def add(self, provider: str, start: CallStart) -> None:
        for kind in _kinds(start.repairs):
            if kind != _SIGNATURES_WITHHELD:
                self._repairs.labels(self._repair_kinds.admit(kind)).inc()
        for kind in _kinds(start.template_failures):
            self._failures.labels(self._failure_kinds.admit(kind)).inc()
        for note in (*start.repairs, *start.warnings):
            if note.get("kind") == _SIGNATURES_WITHHELD:
                self._withheld.labels(self._reasons.admit(note.get("reason"))).inc()
        for _ in find_prefix_breaks(start):
            self._breaks.labels(provider).inc()


def find_prefix_breaks(start: CallStart) -> list[Mapping[str, JsonValue]]:
    """Return the warnings of a call about a prefix that differs from that of the previous request."""
    return [warning for warning in start.warnings if warning.get("kind") == _PREFIX_BREAK]


def _kinds(notes: Iterable[Mapping[str, JsonValue]]) -> Iterator[JsonValue]:
    return (note.get("kind") for note in notes)


def bucket_counts(usage: Usage) -> tuple[int, int, int, int, int]:
    """Return the tokens in the order of `BUCKETS`."""
    return (
        bounded_count(usage.fresh_input_tokens),
        bounded_count(usage.cache_read_tokens),
        bounded_count(usage.cache_write_tokens),
        bounded_count(usage.output_tokens),
        bounded_count(usage.reasoning_tokens),
    )
