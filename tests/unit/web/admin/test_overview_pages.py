"""The time span in the URL of the overview."""

from datetime import UTC, datetime

import pytest

from server.conversation.errors import ValidationFailed
from server.web.admin.overview_pages import choose_time

NOW = datetime(2026, 11, 16, 14, 25, 30, tzinfo=UTC)


def test_a_span_begins_with_a_whole_step() -> None:
    usual = choose_time("", "", "", NOW)
    assert (usual.since, usual.until, usual.span) == (datetime(2026, 11, 15, 14, tzinfo=UTC), NOW, "24h")
    assert usual.list_query == {"active_after": "2026-11-15T14:00"}
    assert choose_time("7d", "", "", NOW).since == datetime(2026, 11, 9, tzinfo=UTC)


def test_timestamps_are_used_unchanged_and_in_utc() -> None:
    chosen = choose_time("7d", "2026-01-01T10:30", "2026-01-02T10:30", NOW)
    assert (chosen.since, chosen.until) == (
        datetime(2026, 1, 1, 10, 30, tzinfo=UTC),
        datetime(2026, 1, 2, 10, 30, tzinfo=UTC),
    )
    assert chosen.span is None
    assert chosen.list_query == {"active_after": "2026-01-01T10:30", "active_before": "2026-01-02T10:30"}
    assert choose_time("", "2026-11-16T00:00", "", NOW).until == NOW


@pytest.mark.parametrize(
    ("span", "since", "until"),
    [
        ("soon", "", ""),
        ("0d", "", ""),
        ("366d", "", ""),
        ("", "2026-01-02", "2026-01-01"),
        ("", "2020-01-01", "2026-01-01"),
        ("", "yesterday", ""),
        ("", "2027-01-01", ""),
    ],
)
def test_an_invalid_time_is_refused(span: str, since: str, until: str) -> None:
    with pytest.raises(ValidationFailed):
        choose_time(span, since, until, NOW)
