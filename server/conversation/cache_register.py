"""The register of explicit caches: what is kept at providers for whom, so that it is shared, paid for and removed.

A cache is bound to a tenant, a provider, an account and a model, and stands for one prefix. Conversations with that
prefix share it. Nobody uses a cache that is not registered for their conversation first, so that whoever erases the
conversation finds it. What every implementation promises, beside the tenant's walls:

- **One per key.** Whoever makes a cache reserves its place first, and only one can.
- **Storage is counted before it is bought.** Places are given out one after another over all processes, and count from
  then on: two that ask at once do not pass a limit together.
- **Users are conversations that exist.** One that is erased meanwhile leaves no row behind.
- **Nothing is forgotten.** A cache stays in the register until it is gone at the provider or its time is over, and so
  does the place of one whose maker never came back: nobody knows whether it was made.

Every method raises `DatabaseUnavailable` when the database does not answer.
"""

from collections.abc import Callable, Mapping, Sequence
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
    """The provider's name for it. Empty where its maker never told."""
    token_count: int
    expires_at: datetime

    @property
    def label(self) -> str:
        """What it is called at the provider, so that it can be found there without its name."""
        return cache_label(self.id)


def cache_label(cache_id: UUID) -> str:
    """What the cache of a place is to be called at the provider."""
    return f"strata {cache_id}"


class CacheRegister(Protocol):
    """See the module for what holds for all methods."""

    async def join_cache(self, tenant_id: str, conversation_id: str, key: CacheKey) -> RegisteredCache | None:
        """Makes the conversation a user of the living cache with this key, and of no other. None where there is none.

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
        """A place for a cache that the caller is about to make, to be filled or dropped.

        None where another lives or is about to be made, or where `fits` refuses the tokens that would be kept then, by
        model and for all tenants. It is pure and quick: everybody else who wants a place waits for it.
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
        """Fills a place, with its first user. None where the place was taken away, since it took too long.

        Raises `ConversationNotFound`.
        """
        ...

    async def prolong_cache(self, cache_id: UUID, expires_at: datetime) -> None:
        """The cache lives until then."""
        ...

    async def drop_cache(self, cache_id: UUID) -> None:
        """The cache is gone at the provider, or was never made: so are its row and its uses."""
        ...

    async def claim_unused_caches(self, accounts: Sequence[str], *, limit: int = 100) -> Sequence[RegisteredCache]:
        """Caches of these accounts that nobody uses any more, for the caller to remove: nobody can join them from now.

        A conversation uses a cache no longer when it is erased, or when its epoch has another prefix. Places that were
        not filled for minutes are among them, without a name. What was claimed and not dropped is given out again
        after a while. Caches whose time is over are dropped here.
        """
        ...

    async def measure_caches(self) -> Mapping[str, int]:
        """By model, how many tokens are kept now or are about to be, for all tenants."""
        ...
