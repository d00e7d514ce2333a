"""Charts of a simulation, drawn as SVG.

A chart is one file without scripts, fonts or references to other files. The same figures give the same bytes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import count, takewhile
from math import floor, log10
from pathlib import Path
from typing import Final

from server.compaction.simulation.comparison import Comparison
from server.compaction.simulation.grid import LIMIT, GridRow

_WIDTH: Final = 800
_COLORS: Final = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd")
_GRID_COLOR: Final = "#dddddd"
_TICKS: Final = 6
"""About how many ticks an axis has."""
_ROW_HEIGHT: Final = 18


def draw_lengths(title: str, by_length: Mapping[int, Comparison], names: Mapping[str, str], file: Path) -> None:
    """Draw the share of each policy over the length of the conversations."""
    left, top, right, bottom = 60, 40, _WIDTH - 150, 440
    lengths = list(by_length)
    shares = {
        label: [comparison.share(getattr(comparison, name)) for comparison in by_length.values()]
        for name, label in names.items()
    }
    x_axis = _Axis(min(lengths), max(lengths), left + 20, right - 20)
    y_axis = _Axis(0, max(max(values) for values in shares.values()) * 1.05, bottom, top)
    elements = [_text(_WIDTH / 2, 24, f"Input cost as a share of no caching: {title}", anchor="middle", size=15)]
    for value, label in y_axis.ticks():
        y = y_axis.place(value)
        elements += [_line(left, y, right, y), _text(left - 6, y + 4, label, anchor="end")]
    for value, label in x_axis.ticks():
        x = x_axis.place(value)
        elements += [_line(x, top, x, bottom), _text(x, bottom + 18, label, anchor="middle")]
    elements.append(_text((left + right) / 2, bottom + 40, "exchanges", anchor="middle"))
    for index, (label, values) in enumerate(shares.items()):
        color = _COLORS[index % len(_COLORS)]
        points = [(x_axis.place(x), y_axis.place(y)) for x, y in zip(lengths, values, strict=True)]
        path = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        elements.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        elements += [f'<circle cx="{_number(x)}" cy="{_number(y)}" r="3" fill="{color}"/>' for x, y in points]
        y = top + 20 * index + 10
        elements += [_line(right + 15, y, right + 35, y, color=color), _text(right + 42, y + 4, label)]
    _write(file, elements, height=bottom + 60)


def draw_grid(rows: Sequence[GridRow], file: Path) -> None:
    """Draw how far the cost policy is from the optimum: for each row, the length at which it is farthest."""
    left, top, right = 330, 40, _WIDTH - 20
    bottom = top + _ROW_HEIGHT * len(rows) + 8
    farthest = [max(comparison.distance for comparison in row.by_length.values()) for row in rows]
    axis = _Axis(min(1.0, *farthest), max(LIMIT, *farthest) + 0.005, left, right)
    title = f"Cost policy, as a multiple of the optimum (limit: {LIMIT})"
    elements = [_text(_WIDTH / 2, 24, title, anchor="middle", size=15)]
    for value, label in axis.ticks():
        x = axis.place(value)
        elements += [_line(x, top, x, bottom), _text(x, bottom + 18, label, anchor="middle")]
    for index, (row, distance) in enumerate(zip(rows, farthest, strict=True)):
        y = top + _ROW_HEIGHT * index + 4
        start, end = sorted((axis.place(1), axis.place(distance)))
        elements += [
            _text(left - 8, y + 12, " ".join(row.cells()[:4]), anchor="end"),
            (
                f'<rect x="{_number(start)}" y="{y}" width="{_number(end - start)}" height="{_ROW_HEIGHT - 4}"'
                f' fill="{_COLORS[0]}"/>'
            ),
        ]
    limit = axis.place(LIMIT)
    elements.append(_line(limit, top, limit, bottom, color="black", dashes="6 4"))
    _write(file, elements, height=bottom + 40)


class _Axis:
    """Maps values to coordinates, linearly."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self._low = low
        self._high = high if high > low else low + 1
        self._start = start
        self._end = end

    def place(self, value: float) -> float:
        return self._start + (value - self._low) / (self._high - self._low) * (self._end - self._start)

    def ticks(self) -> Iterator[tuple[float, str]]:
        """Yield round values within the range, with their labels."""
        raw = (self._high - self._low) / _TICKS
        power = 10.0 ** floor(log10(raw))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
        decimals = max(0, -floor(log10(step)))
        first = -(-self._low // step)
        for value in takewhile(lambda value: value <= self._high, (round((first + n) * step, 9) for n in count())):
            yield value, f"{value:.{decimals}f}"


def _number(value: float) -> str:
    return f"{value:.2f}"


def _line(x1: float, y1: float, x2: float, y2: float, *, color: str = _GRID_COLOR, dashes: str | None = None) -> str:
    ends = f'x1="{_number(x1)}" y1="{_number(y1)}" x2="{_number(x2)}" y2="{_number(y2)}"'
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<line {ends} stroke="{color}"{dashed}/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    place = f'x="{_number(x)}" y="{_number(y)}"'
    return f'<text {place} text-anchor="{anchor}" font-size="{size}">{escape(text, quote=False)}</text>'


def _write(file: Path, elements: Iterable[str], *, height: float) -> None:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:g}" width="{_WIDTH}"'
        f' height="{height:g}" font-family="sans-serif">'
    )
    background = '<rect width="100%" height="100%" fill="white"/>'
    file.write_text("\n".join([head, background, *elements, "</svg>", ""]), encoding="utf-8")
