"""The register of explicit caches: what is kept at providers for whom, so that it is shared, paid for and removed.

A cache is bound to a tenant, a provider, an account and a model, and stands for one prefix. Conversations with that
prefix share it. Nobody uses a cache that is not registered for their conversation first, so that whoever erases the
conversation finds it. What every implementation promises, beside the tenant's walls:

- **One per key.** Of two that are added at once one is kept, and both callers are told which.
- **Users are conversations that exist.** One that is erased meanwhile leaves no row behind.
- **Nothing is forgotten.** A cache stays in the register until it is gone at the provider or its time is over.

Every method raises `DatabaseUnavailable` when the database does not answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol
from uuid import UUID


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheKey:
    """What a cache can stand for."""

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
    """The provider's name for it."""
    token_count: int
    expires_at: datetime


class CacheRegister(Protocol):
    """See the module for what holds for all methods."""

    async def join_cache(self, tenant_id: str, conversation_id: str, key: CacheKey) -> RegisteredCache | None:
        """Makes the conversation a user of the living cache with this key, and of no other. None where there is none.

        Raises `ConversationNotFound`.
        """
        ...

    async def add_cache(
        self,
        tenant_id: str,
        conversation_id: str,
        key: CacheKey,
        *,
        name: str,
        token_count: int,
        expires_at: datetime,
    ) -> RegisteredCache:
        """Registers a new cache with its first user. Where another with this key lives, that one is joined and given.

        Raises `ConversationNotFound`.
        """
        ...

    async def prolong_cache(self, cache_id: UUID, expires_at: datetime) -> None:
        """The cache lives until then."""
        ...

    async def drop_cache(self, cache_id: UUID) -> None:
        """The cache is gone at the provider: so are its row and its uses."""
        ...

    async def claim_unused_caches(self, accounts: Sequence[str], *, limit: int = 100) -> Sequence[RegisteredCache]:
        """Caches of these accounts that nobody uses any more, for the caller to remove: nobody can join them from now.

        A conversation uses a cache no longer when it is erased, or when its epoch has another prefix. What was claimed
        and not dropped is given out again after a while. Caches whose time is over are dropped here.
        """
        ...

    async def measure_caches(self) -> Mapping[str, int]:
        """By model, how many tokens are kept now, for all tenants."""
        ...
