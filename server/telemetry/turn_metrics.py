"""Metrics of turns: outcomes, and how long clients wait."""

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram

from server.conversation.errors import DatabaseUnavailable, LeaseLost, TurnStalled, every_error
from server.conversation.turn import ModelResponseTurn
from server.telemetry.limits import NONE, NameSet, finite_seconds
from server.turns.observer import TurnTimes

_OWN_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
"""Buckets for the server's own work, which takes milliseconds unless the turn waits in a queue."""
FIRST_SECONDS: Final = (0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 15, 30, 60, 120)
"""Buckets for the time until something is shown."""
WHOLE_SECONDS: Final = (0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200)
"""Buckets for whole answers."""

_SOURCE: Final = ("provider", "model")


class TurnMetrics:
    """The metrics of the turns of one server. `providers` and `models` are the admitted label values."""

    def __init__(self, registry: CollectorRegistry, *, providers: NameSet, models: NameSet) -> None:
        self._providers = providers
        self._models = models
        self._codes = NameSet(error.code for error in every_error())
        self._waits = _Waits(registry)
        self._begun = Counter("strata_turns_begun", "Turns whose input became durable.", registry=registry)
        self._ended = Counter(
            "strata_turns",
            "Turns that ended, in any state.",
            (*_SOURCE, "state", "stop_reason", "error_code"),
            registry=registry,
        )
        self._recovered = Counter(
            "strata_turns_recovered", "Turns of dead processes that this process ended.", registry=registry
        )
        self._stalled = Counter(
            "strata_turns_stalled",
            "Turns that the server ended because they made no progress after their provider had ended.",
            registry=registry,
        )
        self._lost = Counter(
            "strata_turns_lost",
            "Turns that this process could not store.",
            ("error_code",),
            registry=registry,
        )
        for error in (LeaseLost, DatabaseUnavailable, TurnStalled):
            # `increase()` does not see a series that begins with its first event, and this one is used for alerts.
            self._lost.labels(error.code)

    def turn_began(self) -> None:
        """Count a turn whose input is durable."""
        self._begun.inc()

    def turn_ended(self, turn: ModelResponseTurn, times: TurnTimes) -> None:
        """Count and time a turn whose answer is durable."""
        source = (self._providers.admit(turn.provider), self._models.admit(turn.model))
        stop_reason = NONE if turn.stop_reason is None else turn.stop_reason.value
        self._ended.labels(*source, turn.state.value, stop_reason, self._codes.admit(turn.error_code)).inc()
        self._waits.observe(source, times)

    def turn_lost(self, code: str) -> None:
        """Count a turn that could not be stored."""
        self._lost.labels(self._codes.admit(code)).inc()

    def turn_stalled(self) -> None:
        """Count a turn that made no progress after its provider had ended."""
        self._stalled.inc()

    def turn_recovered(self) -> None:
        """Count a turn of a dead process that was ended."""
        self._recovered.inc()


class _Waits:
    """How long clients wait. The server's own steps have no model label: they do not depend on it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._accepting = Histogram(
            "strata_turn_time_to_accept_seconds",
            "From the request to its durable input, including the time in the queue.",
            buckets=_OWN_SECONDS,
            registry=registry,
        )
        self._building = Histogram(
            "strata_turn_time_to_build_seconds",
            "From the request to the built payload.",
            buckets=_OWN_SECONDS,
            registry=registry,
        )
        self._first_events = Histogram(
            "strata_turn_time_to_first_event_seconds",
            "From the request to the first event of the answer.",
            _SOURCE,
            buckets=FIRST_SECONDS,
            registry=registry,
        )
        self._durations = Histogram(
            "strata_turn_duration_seconds",
            "From the request to the durable answer.",
            _SOURCE,
            buckets=WHOLE_SECONDS,
            registry=registry,
        )

    def observe(self, source: tuple[str, str], times: TurnTimes) -> None:
        for histogram, time in ((self._accepting, times.accepted), (self._building, times.built)):
            seconds = finite_seconds(time)
            if seconds is not None:
                histogram.observe(seconds)
        for histogram, time in ((self._first_events, times.first_event), (self._durations, times.ended)):
            seconds = finite_seconds(time)
            if seconds is not None:
                histogram.labels(*source).observe(seconds)
