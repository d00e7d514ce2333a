"""Serve the program over HTTP with uvicorn, uvloop and httptools.

To stop, the server first accepts no new connections, then waits within a limit for running turns, whose events are
still sent, and then closes the connections. A second Ctrl-C skips the waiting.
"""

import asyncio
import gc
import logging
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from server.app.http_server import ConnectionLimits, HttpServer, Refusal, serving_beside
from server.app.settings import Settings
from server.app.wiring import Program
from server.conversation.errors import StrataError
from server.web.errors import ANSWERS, answer_headers, encode_problem
from server.web.problem import PROBLEM_MEDIA_TYPE

_log = logging.getLogger("strata.web")

_GRACE_SECONDS: Final = 5
_COLLECTION_THRESHOLDS: Final = (20_000, 20, 50)
"""Allocations before a collection of the youngest generation, and collections of it before one of each older."""


def tune_garbage_collection() -> None:
    """Exclude what a process has loaded at its start from garbage collection, and collect less often.

    A turn creates thousands of small values and hardly any cycles, so most collections find nothing; by default they
    take about a tenth of the time of a server.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECTION_THRESHOLDS)


async def serve(program: Program, listener: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM, and then until the last turn has ended."""
    tune_garbage_collection()
    await _ProgramServer(program, handle_signals=True).serve(sockets=[listener])


@asynccontextmanager
async def serving(program: Program, listener: socket.socket) -> AsyncIterator[str]:
    """Serve while the block runs; yields the URL."""
    async with serving_beside(_ProgramServer(program, handle_signals=False), listener) as url:
        yield url


class _ProgramServer(HttpServer):
    def __init__(self, program: Program, *, handle_signals: bool) -> None:
        limits = _read_limits(program.settings)
        super().__init__(
            program.app,
            handle_signals=handle_signals,
            grace_seconds=_GRACE_SECONDS,
            limits=limits,
            refuse=self._build_refusal,
            date_header=False,
        )
        self._program = program
        program.metrics.gauge_callback(
            "strata_http_connections", "Open connections of clients.", lambda: self.connection_count
        )

    def _build_refusal(self, error: StrataError) -> Refusal:
        """Answer a request that does not reach the middleware, with a request id, a metric and a log event."""
        request_id = f"req_{secrets.token_hex(16)}"
        status = ANSWERS[type(error)].status
        self._program.metrics.request_refused(error.code)
        _log.info("http.request_refused", extra={"request_id": request_id, "status": status, "code": error.code})
        headers = {"content-type": PROBLEM_MEDIA_TYPE, "x-request-id": request_id, "cache-control": "no-store"}
        return Refusal(
            status=status,
            headers=list((headers | answer_headers(error)).items()),
            body=encode_problem(error, request_id),
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        drain = asyncio.create_task(
            self._program.running_turns.drain(self._program.settings.shutdown_limit_seconds), name="drain"
        )
        while not drain.done() and not self.force_exit:
            await asyncio.wait({drain}, timeout=0.1)
        await super().shutdown(sockets)


def _read_limits(settings: Settings) -> ConnectionLimits:
    return ConnectionLimits(
        max_head_bytes=settings.max_head_bytes,
        max_header_bytes=settings.max_header_bytes,
        max_header_count=settings.max_header_count,
        head_seconds=settings.head_seconds,
        idle_seconds=settings.idle_connection_seconds,
        max_connections=settings.max_connections,
    )
