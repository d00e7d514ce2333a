"""Worker processes for all tenants of a server: at most so many, started when they are needed, shared fairly.

Every tenant has its own queue. A free worker goes to the tenant that occupies the fewest workers, and among those to
the one that was served longest ago. A tenant occupies at most N - 1 of N workers, so that another tenant gets one at
once, however many slow tasks the first one has sent.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from server.conversation.errors import ShuttingDown, TemplateWorkersBusy
from server.prompts.limits import RenderLimits
from server.prompts.worker_process import WorkerProcess

_log = logging.getLogger("strata.templates")


class WorkerPool:
    """Owns the processes; `close` ends them."""

    def __init__(self, limits: RenderLimits) -> None:
        self.limits = limits
        self._workers = [WorkerProcess(limits) for _ in range(max(1, limits.workers))]
        self._idle = list(reversed(self._workers))
        """The last one is taken first, so that a quiet server needs one process only."""
        self._max_per_tenant = max(1, len(self._workers) - 1)
        self._waiting: dict[str, deque[asyncio.Future[WorkerProcess]]] = {}
        """By tenant, the one that began to wait first first."""
        self._running: Counter[str] = Counter()
        self._last_served: dict[str, int] = {}
        """When a tenant got its last worker, as a count of all, for tenants that wait or occupy one."""
        self._served_count = 0
        self._is_closed = False

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the processes that run."""
        return tuple(worker.pid for worker in self._workers if worker.pid is not None)

    @property
    def busy_count(self) -> int:
        """Workers that have a task."""
        return len(self._workers) - len(self._idle)

    @property
    def waiting_count(self) -> int:
        """Tasks that wait for a worker."""
        return sum(len(queue) for queue in self._waiting.values())

    async def ask(
        self, tenant_id: str, request: Mapping[str, Any], *, has_wait_limit: bool = True
    ) -> Mapping[str, Any]:
        """The answer of a worker to a task, or the failure that stands for none.

        `has_wait_limit`: False for work that no client waits for. Raises `TemplateWorkersBusy` after waiting for too
        long, `Internal` if no worker can be started and `ShuttingDown` after `close`.
        """
        async with self.lend(tenant_id, self.limits.wait_seconds if has_wait_limit else None) as worker:
            return await worker.ask(request)

    async def close(self) -> None:
        """Refuses the tasks that wait, waits for those that run, which have their limits, and ends the processes."""
        self._is_closed = True
        for queue in self._waiting.values():
            for future in queue:
                if not future.done():
                    future.set_exception(ShuttingDown())
        self._waiting.clear()
        await asyncio.gather(*(worker.close() for worker in self._workers))

    @asynccontextmanager
    async def lend(self, tenant_id: str, wait_seconds: float | None) -> AsyncIterator[WorkerProcess]:
        """A worker for one task. Raises what `ask` raises while it waits."""
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
                return future.result()  # a worker came free in the same moment
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
        self._tidy(tenant_id)
        self._idle.append(worker)
        self._dispatch()

    def _forget(self, tenant_id: str, future: "asyncio.Future[WorkerProcess]") -> None:
        """Takes a task out of its queue; one that has got a worker is in none any more."""
        future.cancel()
        queue = self._waiting.get(tenant_id)
        if queue is not None and future in queue:
            queue.remove(future)
        self._tidy(tenant_id)

    def _tidy(self, tenant_id: str) -> None:
        """Keeps nothing of a tenant that neither waits nor occupies a worker."""
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
            self._tidy(tenant_id)

    def _choose(self) -> str | None:
        """The tenant that gets the next worker. `min` takes the first of equals, which has waited longest."""
        return min(
            (tenant for tenant in self._waiting if self._running[tenant] < self._max_per_tenant),
            key=lambda tenant: (self._running[tenant], self._last_served.get(tenant, 0)),
            default=None,
        )
