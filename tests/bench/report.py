"""The figures of a benchmark: a table for people, JSON for a comparison with an earlier run."""

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from server import __version__
from tests.bench.processes import Cores


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a figure has to be."""

    of: Literal["ratio", "difference", "value"]
    """Compared with the floor of the same run, or the figure itself."""
    limit: float
    at_least: bool = False
    """The limit is the smallest good value, not the largest."""

    def __str__(self) -> str:
        sign = "≥" if self.at_least else "≤"
        return {"ratio": f"{sign} {self.limit:g} x", "difference": f"{sign} floor + {self.limit:g}"}.get(
            self.of, f"{sign} {self.limit:g}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One quantity, measured in several rounds, and the floor in the same rounds if there is one."""

    name: str
    unit: str
    values: Sequence[float]
    floor: Sequence[float] = ()
    goal: Goal | None = None

    @property
    def ratios(self) -> list[float]:
        """Round by round, so that other work of the machine affects both sides; empty without a floor above 0."""
        if not all(self.floor):
            return []
        return [value / floor for value, floor in zip(self.values, self.floor, strict=True)] if self.floor else []

    @property
    def meets_goal(self) -> bool | None:
        if self.goal is None or (self.goal.of == "ratio" and not self.ratios):
            return None
        compared = statistics.median(self.values)
        if self.goal.of == "ratio":
            compared = statistics.median(self.ratios)
        elif self.goal.of == "difference":
            compared -= statistics.median(self.floor)
        return compared >= self.goal.limit if self.goal.at_least else compared <= self.goal.limit

    def to_document(self) -> dict[str, Any]:
        document = {**asdict(self), "median": statistics.median(self.values), "meets_goal": self.meets_goal}
        if self.ratios:
            document |= {"floor_median": statistics.median(self.floor), "ratio": statistics.median(self.ratios)}
        return document

    def to_row(self) -> list[str]:
        met = {None: "", True: "met", False: "missed"}[self.meets_goal]
        return [
            self.name,
            self.unit,
            _show_spread(self.floor),
            _show_spread(self.values),
            _show_spread(self.ratios),
            str(self.goal or ""),
            met,
        ]


_HEADER = ["figure", "unit", "floor", "measured", "ratio", "goal", ""]


def _show(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _show_spread(values: Sequence[float]) -> str:
    """The median, and the smallest and the largest value in brackets."""
    if not values:
        return ""
    middle = _show(statistics.median(values))
    return middle if min(values) == max(values) else f"{middle} [{_show(min(values))}, {_show(max(values))}]"


def render_table(figures: Iterable[Figure]) -> str:
    """A Markdown table that is also aligned for a terminal."""
    return _render([_HEADER, *(figure.to_row() for figure in figures)])


def _render(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    aligned = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows)
    lines = [f"| {' | '.join(cells)} |" for cells in aligned]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def render_comparison(figures: Iterable[Figure], earlier: Mapping[str, Any]) -> str:
    """How the figures differ from those of an earlier run, by ratio if there is a floor, else by value."""
    before = {document["name"]: document for document in earlier["figures"]}
    rows = [["figure", "compared", "earlier", "now", "change"]]
    for figure in figures:
        document = figure.to_document()
        member = "ratio" if figure.ratios else "median"
        if figure.name in before and member in before[figure.name]:
            was, now = before[figure.name][member], document[member]
            change = f"{(now / was - 1) * 100:+.0f} %" if was else ""
            rows.append([figure.name, member, _show(was), _show(now), change])
    return _render(rows)


def describe_machine(cores: Cores) -> dict[str, Any]:
    """The shape and the state of this machine."""
    return {
        "cpu": _read_cpu_model(),
        "cores": os.cpu_count(),
        "server_cores": sorted(cores.server),
        "load_cores": sorted(cores.load),
        "load_average": [round(one, 2) for one in os.getloadavg()],
        "system": platform.platform(),
        "python": platform.python_version(),
        "strata": __version__,
        "commit": _read_commit(),
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _read_cpu_model() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text(encoding="utf-8").splitlines() if information.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _read_commit() -> str | None:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or None


def write_report(path: Path, command: str, machine: Mapping[str, Any], figures: Iterable[Figure]) -> None:
    document = {"command": command, "machine": machine, "figures": [figure.to_document() for figure in figures]}
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
