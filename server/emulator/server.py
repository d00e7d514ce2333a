"""Serve an emulator: for a person until Ctrl-C, for a test while a context manager is open."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from server.app.http_server import HttpServer, LimitedProtocol, bind, serving_beside, url_of
from server.emulator.exchange import CLOSE_CONNECTION, ASGIApp

_GRACE_SECONDS: Final = 1


async def serve_emulator(app: ASGIApp, host: str, port: int, announce: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM. `announce` is called with the URL. Raises `AddressInUse`."""
    listener = bind(host, port)
    announce(url_of(listener))
    await _build(app, handle_signals=True).serve(sockets=[listener])


@asynccontextmanager
async def emulating(app: ASGIApp, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve while the block runs; yields the URL. Port 0 picks a free port."""
    async with serving_beside(_build(app, handle_signals=False), bind(host, port)) as url:
        yield url


class _BreakableProtocol(LimitedProtocol):
    """Adds an extension with which the application can close its connection inside a body; ASGI has none."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {CLOSE_CONNECTION: {"close": self.transport.close}}


def _build(app: ASGIApp, *, handle_signals: bool) -> HttpServer:
    return HttpServer(app, handle_signals=handle_signals, grace_seconds=_GRACE_SECONDS, http=_BreakableProtocol)
