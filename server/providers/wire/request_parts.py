"""Parts of request bodies that are encoded here and not by the SDKs."""

import secrets
from collections.abc import Callable, Hashable
from typing import Final

from server.conversation.lru import LruCache

_LIMIT_BYTES: Final = 64 * 1024 * 1024


class Placeholders:
    """Texts that an SDK encodes in place of JSON that exists already, for one request.

    `server.providers.wire.transport` replaces them by the JSON. They are random, so no other text contains one.
    """

    def __init__(self) -> None:
        self._prefix = f"@strata:{secrets.token_hex(8)}"
        self.contents: dict[str, bytes] = {}

    def make(self, content: bytes) -> str:
        """Return a text that stands for the content."""
        placeholder = f"{self._prefix}:{len(self.contents)}"
        self.contents[placeholder] = content
        return placeholder


class EncodedPartCache:
    """An LRU cache of encoded parts, by what they were encoded from.

    The JSON of a static text, for example, is the same in each call of an epoch.
    """

    def __init__(self, limit_bytes: int = _LIMIT_BYTES) -> None:
        self._parts: LruCache[Hashable, bytes] = LruCache(limit_bytes, weigh=len)

    def load(self, key: Hashable, encode: Callable[[], bytes]) -> bytes:
        """Return the part of the key, which must determine the result of `encode`."""
        part = self._parts.get(key)
        if part is None:
            part = encode()
            self._parts.put(key, part)
        return part
