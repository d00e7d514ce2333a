"""Charts of a replay's numbers, as rectangles that a page draws without any script or style."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from server.replay.rerun.report import Measure, Measured
from server.replay.rerun.statistics import BIN_COUNT, Distribution
from server.web.admin.replay_turns import show_latency

WIDTH: Final = 320
HEIGHT: Final = 64
_GAP: Final = 2

TITLES: Final = {
    Measure.SIMILARITY: "Similarity of the texts",
    Measure.JUDGE_SCORE: "Judge's score",
    Measure.INPUT_TOKENS: "Input tokens",
    Measure.OUTPUT_TOKENS: "Output tokens",
    Measure.COST_USD: "Cost",
    Measure.CACHE_SHARE: "Input from the cache",
    Measure.LATENCY_MS: "Latency",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A rectangle, in the units of the chart."""

    side: str
    x: float
    y: float
    width: float
    height: float
    told: str
    """What it stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Where a mean is, and how sure that is, in the units of the chart's width."""

    side: str
    mean: float
    low: float
    width: float
    """Of the interval; 0 where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One side in numbers."""

    side: str
    mean: str
    interval: str
    low: str
    """5 in a hundred are below."""
    median: str
    high: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A measure as people look at it."""

    title: str
    low: str
    high: str
    bars: Sequence[Bar]
    marks: Sequence[Mark]
    rows: Sequence[Row]


def draw_chart(measured: Measured) -> Chart:
    """Both sides beside each other, in the same bins and to the same scale: they have as many values."""
    sides = [("recorded", measured.recorded), ("candidate", measured.candidate)]
    there = [(name, spread) for name, spread in sides if spread is not None]
    tallest = max((number for _, spread in there for number in spread.bins), default=0) or 1
    bars: list[Bar] = []
    for place, (name, spread) in enumerate(there):
        bars.extend(_draw_side(measured, name, spread.bins, place=place, count=len(there), tallest=tallest))
    return Chart(
        title=TITLES[measured.measure],
        low=show_value(measured.measure, measured.low),
        high=show_value(measured.measure, measured.high),
        bars=bars,
        marks=[_mark(measured, name, spread) for name, spread in there],
        rows=[_describe(measured.measure, name, spread) for name, spread in there],
    )


def show_value(measure: Measure, value: float) -> str:
    """A number as people read it."""
    if measure.is_share:
        return f"{value:.0%}" if measure is Measure.CACHE_SHARE else f"{value:.2f}"
    if measure is Measure.COST_USD:
        return f"${value:,.5f}"
    if measure is Measure.LATENCY_MS:
        return show_latency(value)
    return f"{value:,.0f}"


def _draw_side(
    measured: Measured, side: str, bins: Sequence[int], *, place: int, count: int, tallest: int
) -> list[Bar]:
    budget = WIDTH / len(bins)
    width = (budget - _GAP) / count
    return [
        Bar(
            side=side,
            x=round(index * budget + _GAP / 2 + place * width, 2),
            y=round(HEIGHT - HEIGHT * number / tallest, 2),
            width=round(width, 2),
            height=round(HEIGHT * number / tallest, 2),
            told=f"{side}: {number:,} from {_show_edge(measured, index)} to {_show_edge(measured, index + 1)}",
        )
        for index, number in enumerate(bins)
        if number
    ]


def _show_edge(measured: Measured, index: int) -> str:
    return show_value(measured.measure, measured.low + (measured.high - measured.low) * index / BIN_COUNT)


def _mark(measured: Measured, side: str, spread: Distribution) -> Mark:
    interval = spread.interval
    low = 0.0 if interval is None else _place(measured, interval.low)
    high = 0.0 if interval is None else _place(measured, interval.high)
    return Mark(side=side, mean=_place(measured, spread.mean), low=low, width=round(high - low, 2))


def _place(measured: Measured, value: float) -> float:
    """Where a value is; what lies beyond the chart is at its edge."""
    span = measured.high - measured.low
    share = (value - measured.low) / span if span else 0.0
    return round(WIDTH * min(max(share, 0.0), 1.0), 2)


def _describe(measure: Measure, side: str, spread: Distribution) -> Row:
    interval = spread.interval
    return Row(
        side=side,
        mean=show_value(measure, spread.mean),
        interval=(
            "" if interval is None else f"{show_value(measure, interval.low)} to {show_value(measure, interval.high)}"
        ),
        low=show_value(measure, spread.quantiles[0]),
        median=show_value(measure, spread.median),
        high=show_value(measure, spread.quantiles[-1]),
    )
