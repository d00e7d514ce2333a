"""Worker processes are shared fairly between tenants, and waiting for one has a limit."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.conversation.errors import ShuttingDown, TemplateWorkersBusy
from server.prompts.worker_pool import RenderLimits, WorkerPool

ENDLESS = {
    "task": "render",
    "source": "{% for a in range(10 ** 5) %}{% for b in range(10 ** 5) %}{% endfor %}{% endfor %}",
    "arguments": {},
}
QUICK = {"task": "render", "source": "{{ 6 * 7 }}", "arguments": {}}
HOURS = 36_000.0


@asynccontextmanager
async def open_pool(**limits: Any) -> AsyncIterator[WorkerPool]:
    """Its tasks run and wait without a limit, unless the test sets one."""
    pool = WorkerPool(RenderLimits(**{"seconds": HOURS, "wait_seconds": HOURS} | limits))
    tasks: set[asyncio.Task[Any]] = set()
    try:
        yield pool
    finally:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            if task.get_name() == "asked":
                task.cancel()
                tasks.add(task)
        await asyncio.gather(*tasks, return_exceptions=True)
        await pool.close()


def ask(pool: WorkerPool, tenant_id: str, request: dict[str, Any]) -> "asyncio.Task[Any]":
    return asyncio.create_task(pool.ask(tenant_id, request), name="asked")


async def until(condition: Callable[[], bool]) -> None:
    """Poll without a limit."""
    while not condition():  # noqa: ASYNC110  reason: there is no event to wait for
        await asyncio.sleep(0.005)


async def test_endless_templates_of_one_tenant_do_not_delay_another() -> None:
    async with open_pool(workers=2) as pool:
        endless = [ask(pool, "slow", ENDLESS) for _ in range(8)]
        await until(lambda: pool.busy_count == 1 and len(pool.pids) == 1)
        assert pool.waiting_count == 7

        answers = [await pool.ask(tenant_id, QUICK) for tenant_id in ("quick", "other", "quick")]

        assert answers == [{"text": "42"}] * 3
        assert not any(task.done() for task in endless)
        assert (pool.busy_count, pool.waiting_count) == (1, 7)


async def test_a_tenant_can_use_all_workers_but_one() -> None:
    async with open_pool(workers=3) as pool:
        for _ in range(5):
            ask(pool, "slow", ENDLESS)
        await until(lambda: len(pool.pids) == 2)

        assert (pool.busy_count, pool.waiting_count) == (2, 3)
        assert await pool.ask("quick", QUICK) == {"text": "42"}


async def test_with_one_worker_the_tenants_alternate() -> None:
    """Killing the worker twice ends its current task."""
    async with open_pool(workers=1) as pool:
        order: list[str] = []
        for tenant_id in ("a", "a", "a", "b", "b", "c"):
            task = ask(pool, tenant_id, ENDLESS)
            task.add_done_callback(partial(_note, order, tenant_id))
        await until(lambda: pool.waiting_count == 5)
        for done in range(6):
            seen: set[int] = set()
            while len(order) == done:
                seen |= _kill_other_than(pool, seen)
                await asyncio.sleep(0.005)

        assert order == ["a", "b", "c", "a", "b", "a"]


def _note(order: list[str], tenant_id: str, _: "asyncio.Task[Any]") -> None:
    order.append(tenant_id)


def _kill_other_than(pool: WorkerPool, seen: set[int]) -> set[int]:
    pids = set(pool.pids) - seen
    for pid in pids:
        try:
            psutil.Process(pid).kill()
        except psutil.NoSuchProcess:
            continue
    return pids


async def test_waiting_has_a_limit_and_does_not_affect_later_tasks() -> None:
    async with open_pool(workers=1, wait_seconds=0.01) as pool:
        endless = ask(pool, "slow", ENDLESS)
        await until(lambda: len(pool.pids) == 1)

        with pytest.raises(TemplateWorkersBusy) as caught:
            await pool.ask("quick", QUICK)
        assert caught.value.code == "template_workers_busy"
        assert pool.waiting_count == 0

        patient = asyncio.create_task(pool.ask("quick", QUICK, has_wait_limit=False), name="asked")
        await until(lambda: pool.waiting_count == 1)
        endless.cancel()
        assert await patient == {"text": "42"}


async def test_a_task_that_is_cancelled_while_waiting_leaves_the_queue() -> None:
    async with open_pool(workers=1) as pool:
        ask(pool, "slow", ENDLESS)
        waiting = [ask(pool, tenant_id, QUICK) for tenant_id in ("a", "b", "a")]
        await until(lambda: pool.waiting_count == 3)

        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

        assert pool.waiting_count == 0


async def test_closing_refuses_waiting_tasks_and_leaves_no_process() -> None:
    pool = WorkerPool(RenderLimits(workers=2, seconds=0.2, wait_seconds=HOURS))
    tasks = [ask(pool, tenant_id, ENDLESS) for tenant_id in ("a", "b", "a", "b")]
    await until(lambda: len(pool.pids) == 2)
    pids = pool.pids

    await pool.close()

    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(answer, ShuttingDown) for answer in found[2:]] == [True, True]
    assert [answer["failure"]["kind"] for answer in found[:2] if isinstance(answer, dict)] == ["too_long"] * 2
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(ShuttingDown):
        await pool.ask("a", QUICK)


class Borrowers:
    """Tasks of several tenants that keep their workers until the test releases them, without any process."""

    def __init__(self, workers: int) -> None:
        self.pool = WorkerPool(RenderLimits(workers=workers))
        self.share = max(1, workers - 1)
        self.workers = workers
        self.running: list[tuple[str, asyncio.Event]] = []
        self.waiting: dict[asyncio.Task[None], str] = {}
        self.passed_by: dict[str, set[str]] = {}
        """For each tenant that waits for its first worker: the tenants that have got one meanwhile."""
        self.tasks: list[asyncio.Task[None]] = []

    def ask(self, tenant_id: str) -> None:
        task = asyncio.create_task(self._work(tenant_id))
        self.tasks.append(task)
        self.waiting[task] = tenant_id
        if not self.count(tenant_id):
            self.passed_by.setdefault(tenant_id, set())

    def finish(self, number: int) -> None:
        if self.running:
            self.running[number % len(self.running)][1].set()

    def cancel(self, number: int) -> None:
        if self.waiting:
            task = list(self.waiting)[number % len(self.waiting)]
            tenant_id = self.waiting.pop(task)
            task.cancel()
            if tenant_id not in self.waiting.values():
                self.passed_by.pop(tenant_id, None)

    def count(self, tenant_id: str) -> int:
        return sum(name == tenant_id for name, _ in self.running)

    def check(self) -> None:
        assert self.pool.busy_count == len(self.running)
        assert self.pool.waiting_count == len(self.waiting)
        assert all(self.count(name) <= self.share for name, _ in self.running)
        if len(self.running) < self.workers:
            assert all(self.count(name) == self.share for name in self.waiting.values()), "no worker rests"

    async def _work(self, tenant_id: str) -> None:
        finish = asyncio.Event()
        async with self.pool.lend(tenant_id, None):
            self.running.append((tenant_id, finish))
            task = asyncio.current_task()
            assert task is not None
            del self.waiting[task]
            self.passed_by.pop(tenant_id, None)
            for those in self.passed_by.values():
                assert tenant_id not in those, "nobody gets two workers while another waits for its first"
                those.add(tenant_id)
            await finish.wait()
            self.running.remove((tenant_id, finish))


@given(
    workers=st.integers(1, 4),
    steps=st.lists(st.tuples(st.sampled_from(["ask", "ask", "finish", "cancel"]), st.integers(0, 3)), max_size=40),
)
async def test_no_tenant_uses_more_than_its_share(workers: int, steps: list[tuple[str, int]]) -> None:
    borrowers = Borrowers(workers)
    for step, number in steps:
        match step:
            case "ask":
                borrowers.ask(f"tenant {number}")
            case "finish":
                borrowers.finish(number)
            case _:
                borrowers.cancel(number)
        for _ in range(5):
            await asyncio.sleep(0)
        borrowers.check()
    for task in borrowers.tasks:
        task.cancel()
    await asyncio.gather(*borrowers.tasks, return_exceptions=True)

    assert (borrowers.pool.busy_count, borrowers.pool.waiting_count) == (0, 0)
    await borrowers.pool.close()
