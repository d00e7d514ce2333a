"""Values of options: parsed, or rejected with an example of a valid value."""

from datetime import UTC, datetime, timedelta

import click
import pytest

from server.cli.parameters import Span, TimeParam


@pytest.mark.parametrize(
    ("typed", "span"),
    [
        ("30m", timedelta(minutes=30)),
        ("12h", timedelta(hours=12)),
        ("7d", timedelta(days=7)),
        ("4w", timedelta(weeks=4)),
        ("0d", timedelta()),
    ],
)
def test_a_duration_is_a_number_and_a_unit(typed: str, span: timedelta) -> None:
    assert Span().convert(typed, None, None) == span


@pytest.mark.parametrize("typed", ["", "7", "d", "7 d", "-7d", "7y", "1.5h", "7dd", "999999w", "99999999d"])
def test_an_invalid_or_too_long_span_is_rejected(typed: str) -> None:
    with pytest.raises(click.BadParameter, match="not a span such as 30m, 12h, 7d, 4w"):
        Span().convert(typed, None, None)


def test_a_time_is_a_date_or_a_span_before_now() -> None:
    assert TimeParam().convert("2026-11-01", None, None) == datetime(2026, 11, 1, tzinfo=UTC)
    assert TimeParam().convert("2026-11-01T02:00:00+02:00", None, None) == datetime(2026, 11, 1, tzinfo=UTC)
    moment = TimeParam().convert("90m", None, None)
    assert timedelta(minutes=90) <= datetime.now(UTC) - moment < timedelta(minutes=91)


@pytest.mark.parametrize("typed", ["", "yesterday", "2026-13-01", "999999w", "0001-01-01T00:00:00+14:00"])
def test_an_invalid_time_is_rejected(typed: str) -> None:
    with pytest.raises(click.BadParameter, match="neither a time such as 2026-11-01 nor a span"):
        TimeParam().convert(typed, None, None)
