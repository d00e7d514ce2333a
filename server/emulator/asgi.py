"""The ASGI application around a provider's handler: logs every request and serves the emulator's own routes.

GET    /__healthz                 health check
GET    /__requests[?after=N]      logged requests, oldest first
DELETE /__requests                clear the log
POST   /__faults                  {"kind", "times", "after_chunks", "retry_after_seconds", "message"}; for `raw` also
                                  {"body_base64", "status", "content_type"}
DELETE /__faults                  remove all armed faults
DELETE /__signatures              reject every signature that was issued before
"""

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from server.emulator.exchange import ClientGone, Exchange, Receive, Scope, Send, read_request
from server.emulator.faults import FAULT_HEADER, FaultInvalid, parse_fault_body, parse_fault_header
from server.emulator.state import EmulatorState

Handler: TypeAlias = Callable[[Exchange], Awaitable[None]]
"""Responds to one request to the provider's API."""


class EmulatorApp:
    """An ASGI application. Paths that do not begin with `/__` go to the provider's handler."""

    def __init__(self, state: EmulatorState, handler: Handler) -> None:
        self.state = state
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _run_lifespan(receive, send)
            return
        try:
            request = await read_request(scope, receive)
        except ClientGone:
            return
        exchange = Exchange(request, scope, receive, send)
        if request.path.startswith("/__"):
            await self._answer_own_route(exchange)
        else:
            await self._answer_as_provider(exchange)

    async def _answer_as_provider(self, exchange: Exchange) -> None:
        logged = self.state.request_log.begin(exchange.request, self.state.clock())
        try:
            if header := exchange.request.headers.get(FAULT_HEADER):
                parse_fault_header(header)  # an invalid header is rejected at once and not in the middle of a response
            await self._handler(exchange)
        except FaultInvalid as error:
            await exchange.answer_json(400, {"error": {"message": str(error)}})
        finally:
            logged.status = exchange.status
            logged.fault = exchange.fault

    async def _answer_own_route(self, exchange: Exchange) -> None:
        request = exchange.request
        match request.method, request.path:
            case "GET", "/__healthz":
                await exchange.answer_json(200, {"status": "ok"})
            case "GET", "/__requests":
                after = request.query.get("after", "0")
                number = int(after) if after.isdecimal() else 0
                await exchange.answer_json(200, {"requests": self.state.request_log.list(number)})
            case "DELETE", "/__requests":
                self.state.request_log.clear()
                await exchange.answer_json(200, {})
            case "POST", "/__faults":
                await self._arm(exchange)
            case "DELETE", "/__faults":
                self.state.faults.clear()
                await exchange.answer_json(200, {})
            case "DELETE", "/__signatures":
                self.state.signer.replace_secret()
                await exchange.answer_json(200, {})
            case _:
                await exchange.answer_json(404, {"error": {"message": f"No {request.method} {request.path} here."}})

    async def _arm(self, exchange: Exchange) -> None:
        try:
            fault, times = parse_fault_body(exchange.request.read_json())
        except ValueError as error:
            await exchange.answer_json(400, {"error": {"message": str(error)}})
            return
        self.state.faults.arm(fault, times)
        await exchange.answer_json(200, {"armed": len(self.state.faults)})


async def _run_lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
