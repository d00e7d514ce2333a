"""Metrics in Prometheus' text format. Each server has a registry of its own, so two in one process do not mix.

Every label takes its values from a closed set (route templates, known methods, statuses) or a bounded one (models), so
the number of series does not depend on what clients send. Each process has its own `/metrics`; if there are several
processes, scrape each of them and not the load balancer.
"""

import platform
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
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

from server.inspection.jobs import JobStatus
from server.providers.model_profile import PROFILES
from server.telemetry.call_metrics import CallMetrics
from server.telemetry.compactions import CompactionTelemetry
from server.telemetry.limits import NameSet
from server.telemetry.replays import ReplayTelemetry
from server.telemetry.turn_metrics import TurnMetrics

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4

_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""From a health check to a streamed turn, which lasts as long as the model writes."""

_REQUEST_LABELS: Final = ("method", "route", "status")

_UNLISTED_MODELS: Final = 50
"""How many models without a profile get a label of their own."""
_OTHER_JOBS: Final = 40


class Metrics:
    """All metrics of one server."""

    def __init__(self, *, version: str, assistant_labels: bool = False) -> None:
        """`assistant_labels`: tokens and costs are labelled with the ids of assistants."""
        # `_created` doubles the number of series and Prometheus does not use it. The switch is global to the process.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # reason: the library's signature
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "strata_http_requests", "HTTP requests that were answered.", _REQUEST_LABELS, registry=self.registry
        )
        self._durations = Histogram(
            "strata_http_request_duration_seconds",
            "From the first line of the request to the last byte of the response.",
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
            "Requests and connections that were refused before they reached the application.",
            ("code",),
            registry=self.registry,
        )
        self._children: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}
        self._in_flight = 0
        self.gauge_callback(
            "strata_http_requests_in_flight", "HTTP requests that are handled now.", lambda: self._in_flight
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
        """Add a gauge whose value is read when it is scraped. `read` must be quick, do no I/O and not raise."""
        Gauge(name, description, registry=self.registry).set_function(read)

    def counter_callback(self, name: str, description: str, read: Callable[[], int]) -> None:
        """Add a counter whose value is read when it is scraped. `read` must be as for `gauge_callback`."""
        self.registry.register(_CallbackCounter(name, description, read))

    def request_begun(self) -> None:
        """Count a request that begins. Exactly one `request_ended` must follow."""
        self._in_flight += 1

    def request_ended(self, *, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request that ended. The caller ensures that `route` and `method` come from closed sets."""
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
        """Count a stream that was closed because its client did not read."""
        self._stalled.inc()

    def request_refused(self, code: str) -> None:
        """Count a request that exceeded the limits of connections; `code` is the error code."""
        self._refused.labels(code).inc()

    def render(self) -> bytes:
        """Render all metrics in the format that `CONTENT_TYPE` names."""
        return generate_latest(self.registry)


class JobMetrics:
    """The job queue as metrics: gauges of the whole database by job, as this process has last counted them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._names = NameSet(others=_OTHER_JOBS)
        self._waiting = Gauge(
            "strata_jobs_waiting", "Jobs of the whole queue that wait for a worker.", ("job",), registry=registry
        )
        self._oldest = Gauge(
            "strata_jobs_oldest_waiting_seconds",
            "How long the oldest of these jobs has been due.",
            ("job",),
            registry=registry,
        )

    def publish(self, statuses: Sequence[JobStatus] | None) -> None:
        """Replace the numbers. None: the queue cannot be read, and old numbers would be wrong."""
        self._waiting.clear()
        self._oldest.clear()
        for status in statuses or ():
            name = self._names.admit(status.name)
            self._waiting.labels(name).inc(status.waiting_count)
            self._oldest.labels(name).set_function(partial(_age_seconds, status.oldest_waiting_at))


def _age_seconds(since: datetime | None) -> float:
    """Return the age, at least 0: the clocks of two machines may differ."""
    return 0.0 if since is None else max(0.0, (datetime.now(UTC) - since).total_seconds())


class _CallbackCounter(Collector):
    """A counter whose value is read when it is collected."""

    def __init__(self, name: str, description: str, read: Callable[[], int]) -> None:
        self._name = name
        self._description = description
        self._read = read

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(self._name, self._description, value=self._read())
