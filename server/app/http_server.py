"""Uvicorn as the server and the emulators use it, on a socket that is already bound.

Uvicorn with httptools limits neither the size of a request head nor the time to send it, and checks its limit of
connections only after the head. `LimitedProtocol` adds these limits. They apply before the application is called, and
therefore before authentication. The application limits request bodies.
"""

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Final

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from server.conversation.errors import (
    AddressInUse,
    ConnectionLimitReached,
    RequestHeadTimedOut,
    RequestHeadTooLarge,
    RequestMalformed,
    StrataError,
)
from server.web.asgi_extensions import ABORT_CONNECTION

_BACKLOG: Final = 2048
_UNTAKEN_MILLISECONDS: Final = 120_000
"""How long the operating system keeps bytes that the client does not acknowledge."""
_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_LINE_OVERHEAD_BYTES: Final = 4
"""Length of the colon, the space and the line end of a header line."""
_MAX_PIPELINED: Final = 16
"""Maximum number of pipelined requests of one connection. Each needs more memory than its bytes."""
_LINGER_SECONDS: Final = 2.0
"""How long a refused connection stays open after its answer. Closing it while bytes of the client are unread would
reset it, and the client would see the reset instead of the answer."""
_MAX_LINGERING: Final = 256
"""Maximum number of refused connections that stay open. Further ones are reset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits that apply before a request reaches the application."""

    max_head_bytes: int = 64 * 1024
    """Request line and headers together."""
    max_header_bytes: int = 16 * 1024
    """One header line, or the request line."""
    max_header_count: int = 100
    head_seconds: float = 10.0
    """Time to send the request line and the headers, from the connection or from the first byte of a later request."""
    idle_seconds: float = 75.0
    """How long a connection stays open between two requests."""
    max_connections: int = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The answer to a request that does not reach the application."""

    status: int
    headers: Sequence[tuple[str, str]]
    body: bytes


def refuse_plainly(error: StrataError) -> Refusal:
    """Build an answer in plain text, for servers without their own error format."""
    statuses: dict[type[StrataError], int] = {
        RequestHeadTooLarge: 431,
        RequestHeadTimedOut: 408,
        ConnectionLimitReached: 503,
    }
    body = error.message.encode()
    return Refusal(status=statuses.get(type(error), 400), headers=[("content-type", "text/plain")], body=body)


def bind(host: str, port: int) -> socket.socket:
    """Open a listening socket. Raises `AddressInUse`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Head and body of an answer are two writes; without this the second may wait 40 ms for an acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Connections inherit it. Without it, a closed connection would remain while the client does not read.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNTAKEN_MILLISECONDS)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise AddressInUse(f"Cannot listen on {host}:{port}: {error.strerror}.") from error
    listener.settimeout(0)
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Config(uvicorn.Config):
    """Uvicorn's configuration with the limits. A protocol gets no other argument that could carry them."""

    def __init__(
        self, app: Any, *, limits: ConnectionLimits, refuse: Callable[[StrataError], Refusal], **options: Any
    ) -> None:
        super().__init__(app, **options)
        self.limits = limits
        self.refuse = refuse
        self.lingering: set[LimitedProtocol] = set()


@dataclass(slots=True)
class _HeadProgress:
    """Progress of a connection with the head of its next request."""

    begun: bool = False
    """Whether the first byte of a head has arrived, but not its end."""
    pending_bytes: int = 0
    """Bytes that arrived without completing a head, a message or a piece of a body. The parser keeps them: they are
    parts of a head, of trailers, or of a chunk extension."""
    advanced: bool = field(default=False)
    """Whether the latest bytes have completed one of these."""
    between_requests: bool = field(default=False)
    """Whether the latest bytes have ended a message without beginning another one."""


