"""Simulated conversations: how many tokens, in how many calls, at which intervals. Drawn from a seed."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final

CALL_SECONDS: Final = 5.0
"""The duration of a call. Tool loops are fast, so the cache stays warm during them."""
_STARTED_AT: Final = datetime(2026, 11, 16, 9, 0, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The typical conversation of an application. Sizes are means, in tokens."""

    name: str
    static_tokens: int
    """Instructions and tools."""
    dynamic_tokens: int
    task_tokens: int
    answer_tokens: int
    thinking_tokens: int = 0
    """Per answer. Sent back with the answer, and never part of a transcript."""
    tool_share: float = 0.0
    """The share of exchanges that use tools."""
    tool_steps: int = 0
    """Consecutive tool calls in such an exchange."""
    call_tokens: int = 0
    result_tokens: int = 0
    spread: float = 0.0
    """Sizes are drawn uniformly between (1 - spread) and (1 + spread) times the mean."""
    change_share: float = 0.0
    """The share of exchanges before which the application changes the context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkTime:
    """The time between an answer and the next task."""

    name: str
    mean_seconds: float
    varies: bool = True
    """Drawn from an exponential distribution; otherwise always the mean."""


class LengthLaw(StrEnum):
    """The distribution of conversation lengths around their mean."""

    EQUAL = "equal"
    EVEN = "even"
    """Uniform between 0.5 and 1.5 times the mean."""
    EXPONENTIAL = "exponential"
    """Memoryless: the length so far says nothing about the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedCall:
    """One call of an exchange."""

    input_tokens: int
    """The task or tool result that it answers."""
    output_tokens: int
    """The answer or the tool call."""
    thinking_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedExchange:
    """A task, the calls for it, and their times."""

    calls: tuple[SimulatedCall, ...]
    starts_at: datetime
    ends_at: datetime
    changes_context: bool = False
    """The dynamic layer differs from that of the exchange before in more than the time."""

    def call_times(self) -> tuple[datetime, ...]:
        """The start of each call."""
        return tuple(self.starts_at + step * timedelta(seconds=CALL_SECONDS) for step in range(len(self.calls)))

    @property
    def spoken_tokens(self) -> int:
        """The tokens of its transcript."""
        return sum(call.input_tokens + call.output_tokens for call in self.calls)

    @property
    def thinking_tokens(self) -> int:
        """The tokens that are sent back besides the transcript."""
        return sum(call.thinking_tokens for call in self.calls)


def draw_conversation(shape: Shape, think_time: ThinkTime, exchanges: int, seed: str) -> tuple[SimulatedExchange, ...]:
    """Draw a conversation with this number of exchanges. The same arguments give the same conversation."""
    # Not for secrets: a simulation has to be repeatable.
    chance = random.Random(seed)  # noqa: S311  reason: as above
    drawn = []
    at = _STARTED_AT
    for _ in range(exchanges):
        calls = _draw_calls(shape, chance)
        ends_at = at + timedelta(seconds=CALL_SECONDS * (len(calls) - 1))
        changes = bool(shape.change_share) and chance.random() < shape.change_share
        drawn.append(SimulatedExchange(calls=calls, starts_at=at, ends_at=ends_at, changes_context=changes))
        at = ends_at + timedelta(seconds=CALL_SECONDS + _draw_gap(think_time, chance))
    return tuple(drawn)


def spread_lengths(mean: int, count: int, law: LengthLaw) -> Sequence[int]:
    """Return the lengths of `count` conversations: evenly spaced quantiles of the distribution, without randomness."""
    return [max(1, round(mean * _factor(law, (place + 0.5) / count))) for place in range(count)]


def _draw_calls(shape: Shape, chance: random.Random) -> tuple[SimulatedCall, ...]:
    def draw(mean: int) -> int:
        return round(mean * (1 + shape.spread * (2 * chance.random() - 1)))

    steps = shape.tool_steps if chance.random() < shape.tool_share else 0
    inputs = [shape.task_tokens] + [shape.result_tokens] * steps
    outputs = [shape.call_tokens] * steps + [shape.answer_tokens]
    return tuple(
        SimulatedCall(input_tokens=draw(given), output_tokens=draw(said), thinking_tokens=draw(shape.thinking_tokens))
        for given, said in zip(inputs, outputs, strict=True)
    )


def _factor(law: LengthLaw, quantile: float) -> float:
    match law:
        case LengthLaw.EQUAL:
            return 1
        case LengthLaw.EVEN:
            return 0.5 + quantile
        case LengthLaw.EXPONENTIAL:
            return -math.log(1 - quantile)


def _draw_gap(think_time: ThinkTime, chance: random.Random) -> float:
    if not think_time.varies:
        return think_time.mean_seconds
    return -think_time.mean_seconds * math.log(1 - chance.random())
