"""The turns that run in this process.

A turn belongs to the server and not to the connection that asked for it, so it runs in a task that nobody but this
module awaits. A task that nothing refers to may be collected while it runs; this holds them all.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from server.conversation.errors import ShuttingDown

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainReport:
    """How a shutdown went."""

    finished_count: int
    cancelled_count: int


class RunningTurns:
    """Starts turns, and ends them all when the process stops."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._draining = False

    @property
    def count(self) -> int:
        """How many turns run now."""
        return len(self._tasks)

    @property
    def draining(self) -> bool:
        """Whether the process has stopped taking new turns."""
        return self._draining

    def start(self, turn: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """Raises `ShuttingDown` once draining has begun; the coroutine is closed then."""
        if self._draining:
            turn.close()
            raise ShuttingDown
        task = asyncio.create_task(turn, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def drain(self, limit_seconds: float) -> DrainReport:
        """Takes no new turns, lets the running ones finish within the limit, then cancels the rest and awaits them.

        A cancelled turn still ends in its own way: it commits what has arrived before it lets go.
        """
        self._draining = True
        if not self._tasks:
            return DrainReport(finished_count=0, cancelled_count=0)
        done, pending = await asyncio.wait(set(self._tasks), timeout=limit_seconds)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        return DrainReport(finished_count=len(done), cancelled_count=len(pending))
