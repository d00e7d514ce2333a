"""OpenTelemetry spans of requests and turns, if a collector is configured.

The tracer provider is not OpenTelemetry's global one, so tests and several servers in one process do not share it.
Without an endpoint there is no provider, no thread and no cost.

If the collector is unavailable, only spans are lost: requests put their spans into a bounded queue and never wait, a
thread of the SDK sends them, and the log has one line when sending fails and one when it works again.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from contextvars import Token
from typing import Final, TypeAlias
from urllib.parse import unquote
from uuid import UUID

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

from server.conversation.call import CallEnd, CallStart
from server.conversation.conversation import Lease
from server.conversation.errors import SettingsInvalid
from server.conversation.lru import LruCache
from server.conversation.turn import ModelResponseTurn, TurnState
from server.conversation.usage import Usage
from server.telemetry.limits import bounded_count, finite_seconds, finite_usd, nanoseconds, plain_name, seconds_between
from server.turns.observer import TurnTimes

Attributes: TypeAlias = dict[str, str | bool | int | float]

_log = logging.getLogger("strata.telemetry")

_TRACES_PATH: Final = "/v1/traces"
_EXPORT_SECONDS: Final = 5.0
_SHUTDOWN_SECONDS: Final = 5.0
_SERVER_ERRORS: Final = 500
_PROVIDER_NAMES: Final = {"gemini": "gcp.gemini", "anthropic": "anthropic"}
_CLIENT_ERRORS: Final = 400
_MAX_OPEN: Final = 10_000
"""How many turns may be open. Beyond it, the span of the oldest is ended: its turn has been lost."""

_propagator = TraceContextTextMapPropagator()


class RequestSpan:
    """The span of one HTTP request. Spans that start before `finish` become its children."""

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
        """End the span. Must be called once, in the context in which it was started."""
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
    """The tracer of one server. Without a collector it makes no spans."""

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
        """Start the span of a request, as a child of the caller's span if the carrier has a `traceparent`.

        Paths, query strings and headers are not recorded: they may contain secrets.
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
        """Send the queued spans and end the thread, within the limit. Spans that cannot be sent are lost.

        The SDK's own shutdown has no limit and waits half a minute for a collector that hangs. This method blocks the
        thread, so it must be called last.
        """
        if self._provider is None or self._exporter is None:
            return
        flushing = threading.Thread(target=self._provider.shutdown, name="strata-spans-shutdown", daemon=True)
        flushing.start()
        flushing.join(limit_seconds)
        if flushing.is_alive():
            self._exporter.shutdown()


class TurnSpans:
    """The spans of turns and of their calls, with the attribute names of OpenTelemetry for generative AI.

        POST /v1/conversations/{conversation_id}/turns      the request, if one is waiting
        └── turn                                            from the durable input to the durable answer
            ├── chat gemini-3.1-pro-preview                 an attempt that failed
            └── chat gemini-3.1-pro-preview                 the attempt that succeeded

    The conventions have one span around all attempts. Here that is the span of the turn, because each attempt has a
    status, tokens and a cost of its own. The conventions also allow messages as attributes; they are never recorded.

    Used only if there is a collector, because it holds the spans of running turns.
    """

    def __init__(self, tracing: Tracing) -> None:
        self._tracer = tracing.tracer
        self._open: LruCache[UUID, Span] = LruCache(_MAX_OPEN)

    def begin(self, lease: Lease) -> None:
        """Start the span of a turn, as a child of the current one."""
        span = self._tracer.start_span("turn", kind=SpanKind.INTERNAL, attributes=_turn_attributes(lease))
        for evicted in self._open.put(lease.token, span):
            evicted.end()

    def record_call(self, lease: Lease, start: CallStart, end: CallEnd) -> None:
        """Record the span of a call, with the times of the call."""
        span = self._tracer.start_span(
            f"chat {plain_name(start.model)}",
            context=self._context_of(lease),
            kind=SpanKind.CLIENT,
            attributes=_call_attributes(lease, start, end),
            start_time=nanoseconds(start.started_at),
        )
        if end.error_code is not None:
            _mark_failed(span, end.error_code)
        elif end.status is not None and end.status >= _CLIENT_ERRORS:
            _mark_failed(span, str(end.status))
        span.end(nanoseconds(end.ended_at))

    def finish(self, lease: Lease, turn: ModelResponseTurn, times: TurnTimes) -> None:
        """End the span of a turn, if it was started here."""
        span = self._open.pop(lease.token)
        if span is None:
            return
        span.set_attributes(_outcome_attributes(turn, times))
        if turn.state in {TurnState.FAILED, TurnState.INTERRUPTED}:
            _mark_failed(span, turn.error_code or turn.state.value)
        span.end()

    def lose(self, lease: Lease, code: str) -> None:
        """End the span of a turn that could not be stored."""
        span = self._open.pop(lease.token)
        if span is not None:
            _mark_failed(span, code)
            span.end()

    def _context_of(self, lease: Lease) -> Context | None:
        span = self._open.get(lease.token)
        return None if span is None else set_span_in_context(span)


