"""The pool of confined worker processes for all tenants of a server: bounded, started on demand, shared fairly.

Every tenant has its own queue. A free worker goes to the tenant that occupies the fewest workers, and among those to
the one that was served longest ago. A tenant occupies at most N - 1 of N workers, so that another tenant gets one at
once, even if the first has sent many slow tasks.

The server always gets a response to a task. A worker that exceeds its time or memory is ended, and the next task gets a
new one. If a worker dies for another reason, such as a kill or a lack of memory of the machine, the task is repeated
once in a new worker, because the template may not be the cause.
"""

import asyncio
import json
import logging
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from server.conversation.errors import Internal, ShuttingDown, TemplateWorkersBusy

_START_SECONDS: Final = 30.0
_EXIT_SECONDS: Final = 1.0
_KILL_FACTOR: Final = 5
"""The kernel ends a worker after its processor time; the server kills it after this many times that, in real time."""
_TIMED_OUT: Final = -signal.SIGPROF if sys.platform != "win32" else None
_MAX_BYTES_PER_CHAR: Final = 6
"""The length of a control character in JSON."""
_FAILURE_BYTES: Final = 65_536
_IMPORT_ROOT: Final = str(Path(__file__).resolve().parents[2])
"""The directory that this package is imported from."""
_ENVIRONMENT: Final = ("LD_LIBRARY_PATH", "PYTHONHOME", "SYSTEMROOT")
"""The environment variables that an interpreter may need to start. Workers get no others, and so no secrets."""
_log = logging.getLogger("strata.templates")


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderLimits:
    """Limits of a task of a worker, and of the pool. They hold for templates and expressions from the network; of the
    server's own templates only the length of the dynamic layer is limited.
    """

    seconds: float = 2.0
    """Processor time of a task, which does not depend on the load of the machine."""
    output_chars: int = 2_000_000
    memory_bytes: int = 512 * 1024 * 1024
    """Memory of the whole process, including the interpreter."""
    workers: int = 3
    """The maximum number of processes. They are started when they are needed."""
    wait_seconds: float = 10.0
    """How long a task waits for a free worker."""


class WorkerProcess:
    """A worker of the pool: one process at most, started on demand, with one task at a time. `close` ends it."""

    def __init__(self, limits: RenderLimits) -> None:
        self._limits = limits
        self._lock = asyncio.Lock()
        self._process: Process | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The id of the process, if it runs."""
        return None if self._process is None else self._process.pid

    async def ask(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Run a task. Returns the response of the process, or a failure if it gave none.

        Raises `Internal` if no process can be started, and `ShuttingDown` after `close`.
        """
        line = json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
        async with self._lock:
            if self._is_closed:
                raise ShuttingDown
            answer = await self._ask_once(line)
            if answer is None:
                answer = await self._ask_once(line)
        return answer if answer is not None else _failure("render", "The template ended the process that rendered it.")

    async def close(self) -> None:
        """Wait for the running task, which has a time limit, and end the process."""
        self._is_closed = True
        async with self._lock:
            await self._end()

    async def _ask_once(self, line: bytes) -> Mapping[str, Any] | None:
        """Run a task once. Returns None if the process died."""
        process = await self._find_or_start()
        too_long = _failure("too_long", f"The template took longer than {self._limits.seconds:g} seconds.")
        try:
            async with asyncio.timeout(self._limits.seconds * _KILL_FACTOR):
                answer = _decode(await _exchange(process, line))
        except TimeoutError:
            await self._end(busy=True)
            return too_long
        except asyncio.CancelledError:
            # The late response would be taken for that of the next task.
            await self._end(busy=True)
            raise
        if answer is None or answer.get("failure", {}).get("kind") == "too_large":
            await self._end()
        return too_long if answer is None and process.returncode == _TIMED_OUT else answer

    async def _find_or_start(self) -> Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        await self._end()
        try:
            self._process = await self._start()
        except OSError as error:
            raise Internal("The process that renders templates cannot be started.") from error
        try:
            async with asyncio.timeout(_START_SECONDS):
                ready = _decode(await _exchange(self._process, b""))
        except TimeoutError:
            ready = None
        except asyncio.CancelledError:
            await self._end(busy=True)
            raise
        if ready is None:
            await self._end()
            raise Internal("The process that renders templates does not start.")
        return self._process

    async def _start(self) -> Process:
        limits = self._limits
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *("-s", "-P", "-m", "server.prompts.worker"),
            *(str(limits.seconds), str(limits.output_chars), str(limits.memory_bytes)),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,  # a traceback could quote a template
            limit=limits.output_chars * _MAX_BYTES_PER_CHAR + _FAILURE_BYTES,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ} | {"PYTHONPATH": _IMPORT_ROOT},
            start_new_session=True,  # not ended by Ctrl-C in the terminal of the server
        )

    async def _end(self, *, busy: bool = False) -> None:
        """End the process. One without a task ends when its input is closed; a busy one is killed."""
        process, self._process = self._process, None
        if process is None:
            return
        if not busy and process.stdin is not None:
            process.stdin.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(_EXIT_SECONDS):
                    await process.wait()
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _exchange(process: Process, line: bytes) -> bytes:
    """Send a line and read one; empty or incomplete if the process has ended."""
    if process.stdin is None or process.stdout is None:
        raise Internal("The process that renders templates has no pipes.")
    with suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(line)
        await process.stdin.drain()
    try:
        return await process.stdout.readline()
    except ValueError:  # longer than any valid response
        return b""


