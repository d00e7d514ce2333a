"""Telemetry of turns: metrics, spans, and one log line for each turn that ends.

Implements `server.turns.observer`. It is called between the steps of a turn, so it neither raises nor waits, for any
values; `limits` ensures that. Message content is never recorded.
"""

import logging
from typing import Final

from server.conversation.block import JsonValue
from server.conversation.call import CallEnd, CallStart
from server.conversation.conversation import Lease
from server.conversation.turn import ModelResponseTurn, TurnState
from server.telemetry.call_metrics import find_prefix_breaks
from server.telemetry.limits import bounded_count, finite_seconds, finite_usd, plain_name
from server.telemetry.metrics import Metrics
from server.telemetry.spans import Tracing, TurnSpans
from server.turns.observer import TurnTimes

_log = logging.getLogger("strata.turn")

_UNSUCCESSFUL: Final = frozenset({TurnState.FAILED, TurnState.INTERRUPTED})
_DIFFERENCE: Final = ("index", "block", "layer", "role", "seq", "expected_hash", "found_hash")
"""The fields of a prefix break that are logged: which block, and not its content."""


class TurnTelemetry:
    """The telemetry of the turns of one server."""

    def __init__(self, metrics: Metrics, tracing: Tracing) -> None:
        self._turns = metrics.turns
        self._calls = metrics.calls
        self._spans = TurnSpans(tracing) if tracing.enabled else None

    def turn_began(self, lease: Lease) -> None:
        """Must be called in the context of the request: the span of the turn becomes its child."""
        self._turns.turn_began()
        if self._spans is not None:
            self._spans.begin(lease)

    def call_ended(self, lease: Lease, start: CallStart, end: CallEnd, *, assistant_id: str | None) -> None:
        """May be called from any task."""
        self._calls.call_ended(start, end, assistant_id=assistant_id)
        if self._spans is not None:
            self._spans.record_call(lease, start, end)
        for broken in find_prefix_breaks(start):
            difference = {name: _plain(broken[name]) for name in _DIFFERENCE if name in broken}
            _log.warning(
                "turn.prefix_broken",
                extra={
                    **_identity(lease),
                    **_source(start.provider, start.model),
                    "attempt": bounded_count(start.attempt),
                    "epoch": bounded_count(start.epoch),
                    "difference": difference,
                },
            )

    def turn_ended(self, lease: Lease, turn: ModelResponseTurn, times: TurnTimes) -> None:
        """Log the turn: as a warning `turn.failed` if it failed or was interrupted, else as `turn.ended`."""
        self._turns.turn_ended(turn, times)
        if self._spans is not None:
            self._spans.finish(lease, turn, times)
        level, event = (logging.WARNING, "turn.failed") if turn.state in _UNSUCCESSFUL else (logging.INFO, "turn.ended")
        if _log.isEnabledFor(level):
            _log.log(level, event, extra=_identity(lease) | _outcome(turn) | _durations(times))

    def turn_lost(self, lease: Lease, code: str) -> None:
        """Count a lost turn. The component that lost it logs the details."""
        self._turns.turn_lost(code)
        if self._spans is not None:
            self._spans.lose(lease, code)

    def turn_stalled(self, lease: Lease) -> None:
        """Count a stalled turn. Its end is counted and traced as well."""
        del lease
        self._turns.turn_stalled()

    def turn_recovered(self, lease: Lease) -> None:
        """Count a recovered turn. Its span was lost with its process."""
        del lease
        self._turns.turn_recovered()


def _identity(lease: Lease) -> dict[str, object]:
    """Return the ids of the turn; never the token, which authorises writes."""
    return {"conversation_id": plain_name(lease.conversation_id), "turn_seq": bounded_count(lease.turn_seq)}


def _source(provider: str, model: str) -> dict[str, object]:
    """Return the model. Both names are empty if a turn failed before its assistant was loaded."""
    return {"provider": plain_name(provider) if provider else None, "model": plain_name(model) if model else None}


def _outcome(turn: ModelResponseTurn) -> dict[str, object]:
    usage = turn.usage
    return {
        **_source(turn.provider, turn.model),
        "state": turn.state.value,
        "stop_reason": None if turn.stop_reason is None else turn.stop_reason.value,
        "error_code": None if turn.error_code is None else plain_name(turn.error_code),
        "attempt": None if turn.attempt is None else bounded_count(turn.attempt),
        "fresh_input_tokens": bounded_count(usage.fresh_input_tokens),
        "cache_read_tokens": bounded_count(usage.cache_read_tokens),
        "cache_write_tokens": bounded_count(usage.cache_write_tokens),
        "output_tokens": bounded_count(usage.output_tokens),
        "reasoning_tokens": bounded_count(usage.reasoning_tokens),
        "cost_usd": finite_usd(turn.cost_usd),
    }


def _durations(times: TurnTimes) -> dict[str, object]:
    return {
        "accepted_ms": _milliseconds(times.accepted),
        "built_ms": _milliseconds(times.built),
        "first_event_ms": _milliseconds(times.first_event),
        "duration_ms": _milliseconds(times.ended),
    }


def _milliseconds(seconds: float | None) -> float | None:
    finite = finite_seconds(seconds)
    return None if finite is None else round(finite * 1000, 3)


def _plain(value: JsonValue) -> object:
    return value if value is None or isinstance(value, bool | int) else plain_name(value)
