"""One HTTP request and its answer, as plain ASGI: an emulator has to place every byte, and to break off between two."""

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
"""The ASGI extension by which `server.py` lets an application break its connection: its `close` does it."""


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
    """A request, and the one answer it gets: whole by `answer`, or in pieces by `start`, `send` and `finish`."""

    def __init__(self, request: Request, scope: Scope, receive: Receive, send: Send) -> None:
        self.request = request
        self.status: int | None = None
        """Of the answer, once it has begun."""
        self.fault: FaultKind | None = None
        """The fault that befell it, for the log."""
        self._scope = scope
        self._receive = receive
        self._send = send

    async def answer(
        self, status: int, body: bytes, *, content_type: str, headers: Mapping[str, str] | None = None
    ) -> None:
        """The whole answer at once."""
        length = {"content-length": str(len(body))}
        await self.start(status, content_type=content_type, headers={**(headers or {}), **length})
        await self._send({"type": "http.response.body", "body": body})

    async def answer_json(self, status: int, value: Any, *, headers: Mapping[str, str] | None = None) -> None:
        body = json.dumps(value, ensure_ascii=False).encode()
        await self.answer(status, body, content_type="application/json; charset=utf-8", headers=headers)

    async def answer_raw(self, fault: Fault) -> None:
        """The bytes of a `raw` fault."""
        await self.answer(fault.status, fault.body, content_type=fault.content_type or "text/event-stream")

    async def start(self, status: int, *, content_type: str, headers: Mapping[str, str] | None = None) -> None:
        """The head of an answer whose body follows by `send`."""
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
        """The regular end of the body."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def cut(self) -> None:
        """Breaks the connection: what was sent arrives, the end of the body never does."""
        self._scope["extensions"][CLOSE_CONNECTION]["close"]()
        await self.wait_for_disconnect()

    async def wait_for_disconnect(self) -> None:
        """Until the connection is gone."""
        while (await self._receive())["type"] != "http.disconnect":
            pass


async def read_request(scope: Scope, receive: Receive) -> Request:
    """The whole request. Raises `ClientGone`."""
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
