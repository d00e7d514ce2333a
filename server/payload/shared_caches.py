"""What a process keeps in memory of its recent conversations, so that it need not be loaded or built for every turn.

Static texts and images are identified by their hash, and turns by their number. None of them ever changes, so a cached
value is always valid, however many processes serve the conversation. The limits only bound the memory; the least
recently used entries are evicted first.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from server.conversation.block import Blob
from server.conversation.lru import LruCache
from server.conversation.store import BufferedTurn
from server.payload.messages import SealedHistory

_MEBIBYTE = 1024 * 1024
_TURN_BYTES = 2_500
"""What a turn takes besides its content, which is kept as the turn, as its message, and as a part of all messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticText:
    """The static layer of an epoch."""

    text: str
    base_length: int
    """The number of characters before the compacted history."""

    @property
    def history(self) -> str:
        return self.text[self.base_length :]


class StaticTextCache:
    """Static texts by hash. Conversations of one assistant often share one."""

    def __init__(self, limit_bytes: int = 64 * _MEBIBYTE, conversation_limit: int = 20_000) -> None:
        # Approximate: a character may take four bytes.
        self._texts: LruCache[bytes, StaticText] = LruCache(limit_bytes, weigh=lambda text: len(text.text))
        self._newest: LruCache[str, bytes] = LruCache(conversation_limit)

    def hashes_for(self, conversation_id: str) -> Sequence[bytes]:
        """Return the hashes that need not be loaded for a conversation: that of its latest text, if it is
        still cached.
        """
        newest = self._newest.get(conversation_id)
        return (newest,) if newest is not None and newest in self._texts else ()

    def find(self, static_hash: bytes) -> StaticText | None:
        return self._texts.get(static_hash)

    def put(self, conversation_id: str, static_hash: bytes, text: StaticText) -> None:
        """Cache the text as the latest of the conversation."""
        self._newest.put(conversation_id, static_hash)
        if self._texts.get(static_hash) is None:
            self._texts.put(static_hash, text)


class BlobCache:
    """The images of active conversations, by the hex of their hash."""

    def __init__(self, limit_bytes: int = 64 * _MEBIBYTE) -> None:
        self._blobs: LruCache[str, Mapping[str, Blob]] = LruCache(limit_bytes, weigh=_weight_of)

    def blobs_of(self, conversation_id: str) -> Mapping[str, Blob]:
        return self._blobs.get(conversation_id) or {}

    def put(self, conversation_id: str, blobs: Mapping[str, Blob]) -> None:
        """Cache these instead of the conversation's previous ones."""
        if blobs:
            self._blobs.put(conversation_id, blobs)
        else:
            self._blobs.pop(conversation_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedHistory:
    """The buffer of a conversation as its last payload contained it."""

    turns: tuple[BufferedTurn, ...]
    provider: str
    """The provider of the assistant: turns of other providers were loaded with their blocks."""
    sealed: SealedHistory
    size: int
    """Bytes, approximately."""


class HistoryCache:
    """The buffers of active conversations, and the messages that they were rendered to."""

    def __init__(self, limit_bytes: int = 256 * _MEBIBYTE) -> None:
        self._histories: LruCache[str, CachedHistory] = LruCache(limit_bytes, weigh=lambda history: history.size)

    def find(self, conversation_id: str) -> CachedHistory | None:
        return self._histories.get(conversation_id)

    def put(self, conversation_id: str, turns: tuple[BufferedTurn, ...], provider: str, sealed: SealedHistory) -> None:
        """Cache these instead of the conversation's previous ones."""
        known = self._histories.get(conversation_id)
        size = 0
        new = turns
        if known is not None and known.turns[0] is turns[0]:
            size, new = known.size, turns[len(known.turns) :]
        size += sum(_TURN_BYTES + 3 * len(turn.native.data) for turn in new)
        self._histories.put(conversation_id, CachedHistory(turns=turns, provider=provider, sealed=sealed, size=size))


@dataclass(frozen=True, slots=True, kw_only=True)
class _HashedBody:
    body: bytes
    length: int
    """How many of its bytes were hashed to `state`."""
    state: "hashlib._Hash"


class RequestHashes:
    """SHA-256 of the bodies of requests. A request mostly repeats the previous one of its conversation, so only what
    follows the common beginning is hashed. Comparing bytes takes a small part of the time of hashing them.
    """

    def __init__(self, limit_bytes: int = 128 * _MEBIBYTE) -> None:
        self._bodies: LruCache[str, _HashedBody] = LruCache(limit_bytes, weigh=lambda hashed: len(hashed.body))

    def digest(self, conversation_id: str, body: bytes) -> bytes:
        known = self._bodies.get(conversation_id)
        length, state = 0, hashlib.sha256()
        common = 0 if known is None else _count_common(known.body, body)
        if known is not None and known.length <= common:
            length, state = known.length, known.state.copy()
        view = memoryview(body)
        state.update(view[length:common])
        self._bodies.put(conversation_id, _HashedBody(body=body, length=max(length, common), state=state.copy()))
        state.update(view[max(length, common) :])
        return state.digest()


def _count_common(one: bytes, other: bytes) -> int:
    """Count the bytes that both begin with."""
    left, right = memoryview(one), memoryview(other)
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _weight_of(blobs: Mapping[str, Blob]) -> int:
    return sum(len(blob.data) for blob in blobs.values())
