"""Spans for OpenTelemetry, when a collector is configured.

The provider is ours alone and not OpenTelemetry's global one, so that tests and several servers in one process do not
share it. Without an endpoint there is no provider, no thread and no cost.

A collector that is down costs spans and nothing else: requests put their span into a bounded queue and never wait,
a thread of the SDK sends, and the log says once that sending fails and once that it works again.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from contextvars import Token
from typing import Final
from urllib.parse import unquote

from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import (
    NoOpTracer,
    Span,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    format_trace_id,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from server.conversation.errors import SettingsInvalid

_log = logging.getLogger("strata.telemetry")

_TRACES_PATH: Final = "/v1/traces"
_EXPORT_SECONDS: Final = 5.0
_SHUTDOWN_SECONDS: Final = 5.0
_SERVER_ERRORS: Final = 500

_propagator = TraceContextTextMapPropagator()


class RequestSpan:
    """The span of one HTTP request. What is traced before `finish` becomes its child."""

    __slots__ = ("_method", "_span", "_token")

    def __init__(self, span: Span, method: str, token: Token[Context]) -> None:
        self._span = span
        self._method = method
        self._token = token

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits, as in `traceparent`."""
        return format_trace_id(self._span.get_span_context().trace_id)

    def finish(self, *, route: str | None, status: int) -> None:
        """Called once, in the context in which the span was begun."""
        span = self._span
        span.set_attribute("http.response.status_code", status)
        if route is not None:
            span.update_name(f"{self._method} {route}")
            span.set_attribute("http.route", route)
        if status >= _SERVER_ERRORS:
            span.set_attribute("error.type", str(status))
            span.set_status(Status(StatusCode.ERROR))
        span.end()
        otel_context.detach(self._token)


class Tracing:
    """Makes spans, or, without a collector, none."""

    def __init__(self, *, provider: TracerProvider | None, exporter: SpanExporter | None, version: str) -> None:
        self._provider = provider
        self._exporter = exporter
        self.tracer: Tracer = provider.get_tracer("strata", version) if provider else NoOpTracer()

    @property
    def enabled(self) -> bool:
        """Whether there is a collector."""
        return self._provider is not None

    def begin_request(
        self, *, method: str, scheme: str, server: tuple[str, int | None] | None, carrier: Mapping[str, str]
    ) -> RequestSpan:
        """Begins the span of a request, below the caller's own where the carrier has a `traceparent`.

        Paths, query strings and headers are left out: they may hold anything.
        """
        attributes: dict[str, str | int] = {"http.request.method": method, "url.scheme": scheme}
        if server is not None:
            attributes["server.address"] = server[0]
            if server[1] is not None:
                attributes["server.port"] = server[1]
        parent = _propagator.extract(carrier, context=Context())
        span = self.tracer.start_span(method, context=parent, kind=SpanKind.SERVER, attributes=attributes)
        return RequestSpan(span, method, otel_context.attach(set_span_in_context(span, parent)))

    def shutdown(self, limit_seconds: float = _SHUTDOWN_SECONDS) -> None:
        """Sends what is queued and ends the thread, within the limit. Spans that did not get through are lost.

        The SDK's own shutdown takes no limit and waits half a minute for a collector that hangs. This one blocks its
        thread: it is called last, when nothing is served any more.
        """
        if self._provider is None or self._exporter is None:
            return
        flushing = threading.Thread(target=self._provider.shutdown, name="strata-spans-shutdown", daemon=True)
        flushing.start()
        flushing.join(limit_seconds)
        if flushing.is_alive():
            self._exporter.shutdown()


class _CalmExporter(SpanExporter):
    """Passes batches on, and logs when sending begins to fail and when it works again, instead of every failure."""

    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner
        self._lost_count = 0
        self._closed = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE if self._closed else self._inner.export(spans)
        if result is SpanExportResult.SUCCESS:
            if self._lost_count:
                _log.info("telemetry.export_recovered", extra={"lost_count": self._lost_count})
            self._lost_count = 0
        else:
            if not self._lost_count:
                _log.warning("telemetry.export_failed")
            self._lost_count += len(spans)
        return result

    def shutdown(self) -> None:
        if not self._closed:
            self._closed = True
            self._inner.shutdown()


def open_tracing(endpoint: str | None, headers: str | None, service_name: str, version: str) -> Tracing:
    """Tracing towards the collector at `endpoint` (its base URL, or the full one that ends in `/v1/traces`).

    `headers` is a list `name=value,name=value` with percent-encoded values, as OTEL_EXPORTER_OTLP_HEADERS. Raises
    `SettingsInvalid` where it is not.
    """
    if endpoint is None:
        return Tracing(provider=None, exporter=None, version=version)
    # A fifth of a second and some megabytes, for those alone who have a collector.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415

    base = endpoint.rstrip("/")
    exporter = _CalmExporter(
        OTLPSpanExporter(
            endpoint=base if base.endswith(_TRACES_PATH) else base + _TRACES_PATH,
            headers=parse_headers(headers or ""),
            timeout=_EXPORT_SECONDS,
        )
    )
    resource = Resource.create({"service.name": service_name, "service.version": version})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider=provider, exporter=exporter, version=version)


def parse_headers(text: str) -> dict[str, str]:
    """The headers in `name=value,name=value`. The error does not repeat the text: it holds the collector's key."""
    headers: dict[str, str] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = pair.partition("=")
        if not name.strip() or not equals:
            raise SettingsInvalid("STRATA_OTLP_HEADERS is not a list of name=value pairs separated by commas.")
        headers[name.strip().lower()] = unquote(value.strip())
    return headers
