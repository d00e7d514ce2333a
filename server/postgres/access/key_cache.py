"""Keys that have been looked up before: a request need not ask the database who is asking.

What is remembered is what the database said of a key and the hash of its secret, never the secret, and for half a
minute: then the database is asked again, which notes the use. A key that was refused is not remembered. Revoking a key
is announced to all processes, and a process that cannot hear remembers nothing.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Protocol
from uuid import UUID

from server.conversation.api_key import ApiKey, KeyRing, PresentedKey, Scope, Tenant
from server.conversation.audit import OPERATOR, Actor
from server.conversation.identifiers import API_KEY, encode_id
from server.conversation.lru import LruCache
from server.postgres.turns.channels import KEY_CHANNEL

_MEMORY_SECONDS: Final = 30.0
_MEMORY_KEYS: Final = 10_000


class Listener(Protocol):
    """What it takes to hear that a key was revoked, see `PostgresNotifications`."""

    @property
    def listening(self) -> bool: ...

    def listen(self, channel: str, *, heard: Callable[[str], None], missed: Callable[[], None]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Remembered:
    key: ApiKey
    secret_hash: bytes
    until: float


def _now() -> datetime:
    return datetime.now(UTC)


class RememberedKeys:
    """Implements `server.conversation.api_key.KeyRing` on top of another one."""

    def __init__(
        self,
        key_ring: KeyRing,
        ears: Listener,
        *,
        max_keys: int = _MEMORY_KEYS,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = _now,
    ) -> None:
        """`now` decides about the expiry of a remembered key, which may be for half a minute and not longer."""
        self._key_ring = key_ring
        self._ears = ears
        self._clock = clock
        self._now = now
        self._remembered: LruCache[str, _Remembered] = LruCache(max_keys)
        self._revocations = 0
        ears.listen(KEY_CHANNEL, heard=self._hear, missed=self._forget_all)

    async def find_live_key(self, presented: PresentedKey) -> ApiKey | None:
        found = self._recall(presented)
        if found is not None:
            return found
        revocations = self._revocations
        key = await self._key_ring.find_live_key(presented)
        # One that was revoked while the database was asked may have been live when it answered.
        if key is not None and revocations == self._revocations:
            self._remember(key, presented.secret_hash)
        return key

    async def revoke_key(self, key_id: str, by: Actor = OPERATOR) -> ApiKey:
        try:
            return await self._key_ring.revoke_key(key_id, by)
        finally:
            # Also where it failed: the answer may be lost and the key be gone.
            self._forget(key_id)

    async def create_tenant(self, name: str) -> Tenant:
        return await self._key_ring.create_tenant(name)

    async def load_tenant(self, name: str) -> Tenant:
        return await self._key_ring.load_tenant(name)

    async def list_tenants(self) -> Sequence[Tenant]:
        return await self._key_ring.list_tenants()

    async def create_key(
        self,
        *,
        tenant_id: str,
        name: str,
        scopes: frozenset[Scope],
        expires_at: datetime | None,
        by: Actor = OPERATOR,
    ) -> tuple[ApiKey, str]:
        return await self._key_ring.create_key(
            tenant_id=tenant_id, name=name, scopes=scopes, expires_at=expires_at, by=by
        )

    async def load_key(self, *, tenant_id: str, key_id: str) -> ApiKey:
        return await self._key_ring.load_key(tenant_id=tenant_id, key_id=key_id)

    async def list_keys(self, tenant_id: str | None = None) -> Sequence[ApiKey]:
        return await self._key_ring.list_keys(tenant_id)

    def _recall(self, presented: PresentedKey) -> ApiKey | None:
        found = self._remembered.get(presented.id)
        if found is None or not self._ears.listening or self._clock() >= found.until:
            return None
        if not presented.matches(found.secret_hash) or not found.key.is_live(self._now()):
            return None
        return found.key

    def _remember(self, key: ApiKey, secret_hash: bytes) -> None:
        if not self._ears.listening:
            return
        remembered = _Remembered(key=key, secret_hash=secret_hash, until=self._clock() + _MEMORY_SECONDS)
        self._remembered.put(key.id, remembered)

    def _hear(self, said: str) -> None:
        try:
            key_id = encode_id(API_KEY, UUID(said))
        except ValueError:
            # Nothing that Strata says. What it was meant to say is not known, so nothing is taken for certain.
            self._forget_all()
        else:
            self._forget(key_id)

    def _forget(self, key_id: str) -> None:
        self._revocations += 1
        self._remembered.pop(key_id)

    def _forget_all(self) -> None:
        self._revocations += 1
        self._remembered.clear()
