"""How many exchanges the conversations of an assistant usually have, cached per process.

Cached values are returned immediately. Outdated values are reloaded in the background, so a turn never waits for them.
Typical lengths change slowly, so a value may be an hour old.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from server.conversation.errors import DatabaseUnavailable
from server.conversation.lru import LruCache


class ConversationLengths(Protocol):
    """The source of typical lengths. Raises `DatabaseUnavailable`."""

    async def load_typical_length(self, tenant_id: str, assistant_id: str) -> float | None:
        """Load the mean number of exchanges of the assistant's newest inactive conversations.

        None if there are too few of them. Takes the same time for any number of conversations.
        """
        ...


class KnownLengths(Protocol):
    """Typical lengths that may be outdated, and that need no database."""

    async def load(self, tenant_id: str, assistant_id: str) -> float | None:
        """Return the typical length; None if it is unknown."""
        ...


_MAX_AGE_SECONDS: Final = 3_600.0
_RETRY_SECONDS: Final = 60.0
_MAX_ASSISTANTS: Final = 10_000
_Key: TypeAlias = tuple[str, str]
_log = logging.getLogger("strata.compaction")


@dataclass(frozen=True, slots=True, kw_only=True)
class _CachedLength:
    length: float | None
    fresh_until: float


class TypicalLengths:
    """Caches the typical length by assistant."""

    def __init__(
        self,
        lengths: ConversationLengths,
        *,
        max_age_seconds: float = _MAX_AGE_SECONDS,
        max_assistants: int = _MAX_ASSISTANTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lengths = lengths
        self._max_age_seconds = max_age_seconds
        self._clock = clock
        self._cache: LruCache[_Key, _CachedLength] = LruCache(max_assistants)
        self._tasks: dict[_Key, asyncio.Task[None]] = {}
        self._lock = asyncio.Lock()
        """Loads one value at a time: a process that has just started may need very many."""

    def find(self, tenant_id: str, assistant_id: str) -> float | None:
        """Return the cached value without waiting; None if there is none yet. An outdated value is reloaded in the
        background.
        """
        key = (tenant_id, assistant_id)
        if not self._is_fresh(key):
            self._start_refresh(key)
        return self._length(key)

    async def load(self, tenant_id: str, assistant_id: str) -> float | None:
        """Return the value, loading it first if it is missing or outdated. Returns the cached value if the database is
        unavailable.
        """
        key = (tenant_id, assistant_id)
        if not self._is_fresh(key):
            await asyncio.shield(self._start_refresh(key))
        return self._length(key)

    async def close(self) -> None:
        """Cancel loads that are in progress."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _is_fresh(self, key: _Key) -> bool:
        cached = self._cache.get(key)
        return cached is not None and self._clock() < cached.fresh_until

    def _length(self, key: _Key) -> float | None:
        cached = self._cache.get(key)
        return None if cached is None else cached.length

    def _start_refresh(self, key: _Key) -> "asyncio.Task[None]":
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.create_task(self._refresh(key), name="read typical length")
            task.add_done_callback(lambda _: self._tasks.pop(key, None))
        return task

    async def _refresh(self, key: _Key) -> None:
        tenant_id, assistant_id = key
        try:
            async with self._lock:
                length = await self._lengths.load_typical_length(tenant_id, assistant_id)
        except DatabaseUnavailable as error:
            # The old value stays in use for a while.
            _log.warning("compaction.length_not_read", extra={"assistant_id": assistant_id, "code": error.code})
            self._put(key, self._length(key), _RETRY_SECONDS)
        else:
            self._put(key, length, self._max_age_seconds)

    def _put(self, key: _Key, length: float | None, seconds: float) -> None:
        self._cache.put(key, _CachedLength(length=length, fresh_until=self._clock() + seconds))
