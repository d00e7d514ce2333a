"""What this process holds of conversations so that it need not be read again: static texts and images.

Both are known by their hash and never change, so holding them is always right; the limits only bound the memory. What
was not used for the longest time goes first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from server.conversation.block import Blob
from server.conversation.lru import LruCache

_MEBIBYTE = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticText:
    """The static layer of an epoch."""

    text: str
    base_length: int
    """Characters before the compacted history."""

    @property
    def history(self) -> str:
        """The compacted history."""
        return self.text[self.base_length :]


class StaticTextCache:
    """Static texts by hash. Conversations of one assistant often share one."""

    def __init__(self, limit_bytes: int = 64 * _MEBIBYTE, conversation_limit: int = 20_000) -> None:
        # About: a character may take four bytes.
        self._texts: LruCache[bytes, StaticText] = LruCache(limit_bytes, weigh=lambda text: len(text.text))
        self._newest: LruCache[str, bytes] = LruCache(conversation_limit)

    def hashes_for(self, conversation_id: str) -> Sequence[bytes]:
        """What need not be read for a conversation: the text that it was last seen with, if it is still held."""
        newest = self._newest.get(conversation_id)
        return (newest,) if newest is not None and newest in self._texts else ()

    def find(self, static_hash: bytes) -> StaticText | None:
        """The text under the hash."""
        return self._texts.get(static_hash)

    def put(self, conversation_id: str, static_hash: bytes, text: StaticText) -> None:
        """Keeps the text, and that the conversation uses it."""
        self._newest.put(conversation_id, static_hash)
        if self._texts.get(static_hash) is None:
            self._texts.put(static_hash, text)


class BlobCache:
    """The images of conversations that are talked to now, by the hex of their hash."""

    def __init__(self, limit_bytes: int = 64 * _MEBIBYTE) -> None:
        self._blobs: LruCache[str, Mapping[str, Blob]] = LruCache(limit_bytes, weigh=_weight_of)

    def blobs_of(self, conversation_id: str) -> Mapping[str, Blob]:
        """Those of one conversation."""
        return self._blobs.get(conversation_id) or {}

    def put(self, conversation_id: str, blobs: Mapping[str, Blob]) -> None:
        """Keeps these, instead of what was held for the conversation."""
        if blobs:
            self._blobs.put(conversation_id, blobs)
        else:
            self._blobs.pop(conversation_id)


def _weight_of(blobs: Mapping[str, Blob]) -> int:
    return sum(len(blob.data) for blob in blobs.values())
