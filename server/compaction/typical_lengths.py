"""How long the conversations of an assistant get, as far as this process knows.

What is known is held and answered at once; what is old is read again in the background, so nobody who ends a turn ever
waits for it. Lengths change slowly: an hour more or less makes no difference.
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
    """Where lengths come from. Raises `DatabaseUnavailable`."""

    async def load_typical_length(self, tenant_id: str, assistant_id: str) -> float | None:
        """The mean exchanges of the assistant's newest conversations that have come to rest.

        None where there are too few of them to say. Takes the same time however many conversations there are.
        """
        ...


class KnownLengths(Protocol):
    """The same as far as it is known: without a database it is what was known before."""

    async def load(self, tenant_id: str, assistant_id: str) -> float | None:
        """As above; may be some hours old."""
        ...


_AGE_LIMIT_SECONDS: Final = 3_600.0
_RETRY_SECONDS: Final = 60.0
_MAX_ASSISTANTS: Final = 10_000
_Key: TypeAlias = tuple[str, str]
_log = logging.getLogger("strata.compaction")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    length: float | None
    good_until: float


class TypicalLengths:
    """Holds the typical length by assistant."""

    def __init__(
        self,
        lengths: ConversationLengths,
        *,
        age_limit_seconds: float = _AGE_LIMIT_SECONDS,
        assistant_limit: int = _MAX_ASSISTANTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lengths = lengths
        self._age_limit_seconds = age_limit_seconds
        self._clock = clock
        self._held: LruCache[_Key, _Held] = LruCache(assistant_limit)
        self._reading: dict[_Key, asyncio.Task[None]] = {}
        self._turnstile = asyncio.Lock()
        """One is read at a time: a process that has just started may want very many."""

    def find(self, tenant_id: str, assistant_id: str) -> float | None:
        """What is held, without waiting; None where nothing is known, or not yet. What is old is read behind it."""
        key = (tenant_id, assistant_id)
        if not self._is_fresh(key):
            self._read(key)
        return self._length(key)

    async def load(self, tenant_id: str, assistant_id: str) -> float | None:
        """The same for who can wait: what is old or missing is read first. Without a database it is what is held."""
        key = (tenant_id, assistant_id)
        if not self._is_fresh(key):
            await asyncio.shield(self._read(key))
        return self._length(key)

    async def close(self) -> None:
        """Gives up what is being read."""
        tasks = list(self._reading.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _is_fresh(self, key: _Key) -> bool:
        held = self._held.get(key)
        return held is not None and self._clock() < held.good_until

    def _length(self, key: _Key) -> float | None:
        held = self._held.get(key)
        return None if held is None else held.length

    def _read(self, key: _Key) -> "asyncio.Task[None]":
        task = self._reading.get(key)
        if task is None:
            task = self._reading[key] = asyncio.create_task(self._refresh(key), name="read typical length")
            task.add_done_callback(lambda _: self._reading.pop(key, None))
        return task

    async def _refresh(self, key: _Key) -> None:
        tenant_id, assistant_id = key
        try:
            async with self._turnstile:
                length = await self._lengths.load_typical_length(tenant_id, assistant_id)
        except DatabaseUnavailable as error:
            # What was known stays good for a while.
            _log.warning("compaction.length_not_read", extra={"assistant_id": assistant_id, "code": error.code})
            self._hold(key, self._length(key), _RETRY_SECONDS)
        else:
            self._hold(key, length, self._age_limit_seconds)

    def _hold(self, key: _Key, length: float | None, seconds: float) -> None:
        self._held.put(key, _Held(length=length, good_until=self._clock() + seconds))
