"""The middleware around the whole application, including requests that Litestar itself refuses.

Every request gets an id, a span, a log line and metrics, and every answer the security headers. The middleware adds two
calls per ASGI message and never buffers, copies or parses a body; `body_budget` limits the time and the memory that
request bodies take. A request is recorded when its answer has ended, which for a stream may be minutes after it began.
"""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any, Final

from litestar import Litestar
from litestar.enums import ScopeType
from litestar.exceptions import HTTPException
from litestar.types import HTTPScope, Message, Receive, Scope, Send

from server.conversation.errors import Internal
from server.telemetry.logs import begin_log_context
from server.telemetry.metrics import Metrics
from server.telemetry.spans import RequestSpan, Tracing
from server.web.body_budget import BodyBudget, BodyIntake
from server.web.errors import encode_problem
from server.web.problem import PROBLEM_MEDIA_TYPE
from server.web.request import FAILURE, PARTS, PROBLEM_CODE, REQUEST_ID

_log = logging.getLogger("strata.web")

_VALID_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_KNOWN_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_OTHER_METHOD: Final = "_OTHER"
_UNMATCHED: Final = "unmatched"
_CLIENT_DISCONNECTED: Final = 499
"""Recorded, and never sent, if the client disconnects before the answer."""
_SERVER_ERRORS: Final = 500
_POLLED_ROUTES: Final = frozenset({"/healthz", "/readyz", "/metrics"})
"""Polled every few seconds: logged at `debug` only."""

_DEFAULT_HEADERS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)
"""Added to every answer unless its handler has set them."""