def _mark_failed(span: Span, error_type: str) -> None:
    span.set_attribute("error.type", plain_name(error_type))
    span.set_status(Status(StatusCode.ERROR))


def _turn_attributes(lease: Lease) -> Attributes:
    return {
        "gen_ai.conversation.id": plain_name(lease.conversation_id),
        "strata.turn.seq": bounded_count(lease.turn_seq),
    }


def _source_attributes(provider: str, model: str) -> Attributes:
    """Build the attributes of the model. Both names are empty if a turn failed before its assistant was loaded."""
    attributes: Attributes = {}
    if provider:
        attributes["gen_ai.provider.name"] = _PROVIDER_NAMES.get(provider) or plain_name(provider)
    if model:
        attributes["gen_ai.request.model"] = plain_name(model)
    return attributes


def _call_attributes(lease: Lease, start: CallStart, end: CallEnd) -> Attributes:
    attributes: Attributes = {
        **_turn_attributes(lease),
        **_source_attributes(start.provider, start.model),
        **_usage_attributes(end.usage),
        "gen_ai.operation.name": "chat",
        "gen_ai.request.stream": True,
        "strata.call.attempt": bounded_count(start.attempt),
        "strata.call.epoch": bounded_count(start.epoch),
    }
    if end.status is not None:
        attributes["http.response.status_code"] = bounded_count(end.status)
    waited = seconds_between(start.started_at, end.first_byte_at)
    if waited is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = waited
    usd = finite_usd(end.cost_usd)
    if usd is not None:
        attributes["strata.call.cost_usd"] = usd
    return attributes


def _usage_attributes(usage: Usage) -> Attributes:
    """Build the counts. The totals of the conventions include their parts: input the cache, output the reasoning."""
    if usage == Usage():
        return {}
    return {
        "gen_ai.usage.input_tokens": bounded_count(usage.input_tokens),
        "gen_ai.usage.cache_read.input_tokens": bounded_count(usage.cache_read_tokens),
        "gen_ai.usage.cache_write.input_tokens": bounded_count(usage.cache_write_tokens),
        "gen_ai.usage.output_tokens": bounded_count(usage.output_tokens + usage.reasoning_tokens),
        "gen_ai.usage.reasoning.output_tokens": bounded_count(usage.reasoning_tokens),
    }


def _outcome_attributes(turn: ModelResponseTurn, times: TurnTimes) -> Attributes:
    """Build the attributes of an ended turn, without usage: a sum over all spans would count it twice."""
    attributes: Attributes = {
        **_source_attributes(turn.provider, turn.model),
        "strata.turn.state": turn.state.value,
    }
    if turn.stop_reason is not None:
        attributes["strata.turn.stop_reason"] = turn.stop_reason.value
    if turn.attempt is not None:
        attributes["strata.turn.attempts"] = bounded_count(turn.attempt)
    for name, seconds in (
        ("strata.turn.time_to_accept", finite_seconds(times.accepted)),
        ("strata.turn.time_to_build", finite_seconds(times.built)),
        ("strata.turn.time_to_first_event", finite_seconds(times.first_event)),
    ):
        if seconds is not None:
            attributes[name] = seconds
    return attributes


class _QuietExporter(SpanExporter):
    """Exports batches and logs when exporting begins to fail and when it works again, instead of every failure."""

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
    """Open tracing to the collector at `endpoint`: its base URL, or the full one that ends in `/v1/traces`.

    `headers` is a list `name=value,name=value` with percent-encoded values, as in OTEL_EXPORTER_OTLP_HEADERS. Raises
    `SettingsInvalid` if it is malformed.
    """
    if endpoint is None:
        return Tracing(provider=None, exporter=None, version=version)
    # Imported only if needed: it takes a fifth of a second and some megabytes.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415

    base = endpoint.rstrip("/")
    exporter = _QuietExporter(
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
    """Parse `name=value,name=value`. Raises `SettingsInvalid` without the text, which contains the collector's key."""
    headers: dict[str, str] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = pair.partition("=")
        if not name.strip() or not equals:
            raise SettingsInvalid("STRATA_OTLP_HEADERS is not a list of name=value pairs separated by commas.")
        headers[name.strip().lower()] = unquote(value.strip())
    return headers
