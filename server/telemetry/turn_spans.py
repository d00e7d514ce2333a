"""The spans of turns and of the calls within them, in the words of OpenTelemetry's conventions for generative AI.

    POST /v1/conversations/{conversation_id}/turns      the request, where one is waiting
    └── turn                                            from the durable input to the durable answer
        ├── chat gemini-3.1-pro-preview                 an attempt that failed
        └── chat gemini-3.1-pro-preview                 the one that answered

The conventions would have one span around all attempts. That is the turn's here: each attempt has a status, tokens and
a price of its own. They also leave room for messages; nothing that was said is ever put there.
"""

from typing import Final, TypeAlias
from uuid import UUID

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context

from server.conversation.call import CallEnd, CallStart
from server.conversation.conversation import Lease
from server.conversation.lru import LruCache
from server.conversation.turn import ModelResponseTurn, TurnState
from server.conversation.usage import Usage
from server.telemetry.limits import bounded_count, finite_seconds, finite_usd, nanoseconds, plain_name, seconds_between
from server.telemetry.spans import Tracing
from server.turns.observer import TurnTimes

Attributes: TypeAlias = dict[str, str | bool | int | float]

_PROVIDER_NAMES: Final = {"gemini": "gcp.gemini", "anthropic": "anthropic"}
_CLIENT_ERRORS: Final = 400
_OPEN_LIMIT: Final = 10_000
"""Of turns that have begun and of whose end nobody has told; beyond it the oldest is given up."""


class TurnSpans:
    """Makes the spans. Used only where there is a collector: it remembers the turns that run."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracer = tracing.tracer
        self._open: LruCache[UUID, Span] = LruCache(_OPEN_LIMIT)

    def begin(self, lease: Lease) -> None:
        """Begins the turn's span, below the one of the present context."""
        span = self._tracer.start_span("turn", kind=SpanKind.INTERNAL, attributes=_turn_attributes(lease))
        for evicted in self._open.put(lease.token, span):
            evicted.end()

    def record_call(self, lease: Lease, start: CallStart, end: CallEnd) -> None:
        """The whole span of a call, with the call's own times."""
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
        """Ends the turn's span, if it was begun here."""
        span = self._open.pop(lease.token)
        if span is None:
            return
        span.set_attributes(_outcome_attributes(turn, times))
        if turn.state in {TurnState.FAILED, TurnState.INTERRUPTED}:
            _mark_failed(span, turn.error_code or turn.state.value)
        span.end()

    def lose(self, lease: Lease, code: str) -> None:
        """Ends the span of a turn that could not be written down."""
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
    """Both are empty where a turn failed before its assistant was known."""
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
    """The conventions' totals contain their parts: the cache is within input, reasoning within output."""
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
    """Without usage: the calls have it, and a sum over all spans would count it twice."""
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
