"""Charts of a simulation: one file without scripts, fonts or anything else from elsewhere; the same bytes each time."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import matplotlib as mpl
from matplotlib.figure import Figure

from server.compaction.simulation import Comparison
from server.compaction.simulation_grid import LIMIT, GridRow

_ROW_INCHES: Final = 0.22
_MARGIN_INCHES: Final = 1.4
_NO_REMARKS: Final = {
    "svg": {"Date": None, "Creator": None, "Format": None, "Type": None},
    "png": {"Software": None},
}


def draw_lengths(title: str, by_length: Mapping[int, Comparison], names: Mapping[str, str], file: Path) -> None:
    """The share of each policy, over the length of the conversations."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    lengths = list(by_length)
    for name, label in names.items():
        shares = [comparison.share(getattr(comparison, name)) for comparison in by_length.values()]
        axes.plot(lengths, shares, marker="o", label=label)
    axes.set_title(f"Input cost as a share of no caching: {title}")
    axes.set_xlabel("exchanges")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    _save(figure, file)


def draw_grid(rows: Sequence[GridRow], file: Path) -> None:
    """The distance of the cost policy from the optimum: of every row its farthest length."""
    figure = Figure(figsize=(8, _ROW_INCHES * len(rows) + _MARGIN_INCHES), layout="constrained")
    axes = figure.add_subplot()
    labels = [" ".join(row.cells()[:4]) for row in rows]
    farthest = [max(comparison.distance for comparison in row.by_length.values()) for row in rows]
    axes.barh(range(len(rows)), [distance - 1 for distance in farthest], left=1, tick_label=labels)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.axvline(LIMIT, color="black", linestyle="--")
    axes.set_title(f"Cost policy, as a multiple of the optimum (promised: {LIMIT})")
    axes.grid(axis="x", alpha=0.3)
    _save(figure, file)


def _save(figure: Figure, file: Path) -> None:
    kind = file.suffix.removeprefix(".")
    with mpl.rc_context({"svg.hashsalt": "strata", "svg.fonttype": "none"}):
        figure.savefig(file, format=kind, metadata=_NO_REMARKS[kind])
