"""Types of option values that click does not have: spans, times, expiries, names and amounts."""

import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, Final

import click

from server.conversation.time_span import read_span

_EXPIRY_SPAN: Final = re.compile(r"(\d{1,5})([hdwy])")
_EXPIRY_UNITS: Final = {
    "h": timedelta(hours=1),
    "d": timedelta(days=1),
    "w": timedelta(weeks=1),
    "y": timedelta(days=365),
}
_NAME: Final = re.compile(r"[^\x00-\x1f\x7f]{1,100}")


class Span(click.ParamType[timedelta]):
    """A span such as 30m, 12h, 7d."""

    name = "span"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        span = value if isinstance(value, timedelta) else read_span(value)
        if span is None:
            self.fail(f"{value!r} is not a span such as 30m, 12h, 7d, 4w", param, ctx)
        return span


class TimeParam(click.ParamType[datetime]):
    """A time in the past: a date such as 2026-11-01, or a span before now such as 7d."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        span = read_span(value)
        if span is not None:
            return datetime.now(UTC) - span
        try:
            time = datetime.fromisoformat(value)
            return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is neither a time such as 2026-11-01 nor a span such as 12h, 7d, 4w", param, ctx)


class Expiry(click.ParamType[datetime]):
    """A time in the future: a span from now such as 90d, or a date such as 2027-01-31."""

    name = "expiry"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        span = _EXPIRY_SPAN.fullmatch(value)
        if span is not None:
            time = datetime.now(UTC) + int(span[1]) * _EXPIRY_UNITS[span[2]]
        else:
            try:
                time = datetime.fromisoformat(value)
            except ValueError:
                self.fail(
                    f"{value!r} is neither a span such as 12h, 90d, 4w, 1y nor a date such as 2027-01-31", param, ctx
                )
            time = time if time.tzinfo is not None else time.replace(tzinfo=UTC)
        if time <= datetime.now(UTC):
            self.fail(f"{value!r} is in the past", param, ctx)
        return time


class Name(click.ParamType[str]):
    """A name that can be shown on one line."""

    name = "name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value).strip()
        if _NAME.fullmatch(text) is None:
            self.fail("a name must have 1 to 100 characters and no control characters", param, ctx)
        return text


class Amount(click.ParamType[Decimal]):
    """An amount of USD."""

    name = "usd"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Decimal:
        try:
            amount = Decimal(str(value))
        except ArithmeticError:
            self.fail(f"{value!r} is not an amount", param, ctx)
        if not amount.is_finite():
            self.fail(f"{value!r} is not an amount", param, ctx)
        return amount
