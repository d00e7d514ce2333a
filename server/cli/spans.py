"""Spans and moments as people type them: 30m, 12h, 7d, 4w, or a date."""

from datetime import UTC, datetime, timedelta
from typing import Any

import click

from server.conversation.time_span import read_span


class Span(click.ParamType[timedelta]):
    """A span such as 30m, 12h, 7d."""

    name = "span"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        span = value if isinstance(value, timedelta) else read_span(value)
        if span is None:
            self.fail(f"{value!r} is no span such as 30m, 12h, 7d, 4w", param, ctx)
        return span


class TimeParam(click.ParamType[datetime]):
    """A time such as 2026-11-01, or a span such as 7d, which is that long ago."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        span = read_span(value)
        if span is not None:
            return datetime.now(UTC) - span
        try:
            moment = datetime.fromisoformat(value)
            return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is neither a time such as 2026-11-01 nor a span such as 12h, 7d, 4w", param, ctx)
