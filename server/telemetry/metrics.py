"""Metrics in Prometheus' text format, in a registry of their own: two servers in one process do not mix.

Every label takes its values from a closed set (route templates, known methods, statuses) or a bounded one (models), so
the number of series does not depend on what clients send. Each process has its own `/metrics`; behind a load balancer
scrape the processes.
"""

import platform
from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client import (
    CONTENT_TYPE_PLAIN_0_0_4,
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from server.providers.model_profile import PROFILES
from server.telemetry.call_metrics import CallMetrics
from server.telemetry.compactions import CompactionTelemetry
from server.telemetry.jobs import JobMetrics
from server.telemetry.limits import NameSet
from server.telemetry.replays import ReplayTelemetry
from server.telemetry.turn_metrics import TurnMetrics

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4

_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""From a health check to a streamed turn: its answer lasts as long as the model writes."""

_REQUEST_LABELS: Final = ("method", "route", "status")

_UNLISTED_MODELS: Final = 50
"""Models have any name that an assistant gives them. Those with a profile are always told apart."""


class Metrics:
    """All metrics of one server."""

    def __init__(self, *, version: str, assistant_labels: bool = False) -> None:
        """`assistant_labels`: tokens and costs are told apart by the ids of assistants."""
        # One more series for each series, of no use to Prometheus. The switch is the library's, for the whole process.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # reason: the library's signature
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "strata_http_requests", "Answered HTTP requests.", _REQUEST_LABELS, registry=self.registry
        )
        self._durations = Histogram(
            "strata_http_request_duration_seconds",
            "From the request's first line to the answer's last byte.",
            _REQUEST_LABELS,
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._stalled = Counter(
            "strata_stream_readers_stalled",
            "Streams that were closed because their client did not read.",
            registry=self.registry,
        )
        self._refused = Counter(
            "strata_http_refused",
            "Requests and connections that were refused before the application saw them.",
            ("code",),
            registry=self.registry,
        )
        self._children: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}
        self._in_flight = 0
        self.gauge_callback(
            "strata_http_requests_in_flight", "HTTP requests being answered now.", lambda: self._in_flight
        )
        providers = NameSet({profile.provider for profile in PROFILES.values()})
        models = NameSet(PROFILES, others=_UNLISTED_MODELS)
        self.turns = TurnMetrics(self.registry, providers=providers, models=models)
        self.calls = CallMetrics(self.registry, providers=providers, models=models, assistant_labels=assistant_labels)
        self.compactions = CompactionTelemetry(self.registry, self.calls)
        self.replays = ReplayTelemetry(self.registry, providers=providers, models=models)
        self.jobs = JobMetrics(self.registry)
        build = Gauge("strata_build_info", "Always 1.", ("version", "python"), registry=self.registry)
        build.labels(version, platform.python_version()).set(1)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def gauge_callback(self, name: str, description: str, read: Callable[[], float]) -> None:
        """A gauge that is read when it is scraped. `read` is quick, does no I/O and does not raise."""
        Gauge(name, description, registry=self.registry).set_function(read)

    def counter_callback(self, name: str, description: str, read: Callable[[], int]) -> None:
        """A counter that is kept elsewhere and read when it is scraped. `read` is as for `gauge_callback`."""
        self.registry.register(_CallbackCounter(name, description, read))

    def request_begun(self) -> None:
        """Each call is followed by exactly one of `request_ended`."""
        self._in_flight += 1

    def request_ended(self, *, method: str, route: str, status: int, seconds: float) -> None:
        """`route` is a template and `method` a known one: the caller sees to it that both come from closed sets."""
        self._in_flight -= 1
        key = (method, route, status)
        children = self._children.get(key)
        if children is None:
            labels = (method, route, str(status))
            children = self._children[key] = (self._requests.labels(*labels), self._durations.labels(*labels))
        counter, histogram = children
        counter.inc()
        histogram.observe(seconds)

    def reader_stalled(self) -> None:
        """A stream was closed because its client did not read."""
        self._stalled.inc()

    def request_refused(self, code: str) -> None:
        """A request that did not get past the limits of connections; `code` is that of the error."""
        self._refused.labels(code).inc()

    def render(self) -> bytes:
        """Everything, in the format that `CONTENT_TYPE` names."""
        return generate_latest(self.registry)


class _CallbackCounter(Collector):
    """A counter whose value is read when it is collected."""

    def __init__(self, name: str, description: str, read: Callable[[], int]) -> None:
        self._name = name
        self._description = description
        self._read = read

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(self._name, self._description, value=self._read())
