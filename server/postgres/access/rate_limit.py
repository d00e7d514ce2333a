"""The rate limit on Postgres: fixed windows of a minute by the database's clock, the same for every process.

A process does not run a statement for each request. It reserves a few permits with one statement and uses them up; if
a window is exhausted, the process caches that until the window ends. Permits that are left at the end are lost.
"""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from server.conversation.errors import RateLimited
from server.conversation.identifiers import API_KEY, decode_id
from server.conversation.lru import LruCache
from server.postgres.engine import Database, Statement

# `used` may exceed the limit by less than a batch; that reservation gets the remaining permits, the next one none.
_RESERVE: Final = Statement("""
WITH present AS (
    SELECT to_timestamp(floor(extract(epoch FROM now()) / :window_seconds) * :window_seconds) AS began_at
),
past AS (
    DELETE FROM rate_windows USING present
    WHERE rate_windows.api_key_id = :key AND rate_windows.began_at < present.began_at
),
reserved AS (
    INSERT INTO rate_windows AS counted (api_key_id, began_at, used)
    SELECT :key, began_at, :batch FROM present
    ON CONFLICT (api_key_id, began_at) DO UPDATE SET used = counted.used + :batch WHERE counted.used < :limit
    RETURNING :batch - greatest(counted.used - :limit, 0) AS permissions
)
SELECT coalesce(permissions, 0) AS permissions,
    extract(epoch FROM present.began_at - now())::float8 + :window_seconds AS seconds_left
FROM present LEFT JOIN reserved ON true
""")
_MINUTE: Final = 60.0
_BATCHES: Final = 50
"""The number of reservations in which one process can reserve a whole window."""
_MAX_KEYS: Final = 10_000


@dataclass(slots=True, kw_only=True)
class _Reserve:
    """The permits of this process for one key, and when they expire."""

    permissions: int = 0
    used_up: bool = False
    """No process gets permits for this key until the window ends."""
    ends_at: float = -math.inf
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class PostgresRateLimiter:
    """Implements `server.conversation.api_key.RateLimiter`."""

    def __init__(
        self,
        database: Database,
        per_minute: int,
        *,
        window_seconds: float = _MINUTE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`per_minute`: 0 means no limit; nothing is counted then."""
        self._database = database
        self._limit = per_minute
        self._batch = max(1, per_minute // _BATCHES)
        self._window_seconds = window_seconds
        self._clock = clock
        self._reserves: LruCache[str, _Reserve] = LruCache(_MAX_KEYS)

    async def admit(self, key_id: str) -> None:
        if not self._limit:
            return
        reserve = self._reserve_of(key_id)
        if self._take(reserve):
            return
        async with reserve.lock:
            # The previous holder of the lock may have reserved permits for all that wait.
            while not self._take(reserve):
                await self._reserve(key_id, reserve)

    def _take(self, reserve: _Reserve) -> bool:
        """Take a permit of the current window, if there is one. Raises `RateLimited` if the window is exhausted."""
        seconds_left = reserve.ends_at - self._clock()
        if seconds_left <= 0:
            return False
        if reserve.permissions > 0:
            reserve.permissions -= 1
            return True
        if reserve.used_up:
            raise RateLimited(retry_after_seconds=math.ceil(seconds_left))
        return False

    async def _reserve(self, key_id: str, reserve: _Reserve) -> None:
        # Before the statement is sent, so that the computed end is never too late.
        sent_at = self._clock()
        rows = await self._database.run(
            _RESERVE,
            key=decode_id(API_KEY, key_id),
            batch=self._batch,
            limit=self._limit,
            window_seconds=self._window_seconds,
        )
        reserve.permissions = rows[0]["permissions"]
        reserve.used_up = not reserve.permissions
        reserve.ends_at = sent_at + rows[0]["seconds_left"]

    def _reserve_of(self, key_id: str) -> _Reserve:
        found = self._reserves.get(key_id)
        if found is None:
            # The permits of an evicted reserve are lost for this window.
            found = _Reserve()
            self._reserves.put(key_id, found)
        return found
