"""Serving the program over HTTP: uvicorn with uvloop and httptools, the fastest for one client and equal under load.

Stopping, in order: no new connections; running turns finish within the limit while their listeners still hear them;
then the connections close. A second Ctrl-C cuts it short.
"""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from server.http_server import HttpServer, serving_beside
from server.wiring import Program

_GRACE_SECONDS: Final = 5


async def serve(program: Program, listener: socket.socket) -> None:
    """Until SIGINT or SIGTERM comes, and then until the last turn has ended."""
    await _ProgramServer(program, handle_signals=True).serve(sockets=[listener])


@asynccontextmanager
async def serving(program: Program, listener: socket.socket) -> AsyncIterator[str]:
    """The same beside other work, for as long as the block lasts; gives the URL."""
    async with serving_beside(_ProgramServer(program, handle_signals=False), listener) as url:
        yield url


class _ProgramServer(HttpServer):
    def __init__(self, program: Program, *, handle_signals: bool) -> None:
        super().__init__(program.app, handle_signals=handle_signals, grace_seconds=_GRACE_SECONDS, date_header=False)
        self._program = program

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        drain = asyncio.create_task(
            self._program.running_turns.drain(self._program.settings.shutdown_limit_seconds), name="drain"
        )
        while not drain.done() and not self.force_exit:
            await asyncio.wait({drain}, timeout=0.1)
        await super().shutdown(sockets)
