"""The processes of a benchmark: started on a core of their own, and measured from outside.

The server that is measured has the first core for itself. The load generator, the upstream and Postgres share the
others: a process pins itself before it starts anything, and its children inherit that. Without a second core, or on a
system that cannot pin, nothing is pinned, and the report says so.
"""

import asyncio
import multiprocessing
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import uvloop

from server.postgres.connections import DatabaseOptions
from server.postgres.embedded.service import open_embedded
from server.postgres.migrations import migrate_up

_IDLE_CPU_SECONDS = 0.02
_IDLE_WINDOW_SECONDS = 0.25
_IDLE_LIMIT_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A process that serves, as its clients see it."""

    pid: int
    url: str
    key: str = ""

    def cpu_seconds(self) -> float:
        """The CPU time of the process and its children, those that have ended included."""
        process = psutil.Process(self.pid)
        ended = process.cpu_times()
        return (
            _read_cpu_clock(self.pid)
            + ended.children_user
            + ended.children_system
            + sum(_read_cpu_clock(child.pid) for child in process.children(recursive=True))
        )

    def memory_bytes(self) -> int:
        """The resident memory of the process and its children."""
        process = psutil.Process(self.pid)
        return sum(int(one.memory_info().rss) for one in (process, *process.children(recursive=True)))

    async def wait_until_idle(self) -> None:
        """Wait until the process has no more work in the background, so that its CPU time includes that work."""
        deadline = time.monotonic() + _IDLE_LIMIT_SECONDS
        cpu = self.cpu_seconds()
        while time.monotonic() < deadline:
            await asyncio.sleep(_IDLE_WINDOW_SECONDS)
            before, cpu = cpu, self.cpu_seconds()
            if cpu - before < _IDLE_CPU_SECONDS:
                return


def _read_cpu_clock(pid: int) -> float:
    """The CPU time of all threads of another process, in nanoseconds' resolution (Linux; elsewhere that of psutil)."""
    try:
        # The clock of a process by its id, as clock_getcpuclockid(3) computes it.
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        pass
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """Which cores the server and the rest run on. Empty: not pinned."""

    server: frozenset[int]
    load: frozenset[int]


def pin() -> Cores:
    """Move this process, and what it starts from now on, to the cores of the load generator."""
    if not hasattr(os, "sched_setaffinity"):
        return Cores(server=frozenset(), load=frozenset())
    available = sorted(os.sched_getaffinity(0))
    if len(available) == 1:
        return Cores(server=frozenset(), load=frozenset())
    cores = Cores(server=frozenset(available[:1]), load=frozenset(available[1:]))
    os.sched_setaffinity(0, cores.load)
    return cores


def _run_process(cores: frozenset[int], serve: Callable[..., Awaitable[None]], *arguments: Any) -> None:
    if cores:
        os.sched_setaffinity(0, cores)

    async def run() -> None:
        await serve(*arguments)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


@asynccontextmanager
async def in_process(
    serve: Callable[..., Awaitable[None]], *arguments: Any, cores: frozenset[int] = frozenset()
) -> AsyncIterator[Serving]:
    """Run `serve` in a process of its own until the block ends.

    `serve` gets one end of a pipe first. It sends its `Serving`, and ends when something arrives.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_run_process, args=(cores, serve, there, *arguments))
    process.start()
    # Only the child has the other end then: `recv` raises if it dies before it serves.
    there.close()
    try:
        yield await asyncio.to_thread(here.recv)
    finally:
        with suppress(OSError):  # it has died before
            here.send(None)
        await asyncio.to_thread(process.join, 30)
        if process.is_alive():
            process.kill()


async def wait_for_end(parent: Connection) -> None:
    """Wait in a process of `in_process` until it has to end."""
    await asyncio.to_thread(parent.poll, None)


@contextmanager
def open_place() -> Iterator[Path]:
    """A temporary directory that the account of an embedded Postgres may enter."""
    with TemporaryDirectory(prefix="strata-bench-") as place:
        os.chmod(place, 0o755)  # noqa: PTH101, S103  reason: Postgres runs under another account if this one is root
        yield Path(place)


@asynccontextmanager
async def open_database() -> AsyncIterator[str]:
    """A new embedded Postgres with the current schema, until the block ends; gives its URL."""
    with open_place() as place, open_embedded(place / "data") as embedded:
        await migrate_up(DatabaseOptions(url=embedded.url))
        yield embedded.url


def raise_file_limit() -> None:
    """Allow this process and its children as many open files as the system permits."""
    import resource  # noqa: PLC0415  reason: not on Windows

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
