"""Spans and moments as people type them: 30m, 12h, 7d, 4w, or a date."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import click

_SPAN: Final = re.compile(r"(\d{1,6})([mhdw])")
_UNITS: Final = {
    "m": timedelta(minutes=1),
    "h": timedelta(hours=1),
    "d": timedelta(days=1),
    "w": timedelta(weeks=1),
}
_LONGEST: Final = timedelta(days=365 * 2000)
"""A moment so long ago can still be told."""


class Span(click.ParamType[timedelta]):
    """A span such as 30m, 12h, 7d."""

    name = "span"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        span = value if isinstance(value, timedelta) else _read_span(value)
        if span is None:
            self.fail(f"{value!r} is no span such as 30m, 12h, 7d, 4w", param, ctx)
        return span


class Moment(click.ParamType[datetime]):
    """A time such as 2026-11-01, or a span such as 7d, which is that long ago."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        span = _read_span(value)
        if span is not None:
            return datetime.now(UTC) - span
        try:
            moment = datetime.fromisoformat(value)
            return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is neither a time such as 2026-11-01 nor a span such as 12h, 7d, 4w", param, ctx)


def _read_span(typed: str) -> timedelta | None:
    found = _SPAN.fullmatch(typed)
    span = None if found is None else int(found[1]) * _UNITS[found[2]]
    return None if span is None or span > _LONGEST else span
