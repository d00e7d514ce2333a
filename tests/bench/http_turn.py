"""Turns per second over HTTP, as a ratio to a bare relay that keeps what it relays, in one run on one database.

    python -m tests.bench.http_turn [--profile FILE]

An upstream in another process answers every request with a stream of 50 chunks at once. The floor is a Litestar handler
under uvicorn that reads the last 20 rows, asks the upstream through aiohttp, passes each piece on as it comes, and
inserts the whole: two statements. Strata takes a whole turn: key, lease, history, layers, SDK, fold, events, call
record. Each runs in a process of its own; clients talk to one at a time, in turns, so that whatever else the machine
does hits both. CPU is that of the serving process. With `--profile`, that of Strata's is written there for `pstats`.
"""

# No `from __future__ import annotations`: Litestar reads the annotations of handlers.
import argparse
import asyncio
import cProfile
import multiprocessing
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import asyncpg
import uvloop
from litestar import Litestar, Request, post
from litestar.params import FromPath
from litestar.response import Stream
from pydantic import SecretStr

from server.app.asgi import serving
from server.app.http_server import HttpServer, bind, serving_beside
from server.app.providers import open_providers
from server.app.settings import Settings
from server.app.wiring import open_program
from server.conversation.api_key import Scope
from server.emulator.server import emulating
from server.postgres.connections import DatabaseOptions
from server.postgres.embedded.service import open_embedded
from server.postgres.migrations import migrate_up
from server.providers.choice import KEY_VARIABLES, ProviderChoice
from tests.bench.stream_cost import anthropic_pieces, gemini_pieces
from tests.recordings.replay import Replay
from tests.support.emulators import BOTH, MODELS

CHUNKS = 50
CLIENTS = (1, 16)
TURNS = 10
"""Of one conversation; then another one is begun, so that what is read stays what the floor reads."""
ROUNDS = 12
WARM_UP = 3
PIECES = {"gemini": gemini_pieces, "anthropic": anthropic_pieces}

FLOOR_TABLE = """
CREATE TABLE floor_turns (conversation text, seq bigserial, asked bytea, raw bytea, PRIMARY KEY (conversation, seq))
"""
FLOOR_LOAD = "SELECT asked, raw FROM floor_turns WHERE conversation = $1 ORDER BY seq DESC LIMIT 20"
FLOOR_APPEND = "INSERT INTO floor_turns (conversation, asked, raw) VALUES ($1, $2, $3)"
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A process that serves, as the clients see it."""

    pid: int
    url: str
    key: str = ""

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS


TakeTurns = Callable[[aiohttp.ClientSession], Awaitable[None]]
"""One client's share of a round."""


def build_relay(database_url: str, upstreams: dict[str, str]) -> Litestar:
    """The least that a server with a memory can do."""

    @asynccontextmanager
    async def open_parts(app: Litestar) -> AsyncIterator[None]:
        async with asyncpg.create_pool(database_url, max_size=20) as pool, aiohttp.ClientSession() as session:
            app.state.pool, app.state.session = pool, session
            yield

    @post("/{provider:str}/{conversation:str}", status_code=200)
    async def relay(request: Request[Any, Any, Any], provider: FromPath[str], conversation: FromPath[str]) -> Stream:
        state, asked = request.app.state, await request.body()

        async def pass_on() -> AsyncIterator[bytes]:
            await state.pool.fetch(FLOOR_LOAD, conversation)
            pieces = []
            async with state.session.post(upstreams[provider], data=asked) as answer:
                async for piece in answer.content.iter_any():
                    pieces.append(piece)
                    yield piece
            await state.pool.execute(FLOOR_APPEND, conversation, asked, b"".join(pieces))

        return Stream(pass_on(), media_type="text/event-stream")

    return Litestar([relay], lifespan=[open_parts], openapi_config=None)


async def serve_relay(parent: Connection, database_url: str, upstreams: dict[str, str]) -> None:
    server = HttpServer(build_relay(database_url, upstreams), handle_signals=False, grace_seconds=1, loop="none")
    async with serving_beside(server, bind("127.0.0.1", 0)) as url:
        parent.send(Serving(pid=os.getpid(), url=url))
        await asyncio.to_thread(parent.poll, None)


async def serve_strata(parent: Connection, database_url: str, upstreams: dict[str, str], profile: str | None) -> None:
    settings = Settings(
        database_url=SecretStr(database_url),
        gemini_base_url=upstreams["gemini"],
        anthropic_base_url=upstreams["anthropic"],
        log_level="error",
    )
    environment = {names[0]: "key" for names in KEY_VARIABLES.values()}
    async with (
        open_providers(settings, ProviderChoice(provider="gemini", api_key="key"), environment) as providers,
        open_program(settings, providers=providers) as program,
        serving(program, bind("127.0.0.1", 0)) as url,
    ):
        tenant = await program.key_ring.create_tenant("bench")
        _, key = await program.key_ring.create_key(
            tenant_id=tenant.id, name="bench", scopes=frozenset({Scope.CLIENT}), expires_at=None
        )
        profiler = cProfile.Profile()
        if profile is not None:
            profiler.enable()
        parent.send(Serving(pid=os.getpid(), url=url, key=key))
        await asyncio.to_thread(parent.poll, None)
        if profile is not None:
            profiler.disable()
            profiler.dump_stats(profile)


