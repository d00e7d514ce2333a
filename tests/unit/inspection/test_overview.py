"""The series of the charts: every step has a value, and a gap is not a zero."""

from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from server.conversation.usage import Usage
from server.inspection.overview import (
    LINE_LIMIT,
    Overview,
    OverviewCell,
    OverviewStep,
    build_charts,
    choose_step,
    list_steps,
)

NOON = datetime(2026, 11, 10, 12, tzinfo=UTC)


def cell(key: str | None, at: datetime | None = None, **changes: Any) -> OverviewCell:
    values: dict[str, Any] = {
        "call_count": 1,
        "error_count": 0,
        "usage": Usage(fresh_input_tokens=6, cache_read_tokens=2, output_tokens=1, reasoning_tokens=1),
        "cost_usd": Decimal("0.5"),
        "unpriced_count": 0,
        "median_seconds": 1.5,
        "slow_seconds": 3.0,
        "first_byte_seconds": 0.5,
    }
    return OverviewCell(key=key, at=at, **values | changes)


def overview(by_key: list[OverviewCell], cells: list[OverviewCell]) -> Overview:
    return Overview(
        step=OverviewStep.HOUR,
        total=cell(None),
        by_step=[],
        by_key=by_key,
        cells=cells,
        errors=[],
        most_expensive=[],
        slowest=[],
        stuck_compactions=[],
        alarms=[],
    )


def test_without_calls_the_cost_is_zero_and_there_is_no_latency() -> None:
    # As the database may return it: the same moment in another time zone.
    at = (NOON + timedelta(hours=1)).astimezone(timezone(timedelta(hours=3)))
    sheet = build_charts(overview([cell("a")], [cell("a", at)]), since=NOON, until=NOON + timedelta(hours=3))
    assert sheet.steps == [NOON, NOON + timedelta(hours=1), NOON + timedelta(hours=2)]
    assert {chart.measure: list(chart.lines[0].values) for chart in sheet.charts} == {
        "tokens": [0, 10, 0],
        "cost": [0, 0.5, 0],
        "cache": [None, 0.25, None],
        "errors": [0, 0, 0],
        "median": [None, 1.5, None],
        "slow": [None, 3.0, None],
    }


def test_a_cost_without_any_price_is_a_gap_and_one_with_some_is_the_known_sum() -> None:
    unknown = cell("a", NOON, cost_usd=Decimal(0), unpriced_count=1)
    partly = cell("b", NOON, unpriced_count=1)
    sheet = build_charts(
        overview([cell("a"), cell("b")], [unknown, partly]), since=NOON, until=NOON + timedelta(hours=1)
    )
    assert [line.values for line in sheet.charts[1].lines] == [[None], [0.5]]


def test_the_largest_have_their_own_series_and_the_others_are_counted() -> None:
    keys = [cell(f"asst_{number}", name=f"name {number}") for number in range(LINE_LIMIT + 3)]
    sheet = build_charts(overview(keys, []), since=NOON, until=NOON + timedelta(hours=1))
    assert sheet.names == [f"name {number}" for number in range(LINE_LIMIT)]
    assert sheet.left_out_count == 3


@given(
    st.floats(min_value=0, max_value=2e9).map(lambda seconds: datetime.fromtimestamp(seconds, UTC)),
    st.timedeltas(min_value=timedelta(seconds=1), max_value=timedelta(days=366)),
)
def test_steps_cover_the_time_span_exactly(since: datetime, length: timedelta) -> None:
    until = since + length
    steps = list_steps(choose_step(since, until), since, until)
    assert steps[0] <= since < steps[0] + timedelta(days=1)
    assert steps[-1] < until
    gaps = {later - earlier for earlier, later in pairwise(steps)}
    assert len(gaps) <= 1
    assert until <= steps[-1] + (gaps.pop() if gaps else timedelta(days=1))
