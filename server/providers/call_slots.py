"""How many calls to providers one process makes at the same time.

Every call takes a slot before it leaves and gives it back when its connection is closed. Waiting for one is first come,
first served, and bounded. A turn reserves its slot before its input is accepted, so that a server without a free one
refuses the request, and nothing of it is durable.
"""

import asyncio
from collections import deque
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from server.conversation.errors import CallLimitReached

_RETRY_AFTER_SECONDS: Final = 5
_RESERVED: ContextVar["Reservation | None"] = ContextVar("strata_reserved_call_slot", default=None)


class CallSlots:
    """The slots of one process. Numbers are public for metrics."""

    def __init__(self, limit: int = 2000, wait_seconds: float = 10.0) -> None:
        self.limit = limit
        self.in_use = 0
        """By calls, and by reservations that no call has used yet."""
        self.refused_count = 0
        self._wait_seconds = wait_seconds
        self._waiters: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """How many wait for a slot now."""
        return len(self._waiters)

    async def take(self) -> None:
        """A slot for one call: the one that this task has reserved, or the next that is free.

        Raises `CallLimitReached` if none becomes free in time. Each call of it is followed by one of `release`.
        """
        reservation = _RESERVED.get()
        if reservation is not None and reservation.use():
            return
        await self._take()

    def release(self) -> None:
        """Return a slot. The caller that has waited longest gets it."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self.in_use -= 1

    async def reserve(self) -> "Reservation":
        """A slot for the first call that is made by this task, or by a task that it starts.

        Raises `CallLimitReached`. Drop the reservation when the task needs no call any more.
        """
        await self._take()
        reservation = Reservation(self)
        _RESERVED.set(reservation)
        return reservation

    async def _take(self) -> None:
        if self.in_use < self.limit:
            self.in_use += 1
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await asyncio.wait({waiter}, timeout=self._wait_seconds)
        except asyncio.CancelledError:
            if waiter.done():
                self.release()
            raise
        finally:
            if not waiter.done():
                self._waiters.remove(waiter)
        if not waiter.done():
            self.refused_count += 1
            raise CallLimitReached(limit=self.limit, retry_after_seconds=_RETRY_AFTER_SECONDS)


@dataclass(slots=True)
class Reservation:
    """A slot that is held for a call to come."""

    _slots: CallSlots
    _held: bool = True

    def use(self) -> bool:
        """Hands the slot to a call, which releases it. False if it was used or dropped before."""
        held, self._held = self._held, False
        return held

    def drop(self) -> None:
        """Gives the slot back unless a call has used it."""
        if self.use():
            self._slots.release()
