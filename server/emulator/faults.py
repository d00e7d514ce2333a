"""Faults on demand: for one request with a header, or for the next requests with a call to the emulator."""

import base64
import binascii
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from server.emulator.reply import Fault, FaultKind

FAULT_HEADER: Final = "x-emulator-fault"
_OPTIONS: Final = frozenset(
    {"kind", "times", "after_chunks", "retry_after_seconds", "message", "body_base64", "status", "content_type"}
)
_STATUSES: Final = range(200, 600)


class FaultInvalid(ValueError):
    """The requested fault does not exist, or its options are not valid."""


class ArmedFaults:
    """Armed faults, applied to the next requests in order."""

    def __init__(self) -> None:
        self._waiting: deque[Fault] = deque()

    def arm(self, fault: Fault, times: int = 1) -> None:
        """Apply the fault to the next `times` requests."""
        self._waiting.extend([fault] * times)

    def take(self) -> Fault | None:
        return self._waiting.popleft() if self._waiting else None

    def clear(self) -> None:
        self._waiting.clear()

    def __len__(self) -> int:
        return len(self._waiting)


def parse_fault_header(value: str) -> Fault:
    """`<kind>[;after_chunks=2][;retry_after=3]`. Raises `FaultInvalid`."""
    kind, *options = (part.strip() for part in value.split(";"))
    given: dict[str, str] = {}
    for option in options:
        name, separator, text = option.partition("=")
        if not separator or name not in {"after_chunks", "retry_after"}:
            raise FaultInvalid(f"{FAULT_HEADER}: unknown option {option!r}; there are after_chunks and retry_after.")
        given[name] = text
    return build_fault(
        kind=kind, after_chunks=given.get("after_chunks", 0), retry_after_seconds=given.get("retry_after")
    )


def parse_fault_body(body: Any) -> tuple[Fault, int]:
    """Parse the fault and its count from the body of `POST /__faults`. Raises `FaultInvalid`."""
    if not isinstance(body, Mapping) or not set(body) <= _OPTIONS:
        raise FaultInvalid(f"The body is an object with these keys: {', '.join(sorted(_OPTIONS))}.")
    options = dict(body)
    times = _number(options.pop("times", 1), "times", int)
    return build_fault(**options), times


def build_fault(
    *,
    kind: object = None,
    after_chunks: object = 0,
    retry_after_seconds: object = None,
    message: object = "",
    body_base64: object = "",
    status: object = 200,
    content_type: object = "",
) -> Fault:
    """Build a fault from unchecked values. Raises `FaultInvalid`."""
    if kind not in list(FaultKind):
        raise FaultInvalid(f"There is no fault {kind!r}; there are {', '.join(FaultKind)}.")
    delay = None if retry_after_seconds is None else _number(retry_after_seconds, "retry_after", float)
    return Fault(
        kind=FaultKind(str(kind)),
        after_chunks=_number(after_chunks, "after_chunks", int),
        retry_after_seconds=delay,
        message=str(message),
        body=_bytes(body_base64),
        status=_status(status),
        content_type=str(content_type),
    )


def _bytes(value: object) -> bytes:
    try:
        return base64.b64decode(str(value), validate=True)
    except (ValueError, binascii.Error):
        raise FaultInvalid("body_base64 is not base64.") from None


def _status(value: object) -> int:
    status: int = _number(value, "status", int)
    if status not in _STATUSES:
        raise FaultInvalid(f"status is {value!r}, which is not the status of a response.")
    return status


def _number(value: object, name: str, kind: type[int] | type[float]) -> Any:
    try:
        number = kind(str(value))
    except ValueError:
        raise FaultInvalid(f"{name} is {value!r}, which is not a number.") from None
    if number < 0:
        raise FaultInvalid(f"{name} is {value!r}, which is negative.")
    return number
