"""A cache of live API keys, so that most requests are authenticated without a round trip.

An entry holds the key as the database returned it and the hash of its secret, never the secret, for half a minute; then
the key is loaded again, which also records its use. Rejected keys are not cached. The revocation of a key is notified
to all processes, and a process that does not receive notifications caches nothing.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Protocol
from uuid import UUID

from server.conversation.api_key import ApiKey, PresentedKey
from server.conversation.identifiers import API_KEY, encode_id
from server.conversation.lru import LruCache
from server.postgres.notifications import KEY_CHANNEL

_TTL_SECONDS: Final = 30.0
_MAX_KEYS: Final = 10_000


class Listener(Protocol):
    """Receives the notifications of revocations, see `PostgresNotifications`."""

    @property
    def listening(self) -> bool: ...

    def listen(self, channel: str, *, on_payload: Callable[[str], None], on_gap: Callable[[], None]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    key: ApiKey
    secret_hash: bytes
    expires_at: float


class KeyCache:
    """The cache of one process."""

    def __init__(
        self,
        listener: Listener,
        *,
        max_keys: int = _MAX_KEYS,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """`clock` measures the age of entries; `now` is compared with the expiry of a key."""
        self._listener = listener
        self._clock = clock
        self._now = now
        self._entries: LruCache[str, _Entry] = LruCache(max_keys)
        self._revocations = 0
        listener.listen(KEY_CHANNEL, on_payload=self._receive, on_gap=self._clear)

    async def find(
        self, presented: PresentedKey, load: Callable[[PresentedKey], Awaitable[ApiKey | None]]
    ) -> ApiKey | None:
        """Return the cached key, or load and cache it. None if it is not live, or its secret is another."""
        entry = self._entries.get(presented.id)
        if entry is not None and self._is_valid(entry, presented):
            return entry.key
        revocations = self._revocations
        key = await load(presented)
        # A key that was revoked meanwhile may have been live when it was loaded.
        if key is not None and revocations == self._revocations and self._listener.listening:
            expires_at = self._clock() + _TTL_SECONDS
            self._entries.put(key.id, _Entry(key=key, secret_hash=presented.secret_hash, expires_at=expires_at))
        return key

    def remove(self, key_id: str) -> None:
        """Remove a key that is revoked, or may be."""
        self._revocations += 1
        self._entries.pop(key_id)

    def _is_valid(self, entry: _Entry, presented: PresentedKey) -> bool:
        return (
            self._listener.listening
            and self._clock() < entry.expires_at
            and presented.matches(entry.secret_hash)
            and entry.key.is_live(self._now())
        )

    def _receive(self, payload: str) -> None:
        try:
            key_id = encode_id(API_KEY, UUID(payload))
        except ValueError:
            # Not a payload of Strata: any key may have been meant.
            self._clear()
        else:
            self.remove(key_id)

    def _clear(self) -> None:
        self._revocations += 1
        self._entries.clear()
