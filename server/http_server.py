"""Uvicorn, as both the server and the emulators use it: on a socket that is bound beforehand, ending when told to."""

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import FrameType
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.errors import AddressInUse

ABORT_CONNECTION: Final = "strata.abort_connection"
"""The name of the ASGI extension whose `abort` closes the connection at once, whatever the client has not read yet."""
_BACKLOG: Final = 2048
_UNTAKEN_MILLISECONDS: Final = 120_000
"""How long the system keeps bytes for a client that does not take them."""
_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `AddressInUse`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Head and body of an answer are two writes; without this the second may wait 40 ms for an acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Connections inherit it. Otherwise one whose last bytes the client never takes would stay after its end.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNTAKEN_MILLISECONDS)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise AddressInUse(f"Cannot listen on {host}:{port}: {error.strerror}.") from error
    listener.settimeout(0)
    return listener


def url_of(listener: socket.socket) -> str:
    """Where a listening socket can be reached."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class AbortableProtocol(HttpToolsProtocol):
    """Gives the application a way to close a connection that the client does not read, which ASGI does not have."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {ABORT_CONNECTION: {"abort": self.transport.abort}}


class HttpServer(uvicorn.Server):
    """An application on its own; the first signal ends it gently, the second at once."""

    def __init__(self, app: Any, *, handle_signals: bool, grace_seconds: int, **options: Any) -> None:
        """`grace_seconds`: how long answers may still take once the end has begun."""
        settings: dict[str, Any] = {
            "http": AbortableProtocol,
            "ws": "none",
            "lifespan": "on",
            "log_config": None,
            "access_log": False,
            "server_header": False,
            "proxy_headers": False,
        }
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=grace_seconds, **settings | options))
        self._handle_signals = handle_signals

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Instead of uvicorn's way, which raises the signal again afterwards: our own end is still to come then."""
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

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002  reason: uvicorn's signature
        self.force_exit = self.should_exit
        self.should_exit = True


@asynccontextmanager
async def serving_beside(server: HttpServer, listener: socket.socket) -> AsyncIterator[str]:
    """The server beside other work, for as long as the block lasts; gives the URL."""
    task = asyncio.create_task(server.serve(sockets=[listener]), name="http-server")
    try:
        yield url_of(listener)
    finally:
        server.should_exit = True
        await task
