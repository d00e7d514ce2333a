"""The floor of the HTTP benchmarks: the least that a server which loses nothing can do.

A Litestar handler under uvicorn (uvloop, httptools) inserts the input, asks the upstream through aiohttp, passes each
piece on as it arrives, and inserts the bytes of the response: two durable statements with asyncpg. It reads no history,
checks no key, parses nothing.
"""

# No `from __future__ import annotations`: Litestar reads the annotations of handlers.
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import aiohttp
import asyncpg
from litestar import Litestar, Request, post
from litestar.params import FromPath
from litestar.response import Stream

from server.app.http_server import HttpServer, bind, serving_beside
from tests.bench.load import Answer, Client, TakeTurn
from tests.bench.processes import Serving, wait_for_end
from tests.bench.upstream import CHUNKS, WORDS

_TABLES = """
CREATE TABLE IF NOT EXISTS relay_inputs (conversation text, seq bigserial, body bytea, PRIMARY KEY (conversation, seq));
CREATE TABLE IF NOT EXISTS relay_answers (conversation text, seq bigserial, body bytea, PRIMARY KEY (conversation, seq))
"""
_INSERT_INPUT = "INSERT INTO relay_inputs (conversation, body) VALUES ($1, $2)"
_INSERT_ANSWER = "INSERT INTO relay_answers (conversation, body) VALUES ($1, $2)"
PATHS: Mapping[str, str] = {"gemini": "/models/bench:streamGenerateContent", "anthropic": "/v1/messages"}


def build_relay(database_url: str, upstream_url: str) -> Litestar:
    @asynccontextmanager
    async def open_parts(app: Litestar) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            asyncpg.create_pool(database_url, max_size=20) as pool,
            aiohttp.ClientSession(connector=connector) as session,
        ):
            await pool.execute(_TABLES)
            app.state.pool, app.state.session = pool, session
            yield

    @post("/{provider:str}/{conversation:str}", status_code=200)
    async def relay(request: Request[Any, Any, Any], provider: FromPath[str], conversation: FromPath[str]) -> Stream:
        state, body = request.app.state, await request.body()

        async def pass_on() -> AsyncIterator[bytes]:
            await state.pool.execute(_INSERT_INPUT, conversation, body)
            pieces = []
            async with state.session.post(upstream_url + PATHS[provider], data=body) as answer:
                async for piece in answer.content.iter_any():
                    pieces.append(piece)
                    yield piece
            await state.pool.execute(_INSERT_ANSWER, conversation, b"".join(pieces))

        return Stream(pass_on(), media_type="text/event-stream")

    return Litestar([relay], lifespan=[open_parts], openapi_config=None)


async def serve_relay(parent: Connection, database_url: str, upstream_url: str) -> None:
    """Serve until the process has to end; see `in_process`."""
    app = build_relay(database_url, upstream_url)
    server = HttpServer(app, handle_signals=False, grace_seconds=1, loop="none", log_level="error")
    async with serving_beside(server, bind("127.0.0.1", 0)) as url:
        parent.send(Serving(pid=os.getpid(), url=url))
        await wait_for_end(parent)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayTarget:
    """The relay as a target of load."""

    serving: Serving
    provider: str
    name: str = "relay"

    async def open_conversation(self, client: Client) -> TakeTurn:
        path = f"/{self.provider}/{os.urandom(8).hex()}"

        async def take_turn(client: Client, text: str) -> Answer:
            return check_answer(await client.post(path, {"input": text}, {}, WORDS.encode()))

        return take_turn


def check_answer(answer: Answer, ending: bytes = b"") -> Answer:
    """Make sure that the whole stream has arrived, with its last event."""
    assert answer.status == 200, (answer.status, bytes(answer.body))
    assert answer.body.count(WORDS.encode()) >= CHUNKS - 8, bytes(answer.body)
    assert ending in answer.body, bytes(answer.body)
    return answer
