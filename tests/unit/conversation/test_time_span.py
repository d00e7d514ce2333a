"""Durations as people write them."""

from datetime import timedelta

import pytest

from server.conversation.time_span import read_span


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("30m", timedelta(minutes=30)),
        ("24h", timedelta(days=1)),
        ("7d", timedelta(days=7)),
        ("4w", timedelta(days=28)),
        ("0h", timedelta()),
    ],
)
def test_a_duration_is_a_number_and_a_unit(text: str, span: timedelta) -> None:
    assert read_span(text) == span


@pytest.mark.parametrize("text", ["", "7", "d", "-7d", "7 d", "7D", "1.5d", "٣d", "999999w", "7d\n", "1y"])
def test_anything_else_is_none(text: str) -> None:
    assert read_span(text) is None
