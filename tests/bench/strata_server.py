"""Strata as a target of load: the whole program with its worker inside, in a process of its own."""

import asyncio
import cProfile
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import asyncpg
from pydantic import SecretStr

from server.app.asgi import serving, tune_garbage_collection
from server.app.http_server import bind
from server.app.providers import open_providers
from server.app.settings import Settings
from server.app.wiring import open_program
from server.conversation.api_key import Scope
from server.providers.choice import KEY_VARIABLES, ProviderChoice
from tests.bench.load import Answer, Client, TakeTurn
from tests.bench.processes import Serving, wait_for_end
from tests.bench.relay import check_answer
from tests.bench.upstream import WORDS
from tests.support.emulators import MODELS

_LAG_PERIOD_SECONDS = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Watching:
    """What a server records about itself while it runs. The files are written when it ends."""

    profile: Path | None = None
    """cProfile's statistics, from the start of the service."""
    statements: Path | None = None
    """Each statement that was sent to Postgres, a tab and how often, one per line; see `read_statements`."""
    loop_lags: Path | None = None
    """How late the event loop was, in seconds, one per line."""


NOTHING = Watching()


async def serve_strata(
    parent: Connection, database_url: str, upstream_url: str, watching: Watching = NOTHING, key: str = ""
) -> None:
    """Serve until the process has to end; see `in_process`. `key`: one that an earlier process has made."""
    settings = Settings(
        database_url=SecretStr(database_url),
        gemini_base_url=upstream_url,
        anthropic_base_url=upstream_url,
        log_level="error",
    )
    environment = {names[0]: "key" for names in KEY_VARIABLES.values()}
    async with (
        _watch(watching),
        open_providers(settings, ProviderChoice(provider="gemini", api_key="key"), environment) as providers,
        open_program(settings, providers=providers) as program,
        serving(program, bind("127.0.0.1", 0)) as url,
    ):
        if not key:
            tenant = await program.key_ring.create_tenant(f"bench {os.urandom(8).hex()}")
            _, key = await program.key_ring.create_key(
                tenant_id=tenant.id, name="bench", scopes=frozenset({Scope.CLIENT}), expires_at=None
            )
        profiler = cProfile.Profile()
        if watching.profile is not None:
            profiler.enable()
        tune_garbage_collection()
        parent.send(Serving(pid=os.getpid(), url=url, key=key))
        await wait_for_end(parent)
        if watching.profile is not None:
            profiler.disable()
            profiler.dump_stats(watching.profile)


@asynccontextmanager
async def _watch(watching: Watching) -> AsyncIterator[None]:
    statements: Counter[str] = Counter()
    lags: list[float] = []
    if watching.statements is not None:
        _count_statements(statements)
    measuring = asyncio.create_task(_measure_lag(lags)) if watching.loop_lags is not None else None
    try:
        yield
    finally:
        if measuring is not None:
            measuring.cancel()
    if watching.statements is not None:
        lines = [f"{' '.join(query.split())}\t{count}\n" for query, count in statements.items()]
        watching.statements.write_text("".join(lines), encoding="utf-8")
    if watching.loop_lags is not None:
        watching.loop_lags.write_text("".join(f"{lag}\n" for lag in lags), encoding="utf-8")


def _count_statements(statements: Counter[str]) -> None:
    """Count the statements of every connection that this process opens from now on."""
    connect: Any = asyncpg.connect

    async def connect_counting(*arguments: Any, **options: Any) -> Any:
        connection = await connect(*arguments, **options)
        connection.add_query_logger(lambda logged: statements.update((logged.query,)))
        return connection

    asyncpg.connect = connect_counting


async def _measure_lag(lags: list[float]) -> None:
    while True:
        began = time.perf_counter()
        await asyncio.sleep(_LAG_PERIOD_SECONDS)
        lags.append(time.perf_counter() - began - _LAG_PERIOD_SECONDS)


def read_statements(path: Path) -> Counter[str]:
    """The statements that a server has counted."""
    lines = (line.rpartition("\t") for line in path.read_text(encoding="utf-8").splitlines())
    return Counter({query: int(count) for query, _, count in lines})


@dataclass(frozen=True, slots=True, kw_only=True)
class StrataTarget:
    """A server and an assistant on it."""

    serving: Serving
    provider: str
    assistant_id: str
    name: str = "strata"
    headers: Mapping[str, str] = field(default_factory=dict)

    async def open_conversation(self, client: Client) -> TakeTurn:
        made = await client.post_json("/v1/conversations", {"assistant_id": self.assistant_id}, self.headers)
        return self.continue_conversation(made["id"])

    def continue_conversation(self, conversation_id: str) -> TakeTurn:
        path = f"/v1/conversations/{conversation_id}/turns"
        headers = {**self.headers, "accept": "text/event-stream"}

        async def take_turn(client: Client, text: str) -> Answer:
            return check_answer(await client.post(path, {"input": text}, headers, WORDS.encode()), b"turn.completed")

        return take_turn


async def open_strata_target(
    serving_process: Serving, provider: str, settings: Mapping[str, Any] | None = None
) -> StrataTarget:
    """Make a new assistant with these settings; without any, with the defaults."""
    headers = {"authorization": f"Bearer {serving_process.key}"}
    definition = {"name": f"bench {provider}", "provider": provider, "model": MODELS[provider]}
    async with Client(serving_process.url) as client:
        made = await client.post_json("/v1/assistants", {**definition, "settings": settings or {}}, headers)
    return StrataTarget(serving=serving_process, provider=provider, assistant_id=made["id"], headers=headers)
