"""Time spans in short notation: 30m, 12h, 7d, 4w."""

import re
from datetime import timedelta
from typing import Final

_SPAN: Final = re.compile(r"(\d{1,6})([mhdw])", re.ASCII)
_UNITS: Final = {
    "m": timedelta(minutes=1),
    "h": timedelta(hours=1),
    "d": timedelta(days=1),
    "w": timedelta(weeks=1),
}
_MAX_SPAN: Final = timedelta(days=365 * 2000)
"""A time that long ago can still be represented."""


def read_span(text: str) -> timedelta | None:
    """Parse a span. None if the text is not a span, or longer than the calendar."""
    found = _SPAN.fullmatch(text)
    span = None if found is None else int(found[1]) * _UNITS[found[2]]
    return None if span is None or span > _MAX_SPAN else span
