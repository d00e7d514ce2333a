"""One HTTP request and its response, as plain ASGI: an emulator controls every byte and may stop between two."""

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qsl

from server.emulator.reply import Fault, FaultKind

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
ASGIApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

CLOSE_CONNECTION: Final = "strata.emulator.close_connection"
"""The ASGI extension with which `server.py` lets an application close its connection, by calling its `close`."""


class ClientGone(Exception):
    """The client closed the connection before it had sent its request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes

    def read_json(self) -> Any:
        """The body as JSON. Raises ValueError."""
        return json.loads(self.body)


class Exchange:
    """A request and its response: whole with `answer`, or in pieces with `start`, `send` and `finish`."""

    def __init__(self, request: Request, scope: Scope, receive: Receive, send: Send) -> None:
        self.request = request
        self.status: int | None = None
        """The status of the response, once it has started."""
        self.fault: FaultKind | None = None
        """The fault that was applied, for the log."""
        self._scope = scope
        self._receive = receive
        self._send = send

    async def answer(
        self, status: int, body: bytes, *, content_type: str, headers: Mapping[str, str] | None = None
    ) -> None:
        """Send the whole response at once."""
        length = {"content-length": str(len(body))}
        await self.start(status, content_type=content_type, headers={**(headers or {}), **length})
        await self._send({"type": "http.response.body", "body": body})

    async def answer_json(self, status: int, value: Any, *, headers: Mapping[str, str] | None = None) -> None:
        body = json.dumps(value, ensure_ascii=False).encode()
        await self.answer(status, body, content_type="application/json; charset=utf-8", headers=headers)

    async def answer_raw(self, fault: Fault) -> None:
        """Send the bytes of a `raw` fault."""
        await self.answer(fault.status, fault.body, content_type=fault.content_type or "text/event-stream")

    async def start(self, status: int, *, content_type: str, headers: Mapping[str, str] | None = None) -> None:
        """Send the head of a response whose body follows with `send`."""
        self.status = status
        named = {"content-type": content_type, **(headers or {})}
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in named.items()],
            }
        )

    async def send(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self) -> None:
        """End the body regularly."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def cut(self) -> None:
        """Close the connection: the client receives what was sent, but never the end of the body."""
        self._scope["extensions"][CLOSE_CONNECTION]["close"]()
        await self.wait_for_disconnect()

    async def wait_for_disconnect(self) -> None:
        """Wait until the client has closed the connection."""
        while (await self._receive())["type"] != "http.disconnect":
            pass


async def read_request(scope: Scope, receive: Receive) -> Request:
    """Read the whole request. Raises `ClientGone`."""
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return Request(
        method=scope["method"],
        path=scope["path"],
        query=dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)),
        headers={name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]},
        body=bytes(body),
    )
