"""The overview: tokens, cost, cache share, errors and latency over time, conversations that need attention, and charts.

A chart has a value for every step of the period. Without calls, tokens, cost and errors are zero, but latency and cache
share are undefined: their lines have gaps.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import StrEnum
from typing import Final

from server.conversation.usage import Usage
from server.inspection.conversation_list import InspectedConversation

MAX_PERIOD: Final = timedelta(days=366)
DEFAULT_PERIOD: Final = timedelta(days=7)
HOURLY_PERIOD: Final = timedelta(days=3)
"""Up to this length a step is an hour, above it a day."""
KEY_LIMIT: Final = 500
"""Maximum number of assistants or models with totals: those with the most tokens."""
CELL_KEY_LIMIT: Final = 20
"""Maximum number of assistants or models with numbers for each step."""
TOP_LIMIT: Final = 10
ALARM_LIMIT: Final = 20
ERROR_LIMIT: Final = 20
LINE_LIMIT: Final = 6
"""Maximum number of lines in a chart."""


class OverviewBy(StrEnum):
    """How the overview is grouped; one line of a chart per group."""

    ASSISTANT = "assistant"
    MODEL = "model"
    PROVIDER = "provider"


class OverviewStep(StrEnum):
    """The length of a step, in UTC."""

    HOUR = "hour"
    DAY = "day"


@dataclass(frozen=True, slots=True, kw_only=True)
class OverviewCell:
    """The calls of one step, one group, both, or all."""

    at: datetime | None
    """The start of the step. None for the whole period."""
    key: str | None
    """The assistant, model or provider. None for all."""
    name: str | None = None
    """The current name of an assistant."""
    call_count: int
    error_count: int
    usage: Usage
    cost_usd: Decimal
    """The cost of the calls whose price is known."""
    unpriced_count: int
    median_seconds: float | None
    """From the request to the last byte. None if no call has ended."""
    slow_seconds: float | None
    """The 95th percentile."""
    first_byte_seconds: float | None
    """The median time to the first byte."""

    @property
    def cache_share(self) -> float | None:
        """The share of input tokens that was read from the cache. None without input tokens."""
        total = self.usage.input_tokens
        return self.usage.cache_read_tokens / total if total else None

    @property
    def total_tokens(self) -> int:
        """Input, output and reasoning tokens."""
        return self.usage.input_tokens + self.usage.output_tokens + self.usage.reasoning_tokens

    @property
    def is_cost_unknown(self) -> bool:
        """Whether no call has a known price."""
        return self.unpriced_count > 0 and not self.cost_usd


@dataclass(frozen=True, slots=True, kw_only=True)
class TopConversation:
    """One of the most expensive or slowest conversations."""

    id: str
    assistant_name: str
    call_count: int
    cost_usd: Decimal
    slowest_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorCount:
    """How many calls failed with one error code."""

    code: str
    call_count: int
    last_at: datetime
    """When the newest of them started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StuckCompaction:
    """A conversation that needs a compaction which is not possible."""

    conversation_id: str
    reason: str
    request_tokens: int
    began_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """Conversations of the period with one kind of problem, newest first."""

    kind: str
    """The name of the filter that finds all of them."""
    estimated_count: int
    conversations: Sequence[InspectedConversation]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """Everything that the overview reports of a period."""

    step: OverviewStep
    total: OverviewCell
    by_step: Sequence[OverviewCell]
    by_key: Sequence[OverviewCell]
    """Most tokens first."""
    cells: Sequence[OverviewCell]
    """By step and key, in order of time; at most `CELL_KEY_LIMIT` keys."""
    errors: Sequence[ErrorCount]
    """Most frequent first."""
    most_expensive: Sequence[TopConversation]
    slowest: Sequence[TopConversation]
    stuck_compactions: Sequence[StuckCompaction]
    alarms: Sequence[Alarm]


class Unit(StrEnum):
    """The unit of a chart."""

    COUNT = "count"
    USD = "usd"
    SHARE = "share"
    SECONDS = "seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartLine:
    """The values of one assistant, model or provider."""

    key: str | None
    name: str
    values: Sequence[float | None]
    """One value per step. None is a gap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One measure over time."""

    measure: str
    title: str
    unit: Unit
    lines: Sequence[ChartLine]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartSheet:
    """All charts of a period. They have the same steps and the same lines in the same order."""

    steps: Sequence[datetime]
    charts: Sequence[Chart]
    names: Sequence[str]
    """The names of the lines."""
    left_out_count: int
    """Keys without a line: those with the fewest tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measure:
    name: str
    title: str
    unit: Unit
    read: Callable[[OverviewCell], float | None]
    without_calls: float | None
    """The value of a step without calls: zero, or a gap."""


_MEASURES: Final = (
    _Measure(name="tokens", title="Tokens", unit=Unit.COUNT, read=lambda cell: cell.total_tokens, without_calls=0),
    _Measure(
        name="cost",
        title="Cost",
        unit=Unit.USD,
        # A zero would look like a saving.
        read=lambda cell: None if cell.is_cost_unknown else float(cell.cost_usd),
        without_calls=0,
    ),
    _Measure(
        name="cache",
        title="Input from the cache",
        unit=Unit.SHARE,
        read=lambda cell: cell.cache_share,
        without_calls=None,
    ),
    _Measure(
        name="errors", title="Failed attempts", unit=Unit.COUNT, read=lambda cell: cell.error_count, without_calls=0
    ),
    _Measure(
        name="median",
        title="Latency, median",
        unit=Unit.SECONDS,
        read=lambda cell: cell.median_seconds,
        without_calls=None,
    ),
    _Measure(
        name="slow",
        title="Latency, 95th percentile",
        unit=Unit.SECONDS,
        read=lambda cell: cell.slow_seconds,
        without_calls=None,
    ),
)
_STEPS: Final[Mapping[OverviewStep, timedelta]] = {
    OverviewStep.HOUR: timedelta(hours=1),
    OverviewStep.DAY: timedelta(days=1),
}


def choose_step(since: datetime, until: datetime) -> OverviewStep:
    """Return the step for a period."""
    return OverviewStep.HOUR if until - since <= HOURLY_PERIOD else OverviewStep.DAY


def list_steps(step: OverviewStep, since: datetime, until: datetime) -> list[datetime]:
    """List the starts of the steps of a period, in UTC. The first may be before the period."""
    first = since.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
    at = first if step is OverviewStep.HOUR else first.replace(hour=0)
    steps = []
    while at < until:
        steps.append(at)
        at += _STEPS[step]
    return steps


def build_charts(overview: Overview, *, since: datetime, until: datetime) -> ChartSheet:
    """Build the charts of an overview, with a line for each of the first `LINE_LIMIT` keys."""
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
