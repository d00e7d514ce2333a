import math
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.telemetry.limits import (
    NameSet,
    bounded_count,
    finite_seconds,
    finite_usd,
    nanoseconds,
    plain_name,
    seconds_between,
    status_class,
)
from tests.support.builders import A_TIME
from tests.support.strategies import any_text, json_values


class TestNames:
    @pytest.mark.parametrize("name", ["gemini-3.1-pro-preview", "publishers/google/models/x@001", "claude-opus-5-5"])
    def test_plausible_model_names_are_kept(self, name: str) -> None:
        assert plain_name(name) == name

    @pytest.mark.parametrize("name", ["", "a b", "a\n", "x" * 101, "é", "\ud800", "\x00", 7, None, ["a"]])
    def test_other_texts_are_replaced(self, name: object) -> None:
        assert plain_name(name) == "_OTHER"

    def test_known_names_are_never_displaced(self) -> None:
        names = NameSet(["gemini", "anthropic"], others=2)
        assert [names.admit(name) for name in ("a", "b", "c", "a", "gemini", "anthropic", None, "")] == [
            "a",
            "b",
            "_OTHER",
            "a",
            "gemini",
            "anthropic",
            "none",
            "none",
        ]

    @given(st.lists(any_text | json_values, max_size=100))
    def test_there_are_never_more_names_than_the_limit(self, values: list[object]) -> None:
        names = NameSet(["known"], others=3)
        assert len({names.admit(value) for value in values} - {"none", "_OTHER"}) <= 4

    @pytest.mark.parametrize(
        ("status", "name"),
        [(None, "none"), (200, "2xx"), (529, "5xx"), (99, "_OTHER"), (600, "_OTHER"), (-1, "_OTHER")],
    )
    def test_a_status_has_a_class(self, status: int | None, name: str) -> None:
        assert status_class(status) == name


class TestNumbers:
    @pytest.mark.parametrize(("count", "kept"), [(-1, 0), (7, 7), (2**53, 2**53), (10**400, 2**53)])
    def test_counts_are_bounded(self, count: int, kept: int) -> None:
        assert bounded_count(count) == kept

    @pytest.mark.parametrize(
        ("seconds", "kept"), [(None, None), (math.nan, None), (math.inf, None), (-1.0, 0.0), (0.5, 0.5), (1e300, 1e9)]
    )
    def test_durations_are_finite_and_not_negative(self, seconds: float | None, kept: float | None) -> None:
        assert finite_seconds(seconds) == kept

    @pytest.mark.parametrize(
        ("cost", "kept"),
        [
            (None, None),
            (Decimal("0.25"), 0.25),
            (Decimal(0), 0.0),
            (Decimal("NaN"), None),
            (Decimal("sNaN"), None),
            (Decimal("Infinity"), None),
            (Decimal("1E+400"), None),
            (Decimal(-1), None),
        ],
    )
    def test_a_cost_that_cannot_be_summed_is_unknown(self, cost: Decimal | None, kept: float | None) -> None:
        assert finite_usd(cost) == kept


class TestMoments:
    def test_a_moment_is_exact_to_the_microsecond(self) -> None:
        at = datetime(2026, 11, 16, 13, 0, 0, 123457, tzinfo=timezone(timedelta(hours=1)))
        assert nanoseconds(at) == 1_794_830_400_123_457_000

    @pytest.mark.parametrize(
        ("at", "found"), [(datetime.min.replace(tzinfo=UTC), 0), (datetime.max.replace(tzinfo=UTC), 2**63 - 1)]
    )
    def test_a_moment_outside_of_the_range_of_spans_becomes_the_nearest(self, at: datetime, found: int) -> None:
        assert nanoseconds(at) == found

    def test_a_clock_that_was_set_back_gives_no_negative_duration(self) -> None:
        assert seconds_between(A_TIME, A_TIME - timedelta(seconds=3)) == 0
        assert seconds_between(A_TIME, A_TIME + timedelta(seconds=3)) == 3
        assert seconds_between(A_TIME, None) is None
