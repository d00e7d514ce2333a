"""A bounded mapping for what one process remembers: the least recently used entries are evicted first."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """Entries up to a total weight: `weigh` gives that of a value, and without it each entry weighs 1.

    `get` and `put` mark an entry as used; `in` does not. The newest entry is kept even if it alone exceeds the limit.
    A value must keep its weight while it is cached.
    """

    def __init__(self, max_weight: int, weigh: Callable[[V], int] | None = None) -> None:
        self._max_weight = max_weight
        self._weigh = weigh
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._weight = 0

    def get(self, key: K) -> V | None:
        """Return the value, or None if there is none."""
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def put(self, key: K, value: V) -> list[V]:
        """Add or replace an entry, and return the values that were evicted for it, oldest first."""
        self.pop(key)
        self._entries[key] = value
        self._weight += self._weight_of(value)
        evicted = []
        while self._weight > self._max_weight and len(self._entries) > 1:
            _, oldest = self._entries.popitem(last=False)
            self._weight -= self._weight_of(oldest)
            evicted.append(oldest)
        return evicted

    def pop(self, key: K) -> V | None:
        """Remove an entry and return its value, or None if there is none."""
        value = self._entries.pop(key, None)
        if value is not None:
            self._weight -= self._weight_of(value)
        return value

    def clear(self) -> None:
        self._entries.clear()
        self._weight = 0

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[K]:
        """Iterate over the keys, least recently used first."""
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def _weight_of(self, value: V) -> int:
        return 1 if self._weigh is None else self._weigh(value)
