"""The turns that run in this process.

A turn belongs to the server and not to the connection that requested it, so it runs in a task of its own. asyncio keeps
only weak references to tasks; this module keeps them until they end.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from server.conversation.errors import ShuttingDown

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainReport:
    """The turns that ended during a shutdown."""

    finished_count: int
    cancelled_count: int


class RunningTurns:
    """Starts turns, and ends all of them when the process stops."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._draining = False

    @property
    def count(self) -> int:
        """The number of running turns."""
        return len(self._tasks)

    @property
    def draining(self) -> bool:
        """Whether the process accepts no new turns any more."""
        return self._draining

    def start(self, turn: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """Run a turn in a task. Raises `ShuttingDown` after draining has begun; then the coroutine is closed."""
        if self._draining:
            turn.close()
            raise ShuttingDown
        task = asyncio.create_task(turn, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def drain(self, limit_seconds: float) -> DrainReport:
        """Accept no new turns, wait within the limit for the running ones, then cancel the rest and wait for them.

        A cancelled turn stores what has arrived before it ends.
        """
        self._draining = True
        if not self._tasks:
            return DrainReport(finished_count=0, cancelled_count=0)
        done, pending = await asyncio.wait(set(self._tasks), timeout=limit_seconds)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        return DrainReport(finished_count=len(done), cancelled_count=len(pending))
