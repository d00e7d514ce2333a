"""Putting jobs into the queue, from whoever has a database connection."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from typing import Any, TypeAlias

from pgqueuer.adapters.drivers.asyncpg import AsyncpgDriver

from server.jobs.queue import TENANT, build_queries

Borrow: TypeAlias = Callable[[], AbstractAsyncContextManager[Any]]
"""An asyncpg connection for as long as the block lasts. Raises `DatabaseUnavailable`, also for errors within it."""


class JobSender:
    """Queues jobs."""

    def __init__(self, borrow: Borrow) -> None:
        self._borrow = borrow

    async def send(
        self, name: str, payload: bytes, *, tenant_id: str, dedupe_key: str, delay_seconds: float = 0.0
    ) -> bool:
        """Whether it was queued: not where one of the same key waits or runs. Raises `DatabaseUnavailable`.

        `tenant_id` says whose job it is, for those who look at the queue.
        """
        async with self._borrow() as connection:
            queued = await build_queries(AsyncpgDriver(connection)).enqueue(
                name,
                payload,
                execute_after=timedelta(seconds=delay_seconds) if delay_seconds else None,
                dedupe_key=dedupe_key,
                on_conflict="skip",
                headers={TENANT: tenant_id},
            )
        return queued[0] is not None
