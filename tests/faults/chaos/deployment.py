"""The deployment of a chaos run: a primary with a standby, servers, workers, and everything that can be broken.

Each server has its own proxies to both databases, so that one server can be disconnected while the others continue; all
of them reach the providers through proxies too. Servers and workers are forks of a launcher (`crashing_server`), some
of them under a clock that can be set.
"""

import asyncio
import os
import random
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import asyncpg
import psutil

from server.conversation.api_key import Scope
from server.postgres.access.key_ring import PostgresKeyRing
from server.postgres.connections import DatabaseOptions
from server.postgres.engine import Database
from server.postgres.migrations import migrate_up
from tests.faults.chaos.journal import Journal
from tests.faults.chaos.providers import ChaosProviders
from tests.faults.server_fleet import Launcher, open_launcher
from tests.support.external_postgres import PASSWORD, USER, Cluster, Site, come_true, open_site
from tests.support.wire_proxy import TcpProxy, WireProxy

LEASE_SECONDS = 2.0
BALLAST_BYTES = 1 << 20
DISK_MEGABYTES = 1500


@dataclass(slots=True, kw_only=True, eq=False)
class Node:
    """A server or worker process, and its proxies to the databases."""

    number: int
    works: bool
    launcher: Launcher
    pid: int = 0
    url: str = ""
    proxies: list[WireProxy] = field(default_factory=list)
    stopped: bool = False
    """By SIGSTOP."""

    def is_up(self) -> bool:
        return bool(self.pid) and not self.launcher.ending(self.pid).done()

    def send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            if self.is_up():
                os.kill(self.pid, number)


