"""Real server processes on the database of the test; any of them may have to die at a named point of a turn."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, Any

import httpx2

from server.conversation.api_key import Scope, Tenant
from server.postgres.access.key_ring import PostgresKeyRing
from server.postgres.connections import DatabaseOptions
from server.postgres.engine import Database
from tests.support.emulators import EmulatedProviders
from tests.support.http_driver import ApiClient
from tests.support.strata_process import PROJECT, environment

WAIT_SECONDS = 20.0
IMPORT_SECONDS = 90.0
NEVER_SECONDS = 30.0
"""For what must not happen during a test: a flush, or the end of a lease."""


@dataclass(slots=True, kw_only=True)
class Launcher:
    """The process that all servers are forks of."""

    process: Process
    is_ready: asyncio.Event = field(default_factory=asyncio.Event)
    begun: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)
    endings: dict[int, "asyncio.Future[int]"] = field(default_factory=dict)

    async def listen(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            message = json.loads(line)
            if "ready" in message:
                self.is_ready.set()
            elif "ended" in message:
                self.ending(message["pid"]).set_result(message["ended"])
                # Otherwise a server that could not start would be waited for in vain.
                self.begun.put_nowait(message)
            elif "url" in message:
                self.begun.put_nowait(message)

    def ending(self, pid: int) -> "asyncio.Future[int]":
        return self.endings.setdefault(pid, asyncio.get_running_loop().create_future())

    async def start(self, order: dict[str, Any]) -> tuple[int, str]:
        while not self.begun.empty():
            self.begun.get_nowait()
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        async with asyncio.timeout(WAIT_SECONDS):
            while "url" not in (message := await self.begun.get()):
                assert message["ended"] in {0, -signal.SIGKILL}, "a server could not begin; its log says why"
        return message["pid"], message["url"]


@asynccontextmanager
async def open_launcher(
    variables: Mapping[str, str] | None = None, log: IO[bytes] | None = None
) -> AsyncIterator[Launcher]:
    """`variables` are added to the environment of all its servers. `log` receives their log in place of the output
    of the test.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.faults.crashing_server",
        cwd=PROJECT,
        env=environment(variables or {}),
        stdin=PIPE,
        stdout=PIPE,
        stderr=log,
    )
    launcher = Launcher(process=process)
    listening = asyncio.create_task(launcher.listen())
    try:
        # Importing everything takes seconds, and on a busy machine many.
        await asyncio.wait_for(launcher.is_ready.wait(), IMPORT_SECONDS)
        yield launcher
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()
        await listening


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerProcess:
    """One server."""

    launcher: Launcher
    pid: int
    url: str
    api: ApiClient

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    async def ended(self) -> int:
        """Wait for its end. Returns its exit code."""
        async with asyncio.timeout(WAIT_SECONDS):
            return await asyncio.shield(self.launcher.ending(self.pid))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """All servers of one test, with one key for all of them."""

    launcher: Launcher
    options: DatabaseOptions
    database: Database
    emulated: EmulatedProviders
    tenant: Tenant
    key: str
    stack: AsyncExitStack

    async def start(
        self, *, crash_at: str | None = None, nth: int = 1, after_bytes: str = "", **settings: Any
    ) -> ServerProcess:
        """Start another server. It is stopped with the test."""
        order = {"crash_at": crash_at, "nth": nth, "after_bytes": after_bytes}
        return await self._launch(order, settings)

    async def start_worker(
        self, *, crash_at: str | None = None, nth: int = 1, options: dict[str, Any] | None = None, **settings: Any
    ) -> ServerProcess:
        """Start another worker, which has no URL. It is stopped with the test."""
        order = {"works": True, "crash_at": crash_at, "nth": nth, "options": options or {}}
        return await self._launch(order, settings)

    async def _launch(self, order: dict[str, Any], settings: dict[str, Any]) -> ServerProcess:
        values = {
            "database_url": self.options.url,
            "gemini_base_url": self.emulated.gemini.url,
            "anthropic_base_url": self.emulated.anthropic.url,
            "lease_seconds": NEVER_SECONDS,
            "flush_seconds": 0.05,
            "database_pool_size": 5,
            "shutdown_limit_seconds": 2,
            "log_format": "json",
            "log_level": "warning",
        }
        pid, url = await self.launcher.start({"settings": values | settings, **order})
        client = await self.stack.enter_async_context(httpx2.AsyncClient(base_url=url, timeout=WAIT_SECONDS))
        server = ServerProcess(launcher=self.launcher, pid=pid, url=url, api=ApiClient(client=client, key=self.key))
        self.stack.push_async_callback(_end, server)
        return server

    async def restart(self, *, lease_seconds: float = 10, **settings: Any) -> ServerProcess:
        """A healthy server after all others have died, and after their leases have expired."""
        await self.let_time_pass()
        return await self.start(lease_seconds=lease_seconds, **settings)

    async def let_time_pass(self) -> None:
        """Longer than the remaining time of any lease, ticket, running job or background call."""
        async with self.database.connection() as connection:
            await connection.execute(
                "UPDATE conversations SET lease_expires_at = now() - interval '1 second' WHERE lease_token IS NOT NULL"
            )
            await connection.execute(
                "UPDATE replay_items SET lease_expires_at = now() - interval '1 second' WHERE state = 'running'"
            )
            await connection.execute("UPDATE waiting_turns SET expires_at = now() - interval '1 second'")
            await connection.execute("UPDATE calls SET started_at = started_at - interval '1 hour' WHERE turn_seq < 0")
            await connection.execute(
                "UPDATE pgqueuer SET heartbeat = now() - interval '1 hour' WHERE status = 'picked'"
            )


@asynccontextmanager
async def open_fleet(
    launcher: Launcher, database: Database, options: DatabaseOptions, emulated: EmulatedProviders, tenant: Tenant
) -> AsyncIterator[Fleet]:
    _, key = await PostgresKeyRing(database).create_key(
        tenant_id=tenant.id, name="fleet", scopes=frozenset({Scope.CLIENT}), expires_at=None
    )
    async with AsyncExitStack() as stack:
        yield Fleet(
            launcher=launcher,
            options=options,
            database=database,
            emulated=emulated,
            tenant=tenant,
            key=key,
            stack=stack,
        )


async def _end(server: ServerProcess) -> None:
    # It may have died already, and the report of it may not have arrived yet.
    with suppress(ProcessLookupError):
        if not server.launcher.ending(server.pid).done():
            server.kill()
    await server.ended()
