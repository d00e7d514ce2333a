"""What requests have in common, written once: the JSON of a static text is the same with each call of an epoch."""

from collections.abc import Callable, Hashable
from typing import Final

from server.conversation.lru import LruCache

_LIMIT_BYTES: Final = 64 * 1024 * 1024


class WrittenParts:
    """Parts of requests as JSON, by what they were written from. What was not used for the longest time goes first."""

    def __init__(self, limit_bytes: int = _LIMIT_BYTES) -> None:
        self._parts: LruCache[Hashable, bytes] = LruCache(limit_bytes, weigh=len)

    def find(self, key: Hashable, write: Callable[[], bytes]) -> bytes:
        """The part under the key, which stands for all that `write` depends on."""
        part = self._parts.get(key)
        if part is None:
            part = write()
            self._parts.put(key, part)
        return part
