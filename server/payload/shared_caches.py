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
_COMPARED_BYTES = 4096
_TURN_BYTES = 2_500
"""What a turn and its message take besides their content."""


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
    turn_bytes: int
    """The size of the turns, approximately."""

    @property
    def size(self) -> int:
        """Bytes, approximately. Messages contain images, which turns only refer to; most are kept twice, by themselves
        and joined.
        """
        recent = self.sealed.messages[self.sealed.joined_count :]
        return self.turn_bytes + 2 * len(self.sealed.joined) + sum(len(message.data) for message in recent)


class HistoryCache:
    """The buffers of active conversations, and the messages that they were rendered to."""

    def __init__(self, limit_bytes: int = 256 * _MEBIBYTE) -> None:
        self._histories: LruCache[str, CachedHistory] = LruCache(limit_bytes, weigh=lambda history: history.size)

    def find(self, conversation_id: str) -> CachedHistory | None:
        return self._histories.get(conversation_id)

    def put(self, conversation_id: str, turns: tuple[BufferedTurn, ...], provider: str, sealed: SealedHistory) -> None:
        """Cache these instead of the conversation's previous ones."""
        known = self._histories.get(conversation_id)
        turn_bytes = 0
        new = turns
        if known is not None and known.turns[0] is turns[0]:
            turn_bytes, new = known.turn_bytes, turns[len(known.turns) :]
        turn_bytes += sum(_TURN_BYTES + len(turn.native.data) for turn in new)
        self._histories.put(
            conversation_id, CachedHistory(turns=turns, provider=provider, sealed=sealed, turn_bytes=turn_bytes)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _HashedBody:
    prefix: bytes
    state: "hashlib._Hash"
    """The hash of the prefix, which can be continued."""
    rest: bytes
    """What followed it in the last request."""


class RequestHashes:
    """SHA-256 of the bodies of requests. A request mostly repeats the previous one of its conversation, so only what
    follows the common beginning is hashed. Comparing bytes takes a small part of the time of hashing them.
    """

    def __init__(self, limit_bytes: int = 128 * _MEBIBYTE) -> None:
        self._bodies: LruCache[str, _HashedBody] = LruCache(
            limit_bytes, weigh=lambda hashed: len(hashed.prefix) + len(hashed.rest)
        )

    def digest(self, conversation_id: str, body: bytes) -> bytes:
        known = self._bodies.get(conversation_id)
        if known is None or not body.startswith(known.prefix):
            known = _HashedBody(prefix=b"", state=hashlib.sha256(), rest=b"")
        length = len(known.prefix)
        rest = body[length:]
        # Copying the prefix costs time too, so it is extended only by much at once.
        common = _count_common(known.rest, rest) if len(rest) > length // 8 else 0
        if common > length // 16:
            state = known.state.copy()
            state.update(rest[:common])
            known = _HashedBody(prefix=body[: length + common], state=state, rest=rest[common:])
        else:
            known = _HashedBody(prefix=known.prefix, state=known.state, rest=rest)
        self._bodies.put(conversation_id, known)
        whole = known.state.copy()
        whole.update(known.rest)
        return whole.digest()


def _count_common(one: bytes, other: bytes) -> int:
    """Count the bytes that both begin with."""
    length = min(len(one), len(other))
    start = 0
    while start < length and one[start : start + _COMPARED_BYTES] == other[start : start + _COMPARED_BYTES]:
        start += _COMPARED_BYTES
    end = min(length, start + _COMPARED_BYTES)
    return next((index for index in range(start, end) if one[index] != other[index]), end)


def _weight_of(blobs: Mapping[str, Blob]) -> int:
    return sum(len(blob.data) for blob in blobs.values())