class LimitedProtocol(HttpToolsProtocol):
    """A connection with `ConnectionLimits`. If it exceeds them, it gets a 431, 408 or 503 and is closed.

    It also has an extension with which the application can abort a connection that the client does not read; ASGI has
    none.
    """

    def __init__(self, config: _Config, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self._limits = config.limits
        self._make_refusal = config.refuse
        self._lingering = config.lingering
        self._head = _HeadProgress()
        self._timer: asyncio.TimerHandle | None = None
        self._refused = False
        self._running: RequestResponseCycle | None = None
        """The request that the application is handling. `cycle` is the latest request, which may wait for this one."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # reason: uvicorn's signature
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            self._refuse(ConnectionLimitReached())
        else:
            self._start_timer(self._limits.head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._lingering.discard(self)
        # Uvicorn marks only the last request of a connection as disconnected.
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._unset_keepalive_if_required()
        self._head.advanced = self._head.between_requests = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # No other protocol is supported; the upgrade is ignored.
            pass
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse(cause if isinstance(cause, StrataError) else RequestMalformed())
            return
        if not self._head.advanced:
            self._head.pending_bytes += len(data)
            if self._head.pending_bytes > self._limits.max_head_bytes:
                self._refuse(_head_too_large(self._limits))
                return
        if self._is_answering or self._timer is not None or self.transport.is_closing():
            return
        if self._head.between_requests:
            # These bytes ended the body of a request that was already answered, and stopped uvicorn's timer.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        else:
            self._start_timer(self._limits.head_seconds)

    def on_message_begin(self) -> None:
        self._head.begun = True
        self._head.between_requests = False
        super().on_message_begin()
        self.scope["extensions"] = {ABORT_CONNECTION: {"abort": self.transport.abort}}

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._head = _HeadProgress(advanced=True)
        self._check_head()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head.advanced = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._stop_timer()
        self._head = _HeadProgress(advanced=True, between_requests=True)
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete  # type: ignore[redundant-expr]  # reason: it is None before the first request

    def _check_head(self) -> None:
        """Raise `RequestHeadTooLarge`, or `RequestMalformed` if the connection has too many pipelined requests."""
        sizes = [len(name) + len(value) + _LINE_OVERHEAD_BYTES for name, value in self.headers]
        sizes.append(len(self.url))
        limits = self._limits
        if (
            len(sizes) > limits.max_header_count + 1
            or max(sizes) > limits.max_header_bytes
            or sum(sizes) > limits.max_head_bytes
        ):
            raise _head_too_large(limits)
        if len(self.pipeline) >= _MAX_PIPELINED:
            raise RequestMalformed

    def _start_timer(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._time_out)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_out(self) -> None:
        self._timer = None
        if self._head.begun and not self._refused:
            self._refuse(RequestHeadTimedOut())
        else:
            self.transport.close()

    def _refuse(self, error: StrataError) -> None:
        """Answer and close. If another answer is being sent, the connection is aborted instead."""
        self._refused = True
        self._stop_timer()
        self._unset_keepalive_if_required()
        self.connections.discard(self)
        refusal = self._make_refusal(error)
        if self._is_answering or len(self._lingering) >= _MAX_LINGERING or self.transport.is_closing():
            self.transport.abort()
            return
        headers = [*refusal.headers, ("content-length", str(len(refusal.body))), ("connection", "close")]
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
        self.transport.write(STATUS_LINE[refusal.status] + lines.encode() + b"\r\n" + refusal.body)
        self.transport.write_eof()
        self._lingering.add(self)
        self._start_timer(_LINGER_SECONDS)


def _head_too_large(limits: ConnectionLimits) -> RequestHeadTooLarge:
    return RequestHeadTooLarge(
        max_head_bytes=limits.max_head_bytes,
        max_header_bytes=limits.max_header_bytes,
        max_header_count=limits.max_header_count,
    )


class HttpServer(uvicorn.Server):
    """Serves one application. The first signal stops it gracefully, the second at once."""

    def __init__(
        self,
        app: Any,
        *,
        handle_signals: bool,
        grace_seconds: int,
        limits: ConnectionLimits | None = None,
        refuse: Callable[[StrataError], Refusal] = refuse_plainly,
        **options: Any,
    ) -> None:
        """`grace_seconds`: how long answers may take after the stop was requested. `refuse`: builds the answer to a
        request that exceeds the limits or is not HTTP.
        """
        limits = limits or ConnectionLimits()
        settings: dict[str, Any] = {
            "http": LimitedProtocol,
            "timeout_keep_alive": limits.idle_seconds,
            "ws": "none",
            "lifespan": "on",
            "log_config": None,
            "access_log": False,
            "server_header": False,
            "proxy_headers": False,
        }
        super().__init__(
            _Config(app, limits=limits, refuse=refuse, timeout_graceful_shutdown=grace_seconds, **settings | options)
        )
        self._handle_signals = handle_signals

    @property
    def connection_count(self) -> int:
        """The number of open connections, without refused ones."""
        return len(self.server_state.connections)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals. Uvicorn would raise them again after the end, before the program has closed its parts."""
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
    """Serve in a task while the block runs; yields the URL."""
    task = asyncio.create_task(server.serve(sockets=[listener]), name="http-server")
    try:
        yield url_of(listener)
    finally:
        server.should_exit = True
        await task
