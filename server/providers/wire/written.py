"""What requests have in common, written once: the JSON of a static text is the same with each call of an epoch."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final

_LIMIT_BYTES: Final = 64 * 1024 * 1024


class WrittenParts:
    """Parts of requests as JSON, by what they were written from. What was not used for the longest time goes first."""

    def __init__(self, limit_bytes: int = _LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._parts: OrderedDict[Hashable, bytes] = OrderedDict()
        self._size_bytes = 0

    def find(self, key: Hashable, write: Callable[[], bytes]) -> bytes:
        """The part under the key, which stands for all that `write` depends on."""
        part = self._parts.get(key)
        if part is None:
            part = self._parts[key] = write()
            self._size_bytes += len(part)
        self._parts.move_to_end(key)
        while self._size_bytes > self._limit_bytes and len(self._parts) > 1:
            _, gone = self._parts.popitem(last=False)
            self._size_bytes -= len(gone)
        return part
