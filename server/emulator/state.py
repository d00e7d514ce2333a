"""The state that the handlers of one emulator share, and the log of the requests that it received."""

import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any, Final, TypeAlias

from server.emulator.exchange import Exchange, Request
from server.emulator.faults import FAULT_HEADER, ArmedFaults, parse_fault_header
from server.emulator.latency import FULL_SPEED, Latency
from server.emulator.reply import Fault, Turn
from server.emulator.script import Script
from server.emulator.signing import Signer

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


Clock: TypeAlias = Callable[[], float]
"""Seconds since the Unix epoch. Tests pass a clock that they can move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatorState:
    signer: Signer
    script: Script
    latency: Latency
    clock: Clock
    request_log: RequestLog
    faults: ArmedFaults
    seed: int
    model_requests: Iterator[int] = field(default_factory=lambda: count(1))
    """The numbers of the requests that reach the model."""

    def take_fault(self, exchange: Exchange) -> Fault | None:
        """The fault that the request names in its header, else the next armed fault, if any. It is written to the
        log.
        """
        header = exchange.request.headers.get(FAULT_HEADER)
        fault = parse_fault_header(header) if header else self.faults.take()
        if fault is not None:
            exchange.fault = fault.kind
        return fault

    def next_turn(self, exchange: Exchange, *, prompt: str, after_tools: bool) -> Turn | None:
        """The scripted reply or fault for this request, or None if the reply is to be improvised.

        Call it once per request that reaches the model. A fault is written to the log.
        """
        turn = self.script.take(next(self.model_requests), prompt, after_tools=after_tools)
        if isinstance(turn, Fault):
            exchange.fault = turn.kind
        return turn


def build_state(
    *, script: Script | None = None, latency: Latency = FULL_SPEED, clock: Clock = time.time, seed: int = 0
) -> EmulatorState:
    """Build a new state. Signatures made with a seed are valid in every emulator with that seed, also after a
    restart.
    """
    return EmulatorState(
        signer=Signer(hashlib.sha256(f"emulator:{seed}".encode()).digest()),
        script=script or Script(()),
        latency=latency,
        clock=clock,
        request_log=RequestLog(),
        faults=ArmedFaults(),
        seed=seed,
    )
