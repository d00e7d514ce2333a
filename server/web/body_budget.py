"""A limit for the bytes of request bodies that one process reads at the same time, and for the time that a body takes.

A body is read and decoded before its request is handled, so its bytes are in memory several times. A body larger than
`FREE_BYTES` takes its `content-length` from the budget before more of it is read, a body of unknown length the largest
allowed size. The bytes are returned when the answer begins. Waiting is first come, first served, and bounded.
"""

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Final

from server.conversation.errors import BodyBudgetExhausted, BodyTimedOut

FREE_BYTES: Final = 64 * 1024
"""Bodies up to this size need no budget: the HTTP server buffers as much for every connection."""
MIN_BYTES_PER_SECOND: Final = 16 * 1024
"""How fast a body has to arrive after the time that every body is given."""


class BodyBudget:
    """The budget of one process. Its counters are read by metrics."""

    def __init__(
        self,
        limit_bytes: int = 256 * 1024 * 1024,
        *,
        max_body_bytes: int = 32 * 1024 * 1024,
        wait_seconds: float = 10.0,
        body_seconds: float = 30.0,
    ) -> None:
        """`max_body_bytes`: the largest single body. `body_seconds`: the time that every body is given."""
        self.max_body_bytes = min(max_body_bytes, limit_bytes)
        self.body_seconds = body_seconds
        self.in_use_bytes = 0
        self.refused_count = 0
        self._limit_bytes = limit_bytes
        self._wait_seconds = wait_seconds
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def waiting(self) -> int:
        """Number of bodies that wait to be read."""
        return len(self._waiters)

    async def take(self, size: int) -> None:
        """Take bytes from the budget. Raises `BodyBudgetExhausted` if they do not become available in time."""
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
        """Return bytes to the budget."""
        self.in_use_bytes -= size
        self._serve()

    def _serve(self) -> None:
        while self._waiters and self.in_use_bytes + self._waiters[0][0] <= self._limit_bytes:
            size, waiter = self._waiters.popleft()
            self.in_use_bytes += size
            waiter.set_result(None)


class BodyIntake:
    """The body of one request while it is received."""

    __slots__ = ("_budget", "_deadline", "_received_bytes", "_size", "_taken_bytes", "pending")

    def __init__(self, budget: BodyBudget, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self._budget = budget
        self._size: int | None = 0
        """The `content-length`; None if there is none."""
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
        """Whether more of the body may arrive."""

    async def prepare(self) -> float:
        """Take the size of the body from the budget. Returns the deadline of its next piece, in loop time.

        Raises `BodyBudgetExhausted`.
        """
        size = self._budget.max_body_bytes if self._size is None else min(self._size, self._budget.max_body_bytes)
        large = self._received_bytes > FREE_BYTES if self._size is None else self._size > FREE_BYTES
        if large and not self._taken_bytes:
            await self._budget.take(size)
            self._taken_bytes = size
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + self._budget.body_seconds
        return self._deadline + self._received_bytes / MIN_BYTES_PER_SECOND

    def arrived(self, size: int, *, more: bool) -> None:
        """Record a piece of the body."""
        self._received_bytes += size
        self.pending = more

    def time_out(self) -> BodyTimedOut:
        """Return the error of a body that did not arrive in time."""
        self.pending = False
        return BodyTimedOut(received_bytes=self._received_bytes)

    def release(self) -> None:
        """Return what was taken to the budget. May be called more than once."""
        taken, self._taken_bytes = self._taken_bytes, 0
        if taken:
            self._budget.release(taken)