class Deployment:
    """Everything that runs, with one method for each kind of fault."""

    def __init__(
        self,
        site: Site,
        journal: Journal,
        providers: ChaosProviders,
        launchers: Sequence[Launcher],
        clock: Path | None,
        *,
        has_small_disk: bool,
    ) -> None:
        self._site = site
        self.journal = journal
        self._providers = providers
        self._launchers = launchers
        self._clock = clock
        self._has_small_disk = has_small_disk
        self._numbers = count(1)
        self.primary: Cluster = site.primary()
        self.standby: Cluster | None = None
        self.nodes: list[Node] = []
        self.wires: list[TcpProxy] = []
        self.kills = 0
        self.key = ""
        self.assistants: dict[str, str] = {}
        self._repairing = asyncio.Lock()

    def urls(self) -> Sequence[str]:
        """The URLs of the servers that should be up; some of them may be dead or frozen."""
        return [node.url for node in self.nodes if node.url]

    @property
    def left_out(self) -> Sequence[str]:
        """Kinds of fault that this machine does not support."""
        clock = [] if self._clock is not None else ["clock jumps, which need libfaketime"]
        return clock + ([] if self._has_small_disk else ["a full disk, which needs root"])

    @property
    def database_url(self) -> str:
        return self.primary.url("strata")

    async def prepare(self) -> None:
        """A migrated database, a tenant with a key, and proxies to the providers."""
        await self.primary.fetch("CREATE DATABASE strata")
        await migrate_up(DatabaseOptions(url=self.database_url))
        database = Database(DatabaseOptions(url=self.database_url))
        ring = PostgresKeyRing(database)
        tenant = await ring.create_tenant("chaos")
        _, self.key = await ring.create_key(
            tenant_id=tenant.id, name="chaos", scopes=frozenset({Scope.CLIENT}), expires_at=None
        )
        await database.close()
        for url in self._providers.urls.values():
            proxy = TcpProxy(url)
            await proxy.accept()
            self.wires.append(proxy)

    async def add_standby(self) -> None:
        """From then on commits wait for the standby: what was acknowledged survives the loss of the primary."""
        self.standby = self._site.standby(self.primary)
        await self.primary.fetch("ALTER SYSTEM SET synchronous_standby_names = '*'")
        await self.primary.fetch("SELECT pg_reload_conf()")

        async def in_step() -> bool:
            standbys = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'"
            return bool(await self.primary.fetch(standbys) == 1)

        await come_true(in_step)

    async def start(self, *, works: bool = False) -> Node:
        """Start another server or worker."""
        number = next(self._numbers)
        node = Node(number=number, works=works, launcher=self._launchers[number % len(self._launchers)])
        self.nodes.append(node)
        await self._launch(node)
        return node

    async def kill(self, node: Node) -> None:
        """Kill it with SIGKILL, and start another one in its place."""
        self.kills += 1
        self.journal.write("fault", kind="kill worker" if node.works else "kill server", detail=node.number)
        node.send(signal.SIGKILL)
        with suppress(TimeoutError):
            async with asyncio.timeout(10):
                await asyncio.shield(node.launcher.ending(node.pid))
        await self._launch(node)

    async def freeze(self, node: Node, seconds: float) -> None:
        """Stop it with SIGSTOP for longer than a lease lasts."""
        self.journal.write("fault", kind="freeze", detail=node.number)
        node.stopped = True
        node.send(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        node.send(signal.SIGCONT)
        node.stopped = False

    async def cut_database(self, node: Node) -> None:
        self.journal.write("fault", kind="cut database", detail=node.number)
        for proxy in node.proxies:
            proxy.cut()

    async def swallow_database(self, node: Node, seconds: float) -> None:
        self.journal.write("fault", kind="black hole to the database", detail=node.number)
        for proxy in node.proxies:
            proxy.swallow()
        await asyncio.sleep(seconds)
        for proxy in node.proxies:
            proxy.cut()
            proxy.flow()

    async def cut_provider(self, wire: TcpProxy) -> None:
        self.journal.write("fault", kind="cut provider")
        wire.cut()

    async def swallow_provider(self, wire: TcpProxy, seconds: float) -> None:
        self.journal.write("fault", kind="black hole to the provider")
        wire.swallow()
        await asyncio.sleep(seconds)
        wire.flow()

    async def kill_database(self) -> None:
        """SIGKILL of every process of the primary; it restarts with what its log contains."""
        async with self._repairing:
            self.kills += 1
            self.journal.write("fault", kind="kill Postgres")
            await asyncio.to_thread(self.primary.kill)
            await asyncio.to_thread(self.primary.start)

    async def fail_over(self) -> None:
        """The primary dies permanently and its standby takes over; a new standby follows."""
        async with self._repairing:
            if self.standby is None:
                return
            self.kills += 1
            self.journal.write("fault", kind="failover")
            await asyncio.to_thread(self.primary.kill)
            shutil.rmtree(self.primary.data)
            self.primary, self.standby = self.standby, None
            assert await self.primary.fetch("SELECT pg_promote(true)")
            await self._point_to_databases()
            await self.add_standby()
            await self._point_to_databases()

    async def fill_disk(self, seconds: float) -> None:
        """No data can be written for a while; the database may stop because of it, and is started again."""
        async with self._repairing:
            self.journal.write("fault", kind="full disk")
            ballast = self._site.base / "ballast"
            if not self._has_small_disk:
                return
            with suppress(OSError), ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(b"\0" * BALLAST_BYTES)
            await asyncio.sleep(seconds)
            ballast.unlink()
            # Either may have stopped because of it, and commits would wait for a stopped standby.
            await self._stop(self.standby)
            if not await self._database_answers():
                await self._stop(self.primary)
                await asyncio.to_thread(self.primary.start)
            if self.standby is not None:
                shutil.rmtree(self.standby.data)
                await self.primary.fetch("ALTER SYSTEM RESET synchronous_standby_names")
                await self.primary.fetch("SELECT pg_reload_conf()")
                await self.add_standby()
                await self._point_to_databases()

    async def move_clock(self, rng: random.Random) -> None:
        """The clock of some processes jumps, forwards or backwards."""
        if self._clock is None:
            return
        offset = rng.choice((-86_400, -3_600, -30, 0, 30, 3_600, 86_400, 40_000_000))
        self.journal.write("fault", kind="clock jump", detail=offset)
        self._clock.write_text(f"{offset:+d}")

    async def calm(self) -> None:
        """Start everything, and remove all obstacles."""
        async with self._repairing:
            for wire in self.wires:
                wire.flow()
            for node in self.nodes:
                node.send(signal.SIGCONT)
                for proxy in node.proxies:
                    proxy.flow()
                if not node.is_up():
                    await self._launch(node)

    async def close(self) -> None:
        for node in self.nodes:
            node.send(signal.SIGCONT)
            node.send(signal.SIGKILL)
        for proxy in [*self.wires, *(proxy for node in self.nodes for proxy in node.proxies)]:
            await proxy.close()

    async def _launch(self, node: Node) -> None:
        """Retry until it runs: a start fails while the database is unavailable."""
        while True:
            await self._give_proxies(node)
            try:
                # Without the pid it is neither used nor signalled meanwhile.
                node.pid, node.url = 0, ""
                node.pid, node.url = await node.launcher.start(self._order(node))
            except (AssertionError, TimeoutError):
                await asyncio.sleep(0.3)
            else:
                return

    def _order(self, node: Node) -> dict[str, Any]:
        hosts = ",".join(f"127.0.0.1:{proxy.port}" for proxy in node.proxies)
        settings = {
            "database_url": f"postgresql://{USER}:{PASSWORD}@{hosts}/strata?sslmode=disable",
            "gemini_base_url": f"http://127.0.0.1:{self.wires[0].port}",
            "anthropic_base_url": f"http://127.0.0.1:{self.wires[1].port}",
            "lease_seconds": LEASE_SECONDS,
            "flush_seconds": 0.1,
            "database_pool_size": 5,
            "database_connect_seconds": 2,
            "database_statement_seconds": 3,
            "provider_silence_seconds": 4,
            "turn_retry_seconds": 5,
            "shutdown_limit_seconds": 1,
            "worker_inside": False,
            "log_format": "json",
            "log_level": "error",
        }
        return {"settings": settings, "works": node.works, "crash_at": None}

    async def _give_proxies(self, node: Node) -> None:
        wanted = [cluster.url("strata") for cluster in (self.primary, self.standby) if cluster is not None]
        if [proxy.upstream_url for proxy in node.proxies] == wanted:
            return
        for proxy in node.proxies:
            await proxy.close()
        node.proxies = [WireProxy(url) for url in wanted]
        for proxy in node.proxies:
            await proxy.accept()

    async def _point_to_databases(self) -> None:
        """Point the addresses of the servers at the current primary and standby."""
        clusters = [self.primary, self.standby or self.primary]
        for node in self.nodes:
            for proxy, cluster in zip(node.proxies, clusters, strict=False):
                proxy.upstream_url = cluster.url("strata")
                proxy.cut()

    async def _stop(self, cluster: Cluster | None) -> None:
        """Also start one that has stopped."""
        if cluster is not None:
            with suppress(FileNotFoundError, IndexError, OSError, psutil.Error):
                await asyncio.to_thread(cluster.kill)
            cluster.stop()

    async def _database_answers(self) -> bool:
        try:
            async with asyncio.timeout(5):
                connection = await asyncpg.connect(self.database_url)
                try:
                    await connection.fetchval("SELECT 1")
                finally:
                    await connection.close()
        except (OSError, TimeoutError, asyncpg.PostgresError):
            return False
        return True


def find_faketime() -> Path | None:
    """The library that gives a process its own clock, if the machine has it."""
    return next(iter(Path("/usr/lib").glob("*/faketime/libfaketime.so.1")), None)


@contextmanager
def small_disk(directory: Path, megabytes: int) -> Iterator[bool]:
    """A separate file system for the directory. False if it is not available, as without root."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=0755", "tmpfs", str(directory)]
    mounted = os.geteuid() == 0 and subprocess.run(command, check=False, capture_output=True).returncode == 0
    directory.chmod(0o755)
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(directory)], check=True)


@asynccontextmanager
async def open_deployment(
    journal: Journal, providers: ChaosProviders, *, servers: int, workers: int, with_standby: bool
) -> AsyncIterator[Deployment]:
    async with AsyncExitStack() as stack:
        log = stack.enter_context((journal.directory / "servers.log").open("ab"))
        launchers = [await stack.enter_async_context(open_launcher(log=log))]
        clock, library = None, find_faketime()
        if library is not None:
            clock = journal.directory / "clock"
            clock.write_text("+0")
            environment = {
                "LD_PRELOAD": str(library),
                "FAKETIME_TIMESTAMP_FILE": str(clock),
                "FAKETIME_NO_CACHE": "1",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            }
            launchers.append(await stack.enter_async_context(open_launcher(environment, log)))
        disk = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="strata-chaos-disk-")))
        has_small_disk = stack.enter_context(small_disk(disk, DISK_MEGABYTES))
        site = stack.enter_context(open_site(disk))
        deployment = Deployment(site, journal, providers, launchers, clock, has_small_disk=has_small_disk)
        stack.push_async_callback(deployment.close)
        await deployment.prepare()
        if with_standby:
            await deployment.add_standby()
        for _ in range(servers):
            await deployment.start()
        for _ in range(workers):
            await deployment.start(works=True)
        yield deployment