def _decode(line: bytes) -> dict[str, Any] | None:
    try:
        answer = json.loads(line.decode("utf-8", "surrogatepass"))
    except ValueError:
        return None
    return answer if isinstance(answer, dict) and line.endswith(b"\n") else None


def _failure(kind: str, message: str) -> dict[str, Any]:
    return {"failure": {"kind": kind, "message": message, "line": None}}


class WorkerPool:
    """The workers of a server; `close` ends their processes."""

    def __init__(self, limits: RenderLimits) -> None:
        self.limits = limits
        self._workers = [WorkerProcess(limits) for _ in range(max(1, limits.workers))]
        self._idle = list(reversed(self._workers))
        """The last one is used first, so that a server with few tasks needs one process only."""
        self._max_per_tenant = max(1, len(self._workers) - 1)
        self._waiting: dict[str, deque[asyncio.Future[WorkerProcess]]] = {}
        """The waiting tasks by tenant, oldest first."""
        self._running: Counter[str] = Counter()
        self._last_served: dict[str, int] = {}
        """The value of `_served_count` when a tenant last got a worker, for tenants that wait or occupy one."""
        self._served_count = 0
        self._is_closed = False

    @property
    def pids(self) -> tuple[int, ...]:
        """The ids of the running processes."""
        return tuple(worker.pid for worker in self._workers if worker.pid is not None)

    @property
    def busy_count(self) -> int:
        """The number of workers with a task."""
        return len(self._workers) - len(self._idle)

    @property
    def waiting_count(self) -> int:
        """The number of tasks that wait for a worker."""
        return sum(len(queue) for queue in self._waiting.values())

    async def ask(
        self, tenant_id: str, request: Mapping[str, Any], *, has_wait_limit: bool = True
    ) -> Mapping[str, Any]:
        """Run a task in a worker. Returns its response, or a failure if it gave none.

        `has_wait_limit`: False for work that no client waits for. Raises `TemplateWorkersBusy` if no worker becomes
        free in time, `Internal` if no process can be started, and `ShuttingDown` after `close`.
        """
        async with self.lend(tenant_id, self.limits.wait_seconds if has_wait_limit else None) as worker:
            return await worker.ask(request)

    async def close(self) -> None:
        """Reject the waiting tasks, wait for the running ones, which have time limits, and end the processes."""
        self._is_closed = True
        for queue in self._waiting.values():
            for future in queue:
                if not future.done():
                    future.set_exception(ShuttingDown())
        self._waiting.clear()
        await asyncio.gather(*(worker.close() for worker in self._workers))

    @asynccontextmanager
    async def lend(self, tenant_id: str, wait_seconds: float | None) -> AsyncIterator[WorkerProcess]:
        """Occupy a worker for one task. Raises `TemplateWorkersBusy` and `ShuttingDown` as `ask` does."""
        worker = await self._acquire(tenant_id, wait_seconds)
        try:
            yield worker
        finally:
            self._release(tenant_id, worker)

    async def _acquire(self, tenant_id: str, wait_seconds: float | None) -> WorkerProcess:
        if self._is_closed:
            raise ShuttingDown
        future: asyncio.Future[WorkerProcess] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant_id, deque()).append(future)
        self._dispatch()
        try:
            async with asyncio.timeout(wait_seconds):
                return await future
        except TimeoutError:
            if future.done() and not future.cancelled() and future.exception() is None:
                return future.result()  # a worker became free at the same time
            facts = {"tenant_id": tenant_id, "waiting": self.waiting_count, "seconds": wait_seconds}
            _log.warning("templates.wait_timed_out", extra=facts)
            raise TemplateWorkersBusy from None
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._release(tenant_id, future.result())
            raise
        finally:
            self._forget(tenant_id, future)

    def _release(self, tenant_id: str, worker: WorkerProcess) -> None:
        self._running[tenant_id] -= 1
        self._remove_idle(tenant_id)
        self._idle.append(worker)
        self._dispatch()

    def _forget(self, tenant_id: str, future: "asyncio.Future[WorkerProcess]") -> None:
        """Remove a task from its queue, if it is still in one."""
        future.cancel()
        queue = self._waiting.get(tenant_id)
        if queue is not None and future in queue:
            queue.remove(future)
        self._remove_idle(tenant_id)

    def _remove_idle(self, tenant_id: str) -> None:
        """Remove the entries of a tenant that neither waits nor occupies a worker."""
        if not self._waiting.get(tenant_id):
            self._waiting.pop(tenant_id, None)
            if not self._running[tenant_id]:
                self._running.pop(tenant_id, None)
                self._last_served.pop(tenant_id, None)

    def _dispatch(self) -> None:
        while self._idle and (tenant_id := self._choose()) is not None:
            future = self._waiting[tenant_id].popleft()
            if not future.done():
                self._served_count += 1
                self._last_served[tenant_id] = self._served_count
                self._running[tenant_id] += 1
                future.set_result(self._idle.pop())
            self._remove_idle(tenant_id)

    def _choose(self) -> str | None:
        """Return the tenant that gets the next worker. Of equal ones `min` returns the one that has waited longest."""
        return min(
            (tenant for tenant in self._waiting if self._running[tenant] < self._max_per_tenant),
            key=lambda tenant: (self._running[tenant], self._last_served.get(tenant, 0)),
            default=None,
        )
