"""Charts of a replay's numbers, as rectangles that a page draws without any script or style."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from server.replay_report import Measure, Measured
from server.replay_statistics import Distribution

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
_SHARES: Final = frozenset({Measure.SIMILARITY, Measure.CACHE_SHARE, Measure.JUDGE_SCORE})
_SECOND_MS: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A rectangle, in the units of the chart."""

    side: str
    x: float
    y: float
    width: float
    height: float


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
    rows: Sequence[Row]


def draw_chart(measured: Measured) -> Chart:
    """Both sides beside each other, in the same bins. The tallest bar of each side has the full height."""
    sides = [("recorded", measured.recorded), ("candidate", measured.candidate)]
    there = [(name, spread) for name, spread in sides if spread is not None]
    bars: list[Bar] = []
    for place, (name, spread) in enumerate(there):
        bars.extend(_draw_side(name, spread.bins, place, len(there)))
    return Chart(
        title=TITLES[measured.measure],
        low=show_value(measured.measure, measured.low),
        high=show_value(measured.measure, measured.high),
        bars=bars,
        rows=[_describe(measured.measure, name, spread) for name, spread in there],
    )


def show_value(measure: Measure, value: float) -> str:
    """A number as people read it."""
    if measure in _SHARES:
        return f"{value:.0%}" if measure is Measure.CACHE_SHARE else f"{value:.2f}"
    if measure is Measure.COST_USD:
        return f"${value:,.5f}"
    if measure is Measure.LATENCY_MS:
        return f"{value / _SECOND_MS:,.1f} s" if value >= _SECOND_MS else f"{value:,.0f} ms"
    return f"{value:,.0f}"


def _draw_side(side: str, bins: Sequence[int], place: int, count: int) -> list[Bar]:
    room = WIDTH / len(bins)
    width = (room - _GAP) / count
    tallest = max(bins) or 1
    return [
        Bar(
            side=side,
            x=round(index * room + _GAP / 2 + place * width, 2),
            y=round(HEIGHT - HEIGHT * number / tallest, 2),
            width=round(width, 2),
            height=round(HEIGHT * number / tallest, 2),
        )
        for index, number in enumerate(bins)
        if number
    ]


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
