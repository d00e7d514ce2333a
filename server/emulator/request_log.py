"""The log of the requests that an emulator received."""

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from server.emulator.exchange import Request

_KEPT: Final = 10_000
_CREDENTIAL_HEADERS: Final = frozenset(
    {"authorization", "cookie", "proxy-authorization", "x-api-key", "x-goog-api-key"}
)
_CREDENTIAL_PARAMETERS: Final = frozenset({"key", "access_token"})
_REMOVED: Final = "[removed]"


@dataclass(slots=True, kw_only=True)
class LoggedRequest:
    """One request. Status and fault are set when the response is known."""

    number: int
    at: float
    """Seconds on the emulator's clock."""
    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: Any
    """The decoded JSON, or the text if it is not JSON."""
    status: int | None = None
    fault: str | None = None


class RequestLog:
    """The last 10,000 requests, numbered from 1. Credentials are never stored."""

    def __init__(self) -> None:
        self._kept: deque[LoggedRequest] = deque(maxlen=_KEPT)
        self._number = 0

    def begin(self, request: Request, at: float) -> LoggedRequest:
        self._number += 1
        logged = LoggedRequest(
            number=self._number,
            at=at,
            method=request.method,
            path=request.path,
            query=_without(_CREDENTIAL_PARAMETERS, request.query),
            headers=_without(_CREDENTIAL_HEADERS, request.headers),
            body=_readable(request.body),
        )
        self._kept.append(logged)
        return logged

    def list(self, after: int = 0) -> list[dict[str, Any]]:
        """The requests with a higher number, oldest first."""
        return [asdict(logged) for logged in self._kept if logged.number > after]

    def clear(self) -> None:
        """Remove all requests; numbering continues."""
        self._kept.clear()


def _without(names: frozenset[str], values: Mapping[str, str]) -> dict[str, str]:
    return {name: _REMOVED if name in names else value for name, value in values.items()}


def _readable(body: bytes) -> Any:
    try:
        return json.loads(body) if body else None
    except ValueError:
        return body.decode(errors="replace")
