"""A peer that answers every request with the same bytes, and records what it was sent."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from server.emulator.exchange import Exchange, Receive, Request, Scope, Send, read_request


@dataclass(slots=True, kw_only=True)
class Replay:
    """An ASGI application."""

    pieces: Sequence[bytes]
    status: int = 200
    content_type: str = "text/event-stream"
    cut: bool = False
    """Whether the connection breaks after the last piece."""
    hold: bool = False
    """Whether nothing more comes after the last piece, not even an end."""
    forgetful: bool = False
    """Whether the requests are discarded."""
    requests: list[Request] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)
    """The address of the client, by request: equal ones are the same connection."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            while True:
                message = await receive()
                await send({"type": f"{message['type']}.complete"})
                if message["type"] == "lifespan.shutdown":
                    return
        request = await read_request(scope, receive)
        if not self.forgetful:
            self.requests.append(request)
            self.ports.append(scope["client"][1])
        exchange = Exchange(request, scope, receive, send)
        await exchange.start(self.status, content_type=self.content_type)
        for piece in self.pieces:
            await exchange.send(piece)
        if self.hold:
            await exchange.wait_for_disconnect()
        await (exchange.cut() if self.cut else exchange.finish())
