"""From the cells of an overview to the lines of its charts.

Every step of the time has a place, whether there were calls in it or not. Where there were none, nothing was spent:
tokens, cost and errors are zero. But nobody can say how fast an answer was that was not asked for, or what share of no
tokens came from the cache: there the lines have gaps.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final

from server.inspection.overview import Overview, OverviewCell, OverviewStep

LINE_LIMIT: Final = 6
"""More lines than this nobody can tell apart."""
_STEPS: Final[Mapping[OverviewStep, timedelta]] = {
    OverviewStep.HOUR: timedelta(hours=1),
    OverviewStep.DAY: timedelta(days=1),
}


class Unit(StrEnum):
    """How the numbers of a chart are written."""

    COUNT = "count"
    USD = "usd"
    SHARE = "share"
    SECONDS = "seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartLine:
    """One assistant, model or provider; or all of them."""

    key: str | None
    """None: all of them."""
    name: str
    values: Sequence[float | None]
    """One for each step; None is a gap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One number over time."""

    measure: str
    title: str
    unit: Unit
    lines: Sequence[ChartLine]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartSheet:
    """All charts of a time. They share their steps and, in the same order, their lines."""

    steps: Sequence[datetime]
    charts: Sequence[Chart]
    names: Sequence[str]
    """Of the lines."""
    left_out_count: int
    """Of how many keys there is no line: those that took the fewest tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measure:
    """What a chart shows of a cell."""

    name: str
    title: str
    unit: Unit
    read: Callable[[OverviewCell], float | None]
    without_calls: float | None
    """What a step without calls has: zero, or a gap."""


def total_tokens(cell: OverviewCell) -> int:
    """Of all buckets together."""
    return cell.usage.input_tokens + cell.usage.output_tokens + cell.usage.reasoning_tokens


def _cache_share(cell: OverviewCell) -> float | None:
    return cell.cache_share


def _error_count(cell: OverviewCell) -> float:
    return cell.error_count


def _median(cell: OverviewCell) -> float | None:
    return cell.median_seconds


def _slow(cell: OverviewCell) -> float | None:
    return cell.slow_seconds


def _cost(cell: OverviewCell) -> float | None:
    """A gap where no price is known: a zero would look like a saving."""
    return None if is_cost_unknown(cell) else float(cell.cost_usd)


def is_cost_unknown(cell: OverviewCell) -> bool:
    """Whether nothing at all can be said of the cost."""
    return cell.unpriced_count > 0 and not cell.cost_usd


_MEASURES: Final = (
    _Measure(name="tokens", title="Tokens", unit=Unit.COUNT, read=total_tokens, without_calls=0),
    _Measure(name="cost", title="Cost", unit=Unit.USD, read=_cost, without_calls=0),
    _Measure(name="cache", title="Input from the cache", unit=Unit.SHARE, read=_cache_share, without_calls=None),
    _Measure(name="errors", title="Failed attempts", unit=Unit.COUNT, read=_error_count, without_calls=0),
    _Measure(name="median", title="Latency, median", unit=Unit.SECONDS, read=_median, without_calls=None),
    _Measure(name="slow", title="Latency, 95th percentile", unit=Unit.SECONDS, read=_slow, without_calls=None),
)


def build_charts(overview: Overview, *, since: datetime, until: datetime) -> ChartSheet:
    """The charts of an overview. Where there is one key only, its line is all there is to see."""
    steps = list_steps(overview.step, since, until)
    shown = overview.by_key[:LINE_LIMIT]
    by_key: dict[str | None, dict[datetime, OverviewCell]] = {}
    for cell in overview.cells:
        if cell.at is not None:
            by_key.setdefault(cell.key, {})[cell.at.astimezone(UTC)] = cell
    keys = [(cell.key, cell.name or cell.key or "") for cell in shown]
    return ChartSheet(
        steps=steps,
        charts=[_build_chart(measure, steps, keys, by_key) for measure in _MEASURES],
        names=[name for _, name in keys],
        left_out_count=len(overview.by_key) - len(shown),
    )


def list_steps(step: OverviewStep, since: datetime, until: datetime) -> list[datetime]:
    """When the steps of a time begin, in UTC. The first may begin before it."""
    first = since.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
    at = first if step is OverviewStep.HOUR else first.replace(hour=0)
    steps = []
    while at < until:
        steps.append(at)
        at += _STEPS[step]
    return steps


def _build_chart(
    measure: _Measure,
    steps: Sequence[datetime],
    keys: Sequence[tuple[str | None, str]],
    by_key: Mapping[str | None, Mapping[datetime, OverviewCell]],
) -> Chart:
    lines = []
    for key, name in keys:
        cells = by_key.get(key, {})
        values = [measure.read(cells[at]) if at in cells else measure.without_calls for at in steps]
        lines.append(ChartLine(key=key, name=name, values=values))
    return Chart(measure=measure.name, title=measure.title, unit=measure.unit, lines=lines)
