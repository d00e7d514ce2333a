"""Turns as operators see them: metrics, spans, and one line in the log for each that ends.

Implements `server.turns.observer`. It is called between the steps of a turn, so it neither raises nor waits, whatever
the values are; `limits` sees to that. What was said appears nowhere.
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
from server.telemetry.spans import Tracing
from server.telemetry.turn_spans import TurnSpans
from server.turns.observer import TurnTimes

_log = logging.getLogger("strata.turn")

_BROKEN: Final = frozenset({TurnState.FAILED, TurnState.INTERRUPTED})
_DIFFERENCE: Final = ("index", "block", "layer", "role", "seq", "expected_hash", "found_hash")
"""What is repeated of a prefix that broke: which block, and not what it says."""


class TurnTelemetry:
    """Tells the operators of one server about its turns."""

    def __init__(self, metrics: Metrics, tracing: Tracing) -> None:
        self._turns = metrics.turns
        self._calls = metrics.calls
        self._spans = TurnSpans(tracing) if tracing.enabled else None

    def turn_began(self, lease: Lease) -> None:
        """Called where the request's context is at hand: the turn's span is its child."""
        self._turns.turn_began()
        if self._spans is not None:
            self._spans.begin(lease)

    def call_ended(self, lease: Lease, start: CallStart, end: CallEnd, *, assistant_id: str | None) -> None:
        """May come from any task."""
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
        """Leaves the one line of the turn: `turn.failed`, a warning, where it failed or was interrupted."""
        self._turns.turn_ended(turn, times)
        if self._spans is not None:
            self._spans.finish(lease, turn, times)
        level, event = (logging.WARNING, "turn.failed") if turn.state in _BROKEN else (logging.INFO, "turn.ended")
        if _log.isEnabledFor(level):
            _log.log(level, event, extra=_identity(lease) | _outcome(turn) | _durations(times))

    def turn_lost(self, lease: Lease, code: str) -> None:
        """Whoever loses a turn, or reaps one, says so in the log with what it knows; here it is counted."""
        self._turns.turn_lost(code)
        if self._spans is not None:
            self._spans.lose(lease, code)

    def turn_stalled(self, lease: Lease) -> None:
        """The turn's end is counted and traced by itself."""
        del lease
        self._turns.turn_stalled()

    def turn_reaped(self, lease: Lease) -> None:
        """Its span died with its process."""
        del lease
        self._turns.turn_reaped()


def _identity(lease: Lease) -> dict[str, object]:
    """Never the token: whoever knows it may write the turn."""
    return {"conversation_id": plain_name(lease.conversation_id), "turn_seq": bounded_count(lease.turn_seq)}


def _source(provider: str, model: str) -> dict[str, object]:
    """Both are empty where a turn failed before its assistant was known."""
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
