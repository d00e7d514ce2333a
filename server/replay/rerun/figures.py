"""The figures of replays as text, the same for pages and the terminal."""

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from server.replay.rerun.replay import ReplayEstimate
from server.replay.rerun.report import Distribution, Measure, Measured, Side
from server.replay.rerun.result import AnswerFacts

MEASURE_TITLES: Final = {
    Measure.SIMILARITY: "Similarity of the texts",
    Measure.JUDGE_SCORE: "Judge's score",
    Measure.INPUT_TOKENS: "Input tokens",
    Measure.OUTPUT_TOKENS: "Output tokens",
    Measure.COST_USD: "Cost",
    Measure.CACHE_SHARE: "Input from the cache",
    Measure.LATENCY_MS: "Latency",
}
_SECOND_MS: Final = 1000
_NONE: Final = "\u2013"
_MIN_FACTOR: Final = 10
"""From this on, a change is a factor and not a percentage."""
_TIMES: Final = "\u00d7"
_MINUS: Final = "\u2212"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureRow:
    """The distribution of one side's values."""

    side: Side
    mean: str
    interval: str
    """Empty if there is none."""
    low: str
    """The 5 % quantile."""
    median: str
    high: str
    """The 95 % quantile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measure of a recorded and a candidate's answer."""

    name: str
    recorded: str
    candidate: str
    change: str = ""
    """Relative to the recorded answer; empty if a value is missing."""
    is_mismatch: bool = False
    """The values should be equal and are not, such as the stop reasons."""


def describe_measure(measured: Measured) -> list[MeasureRow]:
    """Build the rows of the sides that have values."""
    sides = ((Side.RECORDED, measured.recorded), (Side.CANDIDATE, measured.candidate))
    return [_describe_side(measured.measure, side, spread) for side, spread in sides if spread is not None]


def format_value(measure: Measure, value: float) -> str:
    """Format a value of a measure with its unit."""
    match measure:
        case Measure.CACHE_SHARE:
            return f"{value:.0%}"
        case Measure.SIMILARITY | Measure.JUDGE_SCORE:
            return f"{value:.2f}"
        case Measure.COST_USD:
            return f"${value:,.5f}"
        case Measure.LATENCY_MS:
            return f"{value / _SECOND_MS:,.2f} s" if value >= _SECOND_MS else f"{value:,.0f} ms"
        case Measure.INPUT_TOKENS | Measure.OUTPUT_TOKENS:
            return f"{value:,.0f}"


def compare_facts(recorded: AnswerFacts | None, candidate: AnswerFacts | None) -> tuple[Figure, ...]:
    """Build the figures of two answers."""
    one, other = _stop_of(recorded), _stop_of(candidate)
    is_mismatch = recorded is not None and candidate is not None and one != other

    def compare(name: str, measure: Measure, read: Callable[[AnswerFacts], Decimal | float | None]) -> Figure:
        values = [None if facts is None else read(facts) for facts in (recorded, candidate)]
        texts = [_NONE if value is None else format_value(measure, float(value)) for value in values]
        if measure is Measure.COST_USD:
            facts_of = zip((recorded, candidate), values, texts, strict=True)
            texts = ["unknown" if facts is not None and value is None else text for facts, value, text in facts_of]
        relate = _relate_shares if measure is Measure.CACHE_SHARE else _relate
        return Figure(name=name, recorded=texts[0], candidate=texts[1], change=relate(*values))

    return (
        Figure(name="Stop reason", recorded=one, candidate=other, is_mismatch=is_mismatch),
        compare("Input", Measure.INPUT_TOKENS, lambda facts: facts.usage.input_tokens),
        compare("From the cache", Measure.CACHE_SHARE, lambda facts: facts.cache_share),
        compare("Output", Measure.OUTPUT_TOKENS, lambda facts: facts.output_tokens),
        compare("Cost", Measure.COST_USD, lambda facts: facts.cost_usd),
        compare("Latency", Measure.LATENCY_MS, lambda facts: facts.latency_ms),
    )


def list_estimate_notes(estimate: ReplayEstimate) -> list[str]:
    """Return what limits the accuracy of an estimate, as sentences."""
    notes = []
    if estimate.is_rough:
        notes.append("The estimate is rough: the number of turns of a free-running candidate is not known in advance.")
    if estimate.unpriced_count:
        notes.append(describe_unpriced(estimate.unpriced_count))
    if estimate.unmeasured_count:
        notes.append(f"No usage was recorded for {_count_calls(estimate.unmeasured_count)}.")
    return notes


def describe_unpriced(count: int) -> str:
    """Return a sentence about calls without a known price."""
    verbs = "has no known price and is" if count == 1 else "have no known price and are"
    return f"{_count_calls(count)} {verbs} not included in the cost."


def _count_calls(count: int) -> str:
    return "1 call" if count == 1 else f"{count:,} calls"


def _describe_side(measure: Measure, side: Side, spread: Distribution) -> MeasureRow:
    interval = spread.interval
    bounds = () if interval is None else (interval.low, interval.high)
    return MeasureRow(
        side=side,
        mean=format_value(measure, spread.mean),
        interval=" to ".join(format_value(measure, bound) for bound in bounds),
        low=format_value(measure, spread.quantiles[0]),
        median=format_value(measure, spread.median),
        high=format_value(measure, spread.quantiles[-1]),
    )


def _stop_of(facts: AnswerFacts | None) -> str:
    if facts is None:
        return _NONE
    return facts.error_code or facts.stop_reason or "none"


def _relate(one: Decimal | float | None, other: Decimal | float | None) -> str:
    if one is None or other is None or not one:
        return ""
    factor = float(other) / float(one)
    return f"{_TIMES}{factor:,.0f}" if factor >= _MIN_FACTOR else _sign(round((factor - 1) * 100), " %")


def _relate_shares(one: Decimal | float | None, other: Decimal | float | None) -> str:
    return "" if one is None or other is None else _sign(round(other * 100) - round(one * 100), " points")


def _sign(number: int, unit: str) -> str:
    return "±0" if not number else f"{'+' if number > 0 else _MINUS}{abs(number):,}{unit}"
