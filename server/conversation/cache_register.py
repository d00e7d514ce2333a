"""The register of explicit caches: which caches exist at providers, so that they are shared, budgeted and deleted.

A cache belongs to a tenant, a provider, an account and a model, and covers one prefix. Conversations with that prefix
share it. A conversation is registered as a user of a cache before it uses the cache, so erasing the conversation finds
it. Every implementation promises, besides the separation of tenants:

- **One cache per key.** A cache is reserved before it is created, and only one process can reserve it.
- **Storage is counted before it is paid for.** Reservations are serialised over all processes and count immediately, so
  concurrent reservations do not exceed the limit together.
- **Users are existing conversations.** A conversation that is erased meanwhile leaves no row.
- **No cache is forgotten.** A cache stays in the register until it is deleted at the provider or has expired. So does a
  reservation whose process crashed, because its cache may have been created.

Every method raises `DatabaseUnavailable` if the database does not answer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol
from uuid import UUID


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheKey:
    """What a cache covers."""

    provider: str
    account: str
    model: str
    prefix_hash: bytes
    """SHA-256 of static text and tools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredCache:
    """A cache at a provider."""

    id: UUID
    key: CacheKey
    name: str
    """The provider's name for it. Empty for a reservation."""
    token_count: int
    expires_at: datetime

    @property
    def label(self) -> str:
        """Its label at the provider, by which it can be found without its name."""
        return cache_label(self.id)


def cache_label(cache_id: UUID) -> str:
    """Return the label of the cache with this id."""
    return f"strata {cache_id}"


class CacheRegister(Protocol):
    """See the module for the promises of all methods."""

    async def join_cache(self, tenant_id: str, conversation_id: str, key: CacheKey) -> RegisteredCache | None:
        """Register the conversation as a user of the live cache with this key, and of no other. None if there is none.

        Raises `ConversationNotFound`.
        """
        ...

    async def reserve_cache(
        self,
        tenant_id: str,
        key: CacheKey,
        *,
        token_count: int,
        expires_at: datetime,
        fits: Callable[[Mapping[str, int]], bool],
    ) -> UUID | None:
        """Reserve a cache that the caller is about to create. The caller then adds or drops it.

        None if a cache exists or is reserved, or if `fits` refuses the total tokens by model for all tenants. `fits`
        must be pure and fast, because other reservations wait for it.
        """
        ...

    async def add_cache(
        self,
        tenant_id: str,
        conversation_id: str,
        cache_id: UUID,
        *,
        name: str,
        token_count: int,
        expires_at: datetime,
    ) -> RegisteredCache | None:
        """Complete a reservation, with its first user. None if the reservation expired meanwhile.

        Raises `ConversationNotFound`.
        """
        ...

    async def prolong_cache(self, cache_id: UUID, expires_at: datetime) -> None:
        """Record a new expiry."""
        ...

    async def drop_cache(self, cache_id: UUID) -> None:
        """Remove a cache that is deleted at the provider or was never created, and its users."""
        ...

    async def claim_unused_caches(self, accounts: Sequence[str], *, limit: int = 100) -> Sequence[RegisteredCache]:
        """Claim caches of these accounts without users, for the caller to delete. They can no longer be joined.

        A conversation stops using a cache when it is erased, or when its epoch has another prefix. Reservations that
        are some minutes old are included, without a name. A claim that is not followed by `drop_cache` expires after a
        while. Expired caches are dropped here.
        """
        ...

    async def measure_caches(self) -> Mapping[str, int]:
        """Return the tokens of all caches and reservations by model, for all tenants."""
        ...
