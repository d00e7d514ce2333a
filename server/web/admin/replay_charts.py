"""Histograms of a replay's measures, as rectangles of an SVG without script or style."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from server.replay.rerun.figures import MEASURE_TITLES, MeasureRow, describe_measure, format_value
from server.replay.rerun.report import BIN_COUNT, Distribution, Measured, Side

WIDTH: Final = 320
HEIGHT: Final = 64
_GAP: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A rectangle, in the units of the chart."""

    side: Side
    x: float
    y: float
    width: float
    height: float
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A mean with its interval, in the units of the chart's width."""

    side: Side
    mean: float
    low: float
    width: float
    """Of the interval; 0 if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """The histogram of a measure, with its numbers as rows of a table."""

    title: str
    low: str
    high: str
    bars: Sequence[Bar]
    marks: Sequence[Mark]
    rows: Sequence[MeasureRow]


def draw_chart(measured: Measured) -> Chart:
    """Draw both sides in the same bins and to the same scale, because they have the same number of values."""
    sides = ((Side.RECORDED, measured.recorded), (Side.CANDIDATE, measured.candidate))
    spreads = [(side, spread) for side, spread in sides if spread is not None]
    max_count = max((count for _, spread in spreads for count in spread.bins), default=0) or 1
    bars: list[Bar] = []
    for index, (side, spread) in enumerate(spreads):
        bars.extend(
            _draw_side(measured, side, spread.bins, side_index=index, side_count=len(spreads), max_count=max_count)
        )
    return Chart(
        title=MEASURE_TITLES[measured.measure],
        low=format_value(measured.measure, measured.low),
        high=format_value(measured.measure, measured.high),
        bars=bars,
        marks=[_mark(measured, side, spread) for side, spread in spreads],
        rows=describe_measure(measured),
    )


def _draw_side(
    measured: Measured, side: Side, bins: Sequence[int], *, side_index: int, side_count: int, max_count: int
) -> list[Bar]:
    bin_width = WIDTH / len(bins)
    width = (bin_width - _GAP) / side_count
    return [
        Bar(
            side=side,
            x=round(index * bin_width + _GAP / 2 + side_index * width, 2),
            y=round(HEIGHT - HEIGHT * number / max_count, 2),
            width=round(width, 2),
            height=round(HEIGHT * number / max_count, 2),
            title=f"{side}: {number:,} from {_format_edge(measured, index)} to {_format_edge(measured, index + 1)}",
        )
        for index, number in enumerate(bins)
        if number
    ]


def _format_edge(measured: Measured, index: int) -> str:
    return format_value(measured.measure, measured.low + (measured.high - measured.low) * index / BIN_COUNT)


def _mark(measured: Measured, side: Side, spread: Distribution) -> Mark:
    interval = spread.interval
    low = 0.0 if interval is None else _scale(measured, interval.low)
    high = 0.0 if interval is None else _scale(measured, interval.high)
    return Mark(side=side, mean=_scale(measured, spread.mean), low=low, width=round(high - low, 2))


def _scale(measured: Measured, value: float) -> float:
    """Return the x coordinate of a value. Values outside the chart are moved to its edge."""
    span = measured.high - measured.low
    share = (value - measured.low) / span if span else 0.0
    return round(WIDTH * min(max(share, 0.0), 1.0), 2)
