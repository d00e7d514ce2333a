"""The filters of the list of conversations, as query parameters of its page."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from typing import Any, Final, TypeVar
from urllib.parse import urlencode

from server.conversation.errors import ValidationFailed
from server.conversation.time_span import read_span
from server.conversation.turn import StopReason
from server.inspection.conversation_list import InspectedState, InspectionFilter

FLAGS: Final[Mapping[str, str]] = {
    "has_repairs": "Repaired history",
    "has_missing_signature": "Missing signature",
    "has_withheld_signature": "Withheld signature",
    "has_prefix_break": "Broken prefix",
    "was_recovered": "Recovered turn",
}
"""Filters without a value, and their labels."""
TEXTS: Final = ("assistant_id", "model", "provider", "error_code", "tool_name", "text", "phrase")
_TEXT_LIMIT: Final = 1000
_COUNT_LIMIT: Final = 2**62
_YEARS: Final = range(1970, 10_000 - 1)

Choice = TypeVar("Choice", bound=StrEnum)


LIST: Final = "/admin/conversations"
FILTER_NAMES: Final = tuple(field.name for field in fields(InspectionFilter))
"""The query parameters have the same names."""


def read_filters(query: Mapping[str, str]) -> tuple[InspectionFilter, dict[str, str]]:
    """Return the filter, and the fields of the form without the empty ones.

    Raises `ValidationFailed`, which names the field.
    """
    filled = {name: value.strip() for name, value in query.items() if name in FILTER_NAMES and value.strip()}
    read = {name: _READERS[name](name, value) for name, value in filled.items()}
    return InspectionFilter(**read), filled


def write_filters(filters: Mapping[str, str], **more: str) -> str:
    """Return the URL of the list. Equal filters give equal URLs."""
    ordered = {name: filters[name] for name in FILTER_NAMES if name in filters}
    # A URL cannot contain a lone surrogate.
    query = urlencode({**ordered, **more}, errors="replace")
    return f"{LIST}?{query}" if query else LIST


def label_filters(filters: InspectionFilter) -> dict[str, str]:
    """Return the filters that are set, with labels. Filters without a value have an empty text."""
    values = {name: getattr(filters, name) for name in FILTER_NAMES}
    return {
        name.replace("_", " "): "" if value is True else str(value)
        for name, value in values.items()
        if value is not None and value is not False
    }


def _read_text(name: str, value: str) -> str:
    if len(value) > _TEXT_LIMIT:
        raise _refusal(name, f"Use at most {_TEXT_LIMIT} characters.")
    return value


def _read_flag(_name: str, _value: str) -> bool:
    """An unchecked box is not sent."""
    return True


def _read_choice(kind: type[Choice]) -> Callable[[str, str], Choice]:
    def read(name: str, value: str) -> Choice:
        try:
            return kind(value)
        except ValueError:
            raise _refusal(name, f"Use one of: {', '.join(kind)}.") from None

    return read


def _read_amount(name: str, value: str) -> Decimal:
    try:
        amount = Decimal(value)
    except InvalidOperation:
        raise _refusal(name, "Use an amount in dollars, such as 0.05.") from None
    if not amount.is_finite() or abs(amount) > _COUNT_LIMIT:
        raise _refusal(name, "Use an amount in dollars, such as 0.05.")
    return amount


def _read_count(name: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and int(value) < _COUNT_LIMIT):
        raise _refusal(name, "Use a whole number.")
    return int(value)


def read_time(name: str, value: str) -> datetime:
    """Read a time. The fields of a browser have no time zone: it is UTC. Raises `ValidationFailed`."""
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise _refusal(name, "Use a time such as 2026-01-31T09:30.") from None
    if moment.year not in _YEARS:
        raise _refusal(name, "Use a year between 1970 and 9998.")
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _read_span(name: str, value: str) -> timedelta:
    span = read_span(value)
    if span is None:
        raise _refusal(name, "Use a duration such as 30m, 24h, 7d or 4w.")
    return span


def _refusal(name: str, sentence: str) -> ValidationFailed:
    fault = {"path": name, "source": "query", "message": sentence}
    return ValidationFailed(
        f"The filter “{name}” cannot be used. {sentence}", hint="Go back and correct it.", errors=[fault]
    )


_READERS: Final[Mapping[str, Callable[[str, str], Any]]] = {
    **dict.fromkeys(TEXTS, _read_text),
    **dict.fromkeys(FLAGS, _read_flag),
    "state": _read_choice(InspectedState),
    "stop_reason": _read_choice(StopReason),
    "cost_from": _read_amount,
    "cost_to": _read_amount,
    "tokens_from": _read_count,
    "tokens_to": _read_count,
    "active_after": read_time,
    "active_before": read_time,
    "active_within": _read_span,
}
