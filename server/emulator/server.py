"""Serving an emulator: for a person until Ctrl-C, for a test as long as a block lasts."""

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.emulator.exchange import CLOSE_CONNECTION, ASGIApp
from server.errors import AddressInUse

_BACKLOG: Final = 2048
_GRACE_SECONDS: Final = 1
_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


async def serve_emulator(app: ASGIApp, host: str, port: int, announce: Callable[[str], None]) -> None:
    """Until SIGINT or SIGTERM; `announce` is told the URL. Raises `AddressInUse`."""
    listener = listen(host, port)
    announce(url_of(listener))
    await _Server(app, handle_signals=True).serve(sockets=[listener])


@asynccontextmanager
async def emulating(app: ASGIApp, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """The emulator beside other work; gives its URL. Port 0 is a free one."""
    listener = listen(host, port)
    server = _Server(app, handle_signals=False)
    task = asyncio.create_task(server.serve(sockets=[listener]), name="emulator")
    try:
        yield url_of(listener)
    finally:
        server.should_exit = True
        await task


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `AddressInUse`."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise AddressInUse(
            f"Cannot listen on {host}:{port}: {error.strerror}.", hint="Choose another --port."
        ) from error
    listener.setblocking(False)  # noqa: FBT003  reason: the standard library's signature
    return listener


def url_of(listener: socket.socket) -> str:
    """Where a listening socket can be reached."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _BreakableProtocol(HttpToolsProtocol):
    """Gives the application a way to close its connection in the middle of a body, which ASGI does not have."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {CLOSE_CONNECTION: {"close": self.transport.close}}


class _Server(uvicorn.Server):
    def __init__(self, app: ASGIApp, *, handle_signals: bool) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=_BreakableProtocol,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=_GRACE_SECONDS,
            )
        )
        self._handle_signals = handle_signals

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ends the serving and no more; uvicorn would raise the signal again, and beside other work it is not ours."""
        if not self._handle_signals:
            yield
            return
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in _STOP_SIGNALS:
                loop.remove_signal_handler(number)
