"""What this process holds of conversations so that it need not be read again: static texts and images.

Both are known by their hash and never change, so holding them is always right; the limits only bound the memory. What
was not used for the longest time goes first.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from server.conversation.block import Blob

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
        self._limit_bytes = limit_bytes
        self._conversation_limit = conversation_limit
        self._texts: OrderedDict[bytes, StaticText] = OrderedDict()
        self._newest: OrderedDict[str, bytes] = OrderedDict()
        self._size_bytes = 0

    def hashes_for(self, conversation_id: str) -> Sequence[bytes]:
        """What need not be read for a conversation: the text that it was last seen with, if it is still held."""
        newest = self._newest.get(conversation_id)
        return (newest,) if newest is not None and newest in self._texts else ()

    def find(self, static_hash: bytes) -> StaticText | None:
        """The text under the hash."""
        held = self._texts.get(static_hash)
        if held is not None:
            self._texts.move_to_end(static_hash)
        return held

    def hold(self, conversation_id: str, static_hash: bytes, text: StaticText) -> None:
        """Keeps the text, and that the conversation uses it."""
        self._newest[conversation_id] = static_hash
        self._newest.move_to_end(conversation_id)
        if len(self._newest) > self._conversation_limit:
            self._newest.popitem(last=False)
        if static_hash not in self._texts:
            self._texts[static_hash] = text
            self._size_bytes += _size_of(text)
        self._texts.move_to_end(static_hash)
        while self._size_bytes > self._limit_bytes and len(self._texts) > 1:
            _, gone = self._texts.popitem(last=False)
            self._size_bytes -= _size_of(gone)


class BlobCache:
    """The images of conversations that are talked to now, by the hex of their hash."""

    def __init__(self, limit_bytes: int = 64 * _MEBIBYTE) -> None:
        self._limit_bytes = limit_bytes
        self._blobs: OrderedDict[str, Mapping[str, Blob]] = OrderedDict()
        self._size_bytes = 0

    def blobs_of(self, conversation_id: str) -> Mapping[str, Blob]:
        """Those of one conversation."""
        return self._blobs.get(conversation_id, {})

    def hold(self, conversation_id: str, blobs: Mapping[str, Blob]) -> None:
        """Keeps these, instead of what was held for the conversation."""
        gone = self._blobs.pop(conversation_id, {})
        self._size_bytes -= _weight_of(gone)
        if not blobs:
            return
        self._blobs[conversation_id] = blobs
        self._size_bytes += _weight_of(blobs)
        while self._size_bytes > self._limit_bytes:
            _, oldest = self._blobs.popitem(last=False)
            self._size_bytes -= _weight_of(oldest)


def _size_of(text: StaticText) -> int:
    """About; a character may take four."""
    return len(text.text)


def _weight_of(blobs: Mapping[str, Blob]) -> int:
    return sum(len(blob.data) for blob in blobs.values())
