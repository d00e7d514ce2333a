"""Validation errors of Litestar and pydantic as field paths and messages for clients.

pydantic's location of an error names the members of unions that it tried (`input.list[...].0.text_part.text`); the path
here has only members of the request (`input.0.text`). Some messages quote the value that was sent; values are removed.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from litestar.exceptions import ValidationException

from server.conversation.errors import ValidationFailed
from server.web.problem import FieldFault

_MAX_FAULTS: Final = 50
_MAX_NAME_CHARS: Final = 64
_NOT_ALLOWED: Final = "The value is not allowed"
_REQUIRED: Final = "Field required"
_MISSING_PARAMETER: Final = re.compile(r"Missing required (\w+) parameter '([^']+)'")
_QUOTED_VALUE: Final = re.compile(r"^(Invalid enum value|Input tag) .*")
_PLAIN_TEXT: Final = re.compile(
    r"^(Expected|Object|Invalid|Input|Field|Extra|Value|String|List|Tuple|Set|Data|URL|UUID)\b"
)
"""How messages of pydantic and msgspec begin. Any other message comes from a decoder and may quote the value."""


def refuse(path: str, message: str, *, source: str = "body") -> ValidationFailed:
    """Return the error for one field, for checks that only a handler can make."""
    return ValidationFailed(errors=[FieldFault(path=path, source=source, message=message).model_dump()])


def in_utc(name: str, moment: datetime | None, *, source: str = "query") -> datetime | None:
    """Convert a time to UTC. Raises `ValidationFailed` if it has no offset or is out of range."""
    if moment is None:
        return None
    if moment.tzinfo is None:
        raise refuse(name, "Expected a time with its offset, such as 2026-01-31T09:30:00Z", source=source)
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise refuse(name, "Expected a time between the years 1 and 9999", source=source) from None


def read_period(
    since: datetime | None, until: datetime | None, *, default: timedelta, longest: timedelta
) -> tuple[datetime, datetime]:
    """Return the start and end of a period from the query parameters `from` and `to`. Raises `ValidationFailed`."""
    end = in_utc("to", until) or datetime.now(UTC)
    try:
        start = in_utc("from", since) or end - default
    except OverflowError:
        raise refuse("to", "Expected a later time", source="query") from None
    if not timedelta() < end - start <= longest:
        raise refuse("from", f"Expected a time before `to`, at most {longest.days} days earlier", source="query")
    return start, end


def read_faults(error: ValidationException, body: object) -> list[FieldFault]:
    """Return the faults of a request, field by field. `body` is its decoded JSON."""
    missing = _MISSING_PARAMETER.match(error.detail)
    if missing:
        return [FieldFault(path=missing[2], source=missing[1], message=_REQUIRED)]
    located = getattr(error.__cause__, "errors", None)
    faults = _body_faults(located, body) if isinstance(located, Sequence) else _parameter_faults(error.extra)
    return list(dict.fromkeys(faults))[:_MAX_FAULTS]


def _body_faults(located: Sequence[Mapping[str, Any]], body: object) -> Iterator[FieldFault]:
    for fault in located:
        path = trace_path(fault["loc"], body)
        yield FieldFault(path=path, source="body", message=_remove_value(fault["msg"], fault.get("ctx") or {}))


def _parameter_faults(extra: object) -> Iterator[FieldFault]:
    for fault in extra if isinstance(extra, list) else ():
        key, source = str(fault.get("key", "")), fault.get("source", "body")
        if source == "body" and key == "data":
            yield FieldFault(path="", source="body", message="A JSON body is required")
        else:
            yield FieldFault(
                path=key, source=str(getattr(source, "value", source)), message=_remove_value(fault["message"], {})
            )


def trace_path(location: Sequence[str | int], body: object) -> str:
    """Return the steps of a pydantic location that exist in the body, and a missing member at its end."""
    steps: list[str] = []
    value = body
    for index, step in enumerate(location):
        match value:
            case dict() if step in value:
                value = value[step]
            case list() if isinstance(step, int) and step < len(value):
                value = value[step]
            case dict() if index == len(location) - 1:
                pass
            case _:
                continue
        steps.append(str(step)[:_MAX_NAME_CHARS])
    return ".".join(steps)


def _remove_value(text: str, context: Mapping[str, Any]) -> str:
    if "expected_tags" in context:
        return f"The type has to be one of {context['expected_tags']}"
    quoted = _QUOTED_VALUE.match(text)
    if quoted:
        return _NOT_ALLOWED
    return text.removeprefix("Value error, ") if _PLAIN_TEXT.match(text) else _NOT_ALLOWED
