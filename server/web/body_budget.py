"""How many bytes of request bodies one process reads at the same time, and how long a client may take to send one.

A body is read whole and decoded before its request is worked on, so its bytes are in memory several times. A body that
is larger than `FREE_BYTES` takes its announced length from the budget before any more of it is read, one of unknown
length the largest that is allowed; it gives them back when its answer begins. Waiting is first come, first served, and
bounded.
"""

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Final

from server.conversation.errors import BodyBudgetExhausted, BodyTimedOut

FREE_BYTES: Final = 64 * 1024
"""Bodies up to this size need no budget: the HTTP server buffers as much for every connection."""
MIN_BYTES_PER_SECOND: Final = 16 * 1024
"""How fast a body has to arrive after the time that every body has."""


class BodyBudget:
    """The budget of one process. Numbers are public for metrics."""

    def __init__(
        self,
        limit_bytes: int = 256 * 1024 * 1024,
        *,
        largest_bytes: int = 32 * 1024 * 1024,
        wait_seconds: float = 10.0,
        body_seconds: float = 30.0,
    ) -> None:
        """`largest_bytes`: the largest single body. `body_seconds`: the time that every body has to arrive."""
        self.largest_bytes = min(largest_bytes, limit_bytes)
        self.body_seconds = body_seconds
        self.in_use_bytes = 0
        self.refused_count = 0
        self._limit_bytes = limit_bytes
        self._wait_seconds = wait_seconds
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def waiting(self) -> int:
        """How many bodies wait to be read."""
        return len(self._waiters)

    async def take(self, size: int) -> None:
        """Takes the bytes from the budget. Raises `BodyBudgetExhausted` if there are not enough in time."""
        if not self._waiters and self.in_use_bytes + size <= self._limit_bytes:
            self.in_use_bytes += size
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((size, waiter))
        try:
            await asyncio.wait({waiter}, timeout=self._wait_seconds)
        except asyncio.CancelledError:
            if waiter.done():
                self.release(size)
            raise
        finally:
            if not waiter.done():
                self._waiters.remove((size, waiter))
                self._serve()
        if not waiter.done():
            self.refused_count += 1
            raise BodyBudgetExhausted

    def release(self, size: int) -> None:
        """Gives bytes back."""
        self.in_use_bytes -= size
        self._serve()

    def _serve(self) -> None:
        while self._waiters and self.in_use_bytes + self._waiters[0][0] <= self._limit_bytes:
            size, waiter = self._waiters.popleft()
            self.in_use_bytes += size
            waiter.set_result(None)


class BodyIntake:
    """The body of one request on its way in."""

    __slots__ = ("_budget", "_deadline", "_received_bytes", "_size", "_taken_bytes", "pending")

    def __init__(self, budget: BodyBudget, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self._budget = budget
        self._size: int | None = 0
        """As announced; None if it is not."""
        for name, value in headers:
            if name == b"content-length" and value.isdigit():
                self._size = int(value)
            elif name == b"transfer-encoding":
                self._size = None
                break
        self._received_bytes = 0
        self._taken_bytes = 0
        self._deadline: float | None = None
        self.pending = self._size != 0
        """Whether more of the body may come."""

    async def prepare(self) -> float:
        """Takes what the body needs from the budget. Returns until when its next piece has to arrive, in loop time.

        Raises `BodyBudgetExhausted`.
        """
        size = self._budget.largest_bytes if self._size is None else min(self._size, self._budget.largest_bytes)
        large = self._received_bytes > FREE_BYTES if self._size is None else self._size > FREE_BYTES
        if large and not self._taken_bytes:
            await self._budget.take(size)
            self._taken_bytes = size
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + self._budget.body_seconds
        return self._deadline + self._received_bytes / MIN_BYTES_PER_SECOND

    def arrived(self, size: int, *, more: bool) -> None:
        """Notes a piece of the body."""
        self._received_bytes += size
        self.pending = more

    def time_out(self) -> BodyTimedOut:
        """The error of a body that did not arrive in time."""
        self.pending = False
        return BodyTimedOut(received_bytes=self._received_bytes)

    def release(self) -> None:
        """Gives back what was taken. May be called more than once."""
        taken, self._taken_bytes = self._taken_bytes, 0
        if taken:
            self._budget.release(taken)