class _Exchange:
    """One request and its answer."""

    __slots__ = (
        "_body",
        "_receive",
        "_send",
        "abandoned",
        "began",
        "bytes_out",
        "complete",
        "disconnected",
        "method",
        "request_id",
        "span",
        "status",
    )

    def __init__(
        self,
        receive: Receive,
        send: Send,
        *,
        body: BodyIntake,
        method: str,
        request_id: str,
        span: RequestSpan | None,
    ) -> None:
        self._body = body
        self._receive = receive
        self._send = send
        self.method = method
        self.request_id = request_id
        self.span = span
        self.began = time.perf_counter()
        self.status = 0
        self.bytes_out = 0
        self.complete = False
        self.disconnected = False
        self.abandoned = False

    async def receive(self) -> Any:
        """Raises `BodyTimedOut` and `BodyBudgetExhausted` while the body is being read."""
        message = await self._receive_body() if self._body.pending else await self._receive()
        if message["type"] == "http.disconnect" and not self.complete:
            self.disconnected = True
            self.abandoned = self.abandoned or self.status == 0
        return message

    async def _receive_body(self) -> Any:
        deadline = await self._body.prepare()
        try:
            async with asyncio.timeout_at(deadline):
                message = await self._receive()
        except TimeoutError:
            raise self._body.time_out() from None
        if message["type"] == "http.request":
            self._body.arrived(len(message["body"]), more=message["more_body"])
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            self.bytes_out += len(message["body"])
            self.complete = not message.get("more_body", False)
        elif message["type"] == "http.response.start":
            self.status = message["status"]
            self._body.release()
            message = {**message, "headers": self._complete_headers(list(message["headers"]))}
        await self._send(message)

    def _complete_headers(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        present = {name for name, _ in headers}
        headers.extend(header for header in _DEFAULT_HEADERS if header[0] not in present)
        headers.append((b"x-request-id", self.request_id.encode()))
        return headers


class RequestMiddleware:
    """The ASGI application: Litestar with the middleware around it."""

    def __init__(
        self,
        litestar: Litestar,
        parts: Mapping[str, object],
        *,
        bodies: BodyBudget,
        metrics: Metrics,
        tracing: Tracing,
    ) -> None:
        """`parts` are the dependencies of handlers by name, see `server.web.request.part_of`."""
        self._bodies = bodies
        self.litestar = litestar
        self._parts = parts
        self._metrics = metrics
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve HTTP requests through the middleware; pass the lifespan and websockets on to Litestar."""
        if scope["type"] == ScopeType.HTTP:
            await self._serve(scope, receive, send)
        else:
            await self.litestar(scope, receive, send)

    async def _serve(self, scope: HTTPScope, receive: Receive, send: Send) -> None:
        self._metrics.request_begun()
        method = scope["method"] if scope["method"] in _KNOWN_METHODS else _OTHER_METHOD
        request_id, carrier = _read_headers(scope["headers"])
        span = self._begin_span(scope, method, carrier)
        begin_log_context(request_id=request_id, **({"trace_id": span.trace_id} if span else {}))
        state: dict[str, Any] = scope.setdefault("state", {})
        state[REQUEST_ID] = request_id
        state[PARTS] = self._parts
        body = BodyIntake(self._bodies, scope["headers"])
        exchange = _Exchange(receive, send, body=body, method=method, request_id=request_id, span=span)
        failure: Exception | None = None
        try:
            await self.litestar(scope, exchange.receive, exchange.send)
        # The outermost boundary: Litestar turns the exceptions of handlers into answers, so an exception here broke an
        # answer that had begun, or Litestar itself. Uvicorn would log it without the request id and with its text,
        # which may contain content.
        except Exception as error:  # noqa: BLE001
            failure = error
            if not exchange.status:
                await _answer_internal(exchange)
        finally:
            body.release()
            self._record(scope, exchange, failure or state.get(FAILURE))

    def _begin_span(self, scope: HTTPScope, method: str, carrier: dict[str, str]) -> RequestSpan | None:
        if not self._tracing.enabled:
            return None
        return self._tracing.begin_request(
            method=method, scheme=scope["scheme"], server=scope.get("server"), carrier=carrier
        )

    def _record(self, scope: HTTPScope, exchange: _Exchange, failure: Exception | None) -> None:
        seconds = time.perf_counter() - exchange.began
        template: str | None = scope.get("path_template")
        route = template or _UNMATCHED
        status = _CLIENT_DISCONNECTED if exchange.abandoned or not exchange.status else exchange.status
        self._metrics.request_ended(method=exchange.method, route=route, status=status, seconds=seconds)
        facts: dict[str, object] = {"method": exchange.method, "route": route, "status": status}
        # Litestar raises its own exception for an incomplete body of a client that disconnects; that is no failure.
        if failure is not None and not (exchange.disconnected and isinstance(failure, HTTPException)):
            _log.error("http.request_failed", extra=facts, exc_info=failure)
        level = _level_of(route, status)
        if _log.isEnabledFor(level):
            facts |= {"duration_ms": round(seconds * 1000, 3), "bytes_out": exchange.bytes_out}
            if PROBLEM_CODE in scope["state"]:
                facts["code"] = scope["state"][PROBLEM_CODE]
            if exchange.disconnected:
                facts["disconnected"] = True
            _log.log(level, "http.request_finished", extra=facts)
        if exchange.span is not None:
            exchange.span.finish(route=template, status=status)


def _level_of(route: str, status: int) -> int:
    if route in _POLLED_ROUTES:
        return logging.DEBUG
    return logging.WARNING if status >= _SERVER_ERRORS else logging.INFO


def _read_headers(headers: Any) -> tuple[str, dict[str, str]]:
    """Return the client's request id if it is valid, else a new one, and the headers of the trace's parent."""
    request_id = ""
    carrier: dict[str, str] = {}
    for name, value in headers:
        if name == b"x-request-id":
            request_id = value.decode() if _VALID_REQUEST_ID.fullmatch(value) else ""
        elif name in {b"traceparent", b"tracestate"}:
            carrier[name.decode()] = value.decode("latin-1")
    return request_id or f"req_{secrets.token_hex(16)}", carrier


async def _answer_internal(exchange: _Exchange) -> None:
    body = encode_problem(Internal(), exchange.request_id)
    headers = [(b"content-type", PROBLEM_MEDIA_TYPE.encode()), (b"content-length", str(len(body)).encode())]
    await exchange.send({"type": "http.response.start", "status": 500, "headers": headers})
    await exchange.send({"type": "http.response.body", "body": body, "more_body": False})
