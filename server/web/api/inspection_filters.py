"""The filters of the list of conversations as query parameters. Routes that accept them declare `FILTERS`."""

from datetime import datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any, Final, TypeAlias

from litestar.di import NamedDependency, Provide
from litestar.params import FromQuery, QueryParameter, SkipValidation

from server.conversation.time_span import read_span
from server.conversation.turn import StopReason
from server.inspection.conversation_list import InspectedState, InspectionFilter
from server.web.validation import in_utc, refuse

_TEXT_LIMIT: Final = 500
_Values: TypeAlias = dict[str, Any]
_Words = Annotated[str | None, QueryParameter(max_length=_TEXT_LIMIT)]
_Sum = Annotated[float | None, QueryParameter(ge=0, le=1e9)]
_Tokens = Annotated[int | None, QueryParameter(ge=0, le=2**62)]


def provide_names(
    *,
    assistant_id: FromQuery[str | None] = None,
    model: FromQuery[str | None] = None,
    provider: FromQuery[str | None] = None,
    tool_name: FromQuery[str | None] = None,
    text: _Words = None,
    phrase: _Words = None,
) -> _Values:
    """Filters by name and text."""
    return {
        "assistant_id": assistant_id,
        "model": model,
        "provider": provider,
        "tool_name": tool_name,
        "text": text,
        "phrase": phrase,
    }


def provide_outcomes(
    *,
    # `state` is a reserved name in Litestar.
    turn_state: Annotated[InspectedState | None, QueryParameter(name="state")] = None,
    stop_reason: FromQuery[StopReason | None] = None,
    error_code: FromQuery[str | None] = None,
) -> _Values:
    """Filters by outcome."""
    return {"state": turn_state, "stop_reason": stop_reason, "error_code": error_code}


def provide_flags(
    *,
    has_repairs: FromQuery[bool] = False,
    has_missing_signature: FromQuery[bool] = False,
    has_withheld_signature: FromQuery[bool] = False,
    has_prefix_break: FromQuery[bool] = False,
    was_recovered: FromQuery[bool] = False,
) -> _Values:
    """Filters without a value."""
    return {
        "has_repairs": has_repairs,
        "has_missing_signature": has_missing_signature,
        "has_withheld_signature": has_withheld_signature,
        "has_prefix_break": has_prefix_break,
        "was_recovered": was_recovered,
    }


def provide_ranges(
    *,
    cost_from: _Sum = None,
    cost_to: _Sum = None,
    tokens_from: _Tokens = None,
    tokens_to: _Tokens = None,
    active_after: FromQuery[datetime | None] = None,
    active_before: FromQuery[datetime | None] = None,
    active_within: FromQuery[str | None] = None,
) -> _Values:
    """Filters by range."""
    return {
        "cost_from": None if cost_from is None else Decimal(str(cost_from)),
        "cost_to": None if cost_to is None else Decimal(str(cost_to)),
        "tokens_from": tokens_from,
        "tokens_to": tokens_to,
        "active_after": in_utc("active_after", active_after),
        "active_before": in_utc("active_before", active_before),
        "active_within": None if active_within is None else _read_span(active_within),
    }


def _read_span(text: str) -> timedelta:
    span = read_span(text)
    if span is None:
        raise refuse("active_within", "Expected a duration such as 30m, 24h, 7d or 4w", source="query")
    return span


def provide_filters(
    named: NamedDependency[SkipValidation[_Values]],
    ended: NamedDependency[SkipValidation[_Values]],
    flags: NamedDependency[SkipValidation[_Values]],
    ranges: NamedDependency[SkipValidation[_Values]],
) -> InspectionFilter:
    """Combine all filters."""
    return InspectionFilter(**named, **ended, **flags, **ranges)


FILTERS: Final = {
    "named": Provide(provide_names, sync_to_thread=False),
    "ended": Provide(provide_outcomes, sync_to_thread=False),
    "flags": Provide(provide_flags, sync_to_thread=False),
    "ranges": Provide(provide_ranges, sync_to_thread=False),
    "filters": Provide(provide_filters, sync_to_thread=False),
}
"""The dependencies that provide `filters` to a handler."""
