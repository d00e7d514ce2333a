"""Serving the program over HTTP: uvicorn with uvloop and httptools, the fastest for one client and equal under load.

Stopping, in order: no new connections; running turns finish within the limit while their listeners still hear them;
then the connections close. A second Ctrl-C cuts it short.
"""

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import FrameType
from typing import Final

import uvicorn

from server.errors import AddressInUse
from server.wiring import Program

_BACKLOG: Final = 2048
_GRACE_SECONDS: Final = 5
"""How long answers may take to end once no turn runs any more."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `AddressInUse`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Head and body of an answer are two writes; without this the second may wait 40 ms for an acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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


async def serve(program: Program, listener: socket.socket) -> None:
    """Until SIGINT or SIGTERM comes, and then until the last turn has ended."""
    await _Server(program, handle_signals=True).serve(sockets=[listener])


@asynccontextmanager
async def serving(program: Program, listener: socket.socket) -> AsyncIterator[str]:
    """The same beside other work, for as long as the block lasts; gives the URL."""
    server = _Server(program, handle_signals=False)
    task = asyncio.create_task(server.serve(sockets=[listener]), name="http-server")
    try:
        yield url_of(listener)
    finally:
        server.should_exit = True
        await task


class _Server(uvicorn.Server):
    def __init__(self, program: Program, *, handle_signals: bool) -> None:
        super().__init__(
            uvicorn.Config(
                program.app,
                http="httptools",
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=_GRACE_SECONDS,
            )
        )
        self._program = program
        self._handle_signals = handle_signals

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Instead of uvicorn's way, which raises the signal again afterwards: our own end is still to come then."""
        if not self._handle_signals:
            yield
            return
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        drain = asyncio.create_task(
            self._program.running_turns.drain(self._program.settings.shutdown_limit_seconds), name="drain"
        )
        while not drain.done() and not self.force_exit:
            await asyncio.wait({drain}, timeout=0.1)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002  reason: uvicorn's signature
        """The first signal ends gently, the second at once."""
        self.force_exit = self.should_exit
        self.should_exit = True