async def serve_upstream(parent: Connection, provider: str) -> None:
    async with emulating(Replay(pieces=PIECES[provider](CHUNKS), forgetful=True)) as url:
        parent.send(Serving(pid=os.getpid(), url=url))
        await asyncio.to_thread(parent.poll, None)


def run_process(serve: Callable[..., Awaitable[None]], *arguments: Any) -> None:
    """What each process does, until it is told to end."""

    async def run() -> None:
        await serve(*arguments)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


@asynccontextmanager
async def in_process(serve: Callable[..., Awaitable[None]], *arguments: Any) -> AsyncIterator[Serving]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=run_process, args=(serve, there, *arguments), daemon=True)
    process.start()
    try:
        yield await asyncio.to_thread(here.recv)
    finally:
        here.send(None)
        await asyncio.to_thread(process.join, 20)


async def read_turn(session: aiohttp.ClientSession, url: str, body: dict[str, Any], headers: dict[str, str]) -> None:
    async with session.post(url, json=body, headers=headers) as answer:
        received = await answer.read()
        assert answer.status == 200, received
        assert received.count(b"some words of an answer") >= CHUNKS - 5, received


def floor_share(relay: Serving, provider: str) -> TakeTurns:
    async def take(session: aiohttp.ClientSession) -> None:
        conversation = os.urandom(8).hex()
        for number in range(TURNS):
            body = {"input": f"Task {number}: tell me a story."}
            await read_turn(session, f"{relay.url}/{provider}/{conversation}", body, {})

    return take


def strata_share(strata: Serving, assistant_id: str) -> TakeTurns:
    headers = {"authorization": f"Bearer {strata.key}", "accept": "text/event-stream"}

    async def take(session: aiohttp.ClientSession) -> None:
        made = await _ask(session, strata, "/v1/conversations", {"assistant_id": assistant_id})
        for number in range(TURNS):
            body = {"input": f"Task {number}: tell me a story."}
            await read_turn(session, f"{strata.url}/v1/conversations/{made['id']}/turns", body, headers)

    return take


async def _ask(session: aiohttp.ClientSession, strata: Serving, path: str, body: dict[str, Any]) -> Any:
    async with session.post(strata.url + path, json=body, headers={"authorization": f"Bearer {strata.key}"}) as answer:
        assert answer.status == 201, await answer.text()
        return await answer.json()


async def compare(
    session: aiohttp.ClientSession, sides: dict[str, tuple[Serving, TakeTurns]], clients: int
) -> dict[str, tuple[float, float]]:
    """Medians by name: turns per second, and milliseconds of CPU per turn."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    turns = clients * TURNS
    for _ in range(WARM_UP + ROUNDS):
        for name, (serving_process, take) in sides.items():
            cpu, wall = serving_process.cpu_seconds(), time.perf_counter()
            await asyncio.gather(*(take(session) for _ in range(clients)))
            seconds = time.perf_counter() - wall
            taken[name].append((turns / seconds, (serving_process.cpu_seconds() - cpu) * 1000 / turns))
    return {
        name: (
            statistics.median(rate for rate, _ in rounds[WARM_UP:]),
            # Ticks are coarse: one round says little, all of them together enough.
            statistics.fmean(cpu for _, cpu in rounds[WARM_UP:]),
        )
        for name, rounds in taken.items()
    }


async def measure(relay: Serving, strata: Serving) -> None:
    print(f"{'':<10} clients   floor/s   strata/s   ratio   floor cpu ms   strata cpu ms")  # noqa: T201  reason: its output is its purpose
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=max(CLIENTS))) as session:
        for provider in BOTH:
            definition = {"name": "bench", "provider": provider, "model": MODELS[provider]}
            assistant = await _ask(session, strata, "/v1/assistants", definition)
            sides = {
                "floor": (relay, floor_share(relay, provider)),
                "strata": (strata, strata_share(strata, assistant["id"])),
            }
            for clients in CLIENTS:
                results = await compare(session, sides, clients)
                (floor, floor_cpu), (ours, our_cpu) = results["floor"], results["strata"]
                row = f"{provider:<10} {clients:7d} {floor:9.1f} {ours:10.1f} {ours / floor:7.2f}"
                print(f"{row} {floor_cpu:14.2f} {our_cpu:15.2f}")  # noqa: T201  reason: as above


async def main(profile: str | None) -> None:
    async with AsyncExitStack() as stack:
        place = stack.enter_context(TemporaryDirectory(prefix="strata-bench-"))
        # Open to the account that Postgres runs under for root.
        os.chmod(place, 0o755)  # noqa: PTH101, S103
        embedded = stack.enter_context(open_embedded(Path(place) / "data"))
        await migrate_up(DatabaseOptions(url=embedded.url))
        connection = await asyncpg.connect(embedded.url)
        await connection.execute(FLOOR_TABLE)
        await connection.close()
        upstreams = {name: (await stack.enter_async_context(in_process(serve_upstream, name))).url for name in BOTH}
        relay = await stack.enter_async_context(in_process(serve_relay, embedded.url, upstreams))
        strata = await stack.enter_async_context(in_process(serve_strata, embedded.url, upstreams, profile))
        await measure(relay, strata)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--profile")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(arguments.parse_args().profile))
