"""What is counted and timed about calls to providers: tokens, money, caches, failures, and what operators alarm on.

Tokens and costs are counted by call and not by turn: an attempt that failed half-way is paid for too. They are told
apart by assistant as well if the operator wants it, as far as a process can hold that many series: `/metrics` is often
readable by more people than the data of tenants. By conversation only the report of usage does.
"""

from collections.abc import Iterable, Iterator, Mapping
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
"""Those that are told apart. Each has some ten series, for each model that it asks."""
BUCKETS: Final = ("fresh_input", "cache_read", "cache_write", "output", "reasoning")
_PREFIX_BREAK: Final = "prefix_break"
_SIGNATURES_WITHHELD: Final = "signatures_withheld"
_TEMPLATE_FAILURES: Final = ("parse", "render", "too_long", "too_large", "not_json")
_OTHER_KINDS: Final = 20
"""Kinds are few and ours; the limit is for the day on which one of them is made of something else."""


class CallMetrics:
    """The metrics of the provider calls of one server. `providers` and `models` are the names that labels may have."""

    def __init__(
        self, registry: CollectorRegistry, *, providers: NameSet, models: NameSet, assistant_labels: bool
    ) -> None:
        self._providers = providers
        self._models = models
        self._assistants = NameSet(others=_ASSISTANTS) if assistant_labels else None
        self._miss_reasons = NameSet((reason.value for reason in MissReason), others=_OTHER_KINDS)
        self._codes = NameSet(error.code for error in every_error())
        self._spending = _Spending(registry)
        self._oddities = _Oddities(registry, providers)
        self._ended = Counter(
            "strata_calls",
            "Calls to providers that ended, each attempt counted.",
            (*_SOURCE, "status", "error_code"),
            registry=registry,
        )
        self._retries = Counter(
            "strata_call_retries", "Calls that were made because the one before had failed.", _SOURCE, registry=registry
        )
        self._misses = Counter(
            "strata_cache_misses",
            "Calls that read less from the provider's cache than they could have, by reason.",
            (*_SOURCE, "reason"),
            registry=registry,
        )
        self._first_bytes = Histogram(
            "strata_call_time_to_first_byte_seconds",
            "From the call's start to the first byte of the provider's answer.",
            _SOURCE,
            buckets=FIRST_SECONDS,
            registry=registry,
        )
        self._durations = Histogram(
            "strata_call_duration_seconds",
            "From the call's start to its end.",
            _SOURCE,
            buckets=WHOLE_SECONDS,
            registry=registry,
        )

    def call_ended(self, start: CallStart, end: CallEnd, *, assistant_id: str | None) -> None:
        """A call is over, whichever way."""
        source = (self._providers.admit(start.provider), self._models.admit(start.model))
        self._ended.labels(*source, status_class(end.status), self._codes.admit(end.error_code)).inc()
        if start.attempt > 1:
            self._retries.labels(*source).inc()
        for histogram, until in ((self._first_bytes, end.first_byte_at), (self._durations, end.ended_at)):
            seconds = seconds_between(start.started_at, until)
            if seconds is not None:
                histogram.labels(*source).observe(seconds)
        # To Prometheus an empty label is the same as none.
        assistant = "" if self._assistants is None else self._assistants.admit(assistant_id)
        self._spending.add((*source, assistant), start, end)
        if end.cache_miss_reason is not None:
            self._misses.labels(*source, self._miss_reasons.admit(end.cache_miss_reason)).inc()
        self._oddities.add(source[0], start)


class _Spending:
    """Tokens, money, and what the caches were worth."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._tokens = Counter(
            "strata_tokens", "Tokens, each in exactly one bucket.", (*_SPENDER, "bucket"), registry=registry
        )
        self._inputs = Counter(
            "strata_input_tokens", "Tokens of requests, from the cache or not.", _SPENDER, registry=registry
        )
        self._cached = Counter(
            "strata_cached_input_tokens", "Those that the provider read from its cache.", _SPENDER, registry=registry
        )
        self._expected = Counter(
            "strata_expected_cached_input_tokens",
            "Those that were expected to be read from the cache.",
            _SPENDER,
            registry=registry,
        )
        self._cost = Counter("strata_cost_usd", "What calls cost, in US dollars.", _SPENDER, registry=registry)
        self._unpriced = Counter(
            "strata_unpriced_calls", "Calls that used tokens whose price is not known.", _SPENDER, registry=registry
        )

    def add(self, spender: tuple[str, str, str], start: CallStart, end: CallEnd) -> None:
        counts = bucket_counts(end.usage)
        for bucket, count in zip(BUCKETS, counts, strict=True):
            if count:
                self._tokens.labels(*spender, bucket).inc(count)
        usd = finite_usd(end.cost_usd)
        if usd is not None:
            self._cost.labels(*spender).inc(usd)
        elif any(counts):
            self._unpriced.labels(*spender).inc()
        fresh, read, write = counts[:3]
        if not fresh + read + write:
            # A call that reported nothing says nothing about the cache either.
            return
        self._inputs.labels(*spender).inc(fresh + read + write)
        self._cached.labels(*spender).inc(read)
        self._expected.labels(*spender).inc(bounded_count(start.cache_expected_tokens or 0))


class _Oddities:
    """What is recorded on a call because it should not have been necessary. Counted with each call that carries it."""

    def __init__(self, registry: CollectorRegistry, providers: NameSet) -> None:
        self._repair_kinds = NameSet(others=_OTHER_KINDS)
        self._failure_kinds = NameSet(_TEMPLATE_FAILURES)
        self._reasons = NameSet(reason.value for reason in WithheldReason)
        self._repairs = Counter(
            "strata_history_repairs", "Repairs of a history, by kind.", ("kind",), registry=registry
        )
        self._breaks = Counter(
            "strata_prefix_breaks",
            "Requests whose beginning differs from the one before where it should not.",
            ("provider",),
            registry=registry,
        )
        self._failures = Counter(
            "strata_template_failures",
            "Templates that fell back to their source, by kind.",
            ("kind",),
            registry=registry,
        )
        self._withheld = Counter(
            "strata_signatures_withheld",
            "Calls that left out signatures of the history, by reason.",
            ("reason",),
            registry=registry,
        )
        # A series that begins with its first event is invisible to `increase()`, and these are for alarms.
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
    """The warnings of a call that say where its beginning differs from the one before."""
    return [warning for warning in start.warnings if warning.get("kind") == _PREFIX_BREAK]


def _kinds(notes: Iterable[Mapping[str, JsonValue]]) -> Iterator[JsonValue]:
    return (note.get("kind") for note in notes)


def bucket_counts(usage: Usage) -> tuple[int, int, int, int, int]:
    """Its tokens in the order of `BUCKETS`."""
    return (
        bounded_count(usage.fresh_input_tokens),
        bounded_count(usage.cache_read_tokens),
        bounded_count(usage.cache_write_tokens),
        bounded_count(usage.output_tokens),
        bounded_count(usage.reasoning_tokens),
    )
