"""Builders for tests of the cache register and its maintainer: conversations, and failing caches of a provider."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, cast
from uuid import UUID

from server.caching.expectation import CacheExpectation
from server.caching.explicit_policy import CachePlan, CacheSettings, ExplicitChoice
from server.caching.maintainer import CacheMaintainer, CacheObservation
from server.conversation.api_key import Tenant
from server.conversation.cache_register import CacheKey, RegisteredCache
from server.conversation.errors import (
    ProviderFailed,
)
from server.conversation.payload import Payload
from server.conversation.usage import Usage
from server.postgres.caching import PostgresCacheRegister
from server.postgres.engine import Database
from server.postgres.store import PostgresStore
from server.providers.provider import ExplicitCache, Provider
from server.providers.token_estimate import TokenEstimate
from tests.contracts.provider_harness import build_payload
from tests.support.builders import create_conversation, epoch

MODEL = "gemini-3.1-pro-preview"
TEXT = "You help. " * 3_000
KEY = CacheKey(provider="gemini", account="a", model=MODEL, prefix_hash=epoch().prefix_hash)


async def converse(store: PostgresStore, tenant: Tenant) -> str:
    """A conversation in an epoch with the prefix of the key."""
    conversation = await create_conversation(store, tenant.id)
    await store.begin_epoch(tenant.id, conversation.id, epoch())
    return conversation.id


def in_an_hour(minutes: float = 60) -> datetime:
    return datetime.now(UTC) + timedelta(minutes=minutes)


async def reserve(register: PostgresCacheRegister, tenant: Tenant, key: CacheKey = KEY) -> UUID | None:
    return await register.reserve_cache(
        tenant.id, key, token_count=4_000, expires_at=in_an_hour(), fits=lambda kept: kept[key.model] > 0
    )


async def add(register: PostgresCacheRegister, tenant: Tenant, conversation_id: str, **changes: Any) -> RegisteredCache:
    values: dict[str, Any] = {"name": "cachedContents/1", "token_count": 5_000, "expires_at": in_an_hour()}
    place = await reserve(register, tenant)
    assert place is not None
    added = await register.add_cache(tenant.id, conversation_id, place, **values | changes)
    assert added is not None
    assert added.id == place
    return added


async def used_by(store: PostgresStore, tenant: Tenant, conversation_id: str) -> RegisteredCache | None:
    return (await store.load_payload_source(tenant.id, conversation_id)).cache


async def age_places(database: Database) -> None:
    """Let minutes pass."""
    async with database.connection() as connection:
        await connection.execute("UPDATE provider_caches SET created_at = created_at - interval '6 minutes'")


@dataclass(slots=True, kw_only=True)
class FakeCaches:
    """Caches of a provider that fail on request."""

    failure: ProviderFailed | None = None
    names: list[str] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)
    created: int = 0
    prolonged: int = 0
    on_create: Any = None

    def may_stand_for(self, payload: Payload) -> bool:
        return bool(payload.static_text)

    async def create(self, payload: Payload, *, lifetime_seconds: int, label: str) -> ExplicitCache:
        assert payload.cached_content is None
        if self.failure is not None:
            raise self.failure
        self.created += 1
        name = f"cachedContents/{self.created}"
        self.names.append(name)
        self.labels[name] = label
        if self.on_create is not None:
            await self.on_create()
        return ExplicitCache(name=name, expires_at=in_an_hour(lifetime_seconds / 60), token_count=5_000)

    async def find(self, label: str) -> list[str]:
        if self.failure is not None:
            raise self.failure
        return [name for name in self.names if self.labels.get(name) == label]

    async def prolong(self, name: str, *, lifetime_seconds: int) -> ExplicitCache:
        if self.failure is not None:
            raise self.failure
        self.prolonged += 1
        return ExplicitCache(name=name, expires_at=in_an_hour(lifetime_seconds / 60), token_count=5_000)

    async def delete(self, name: str) -> None:
        if self.failure is not None:
            raise self.failure
        self.names.remove(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeProvider:
    caches: FakeCaches
    name: str = "gemini"
    account: str = "a"


def maintainer_of(register: PostgresCacheRegister, caches: FakeCaches, budget: str = "1") -> CacheMaintainer:
    providers = cast(Mapping[str, Provider], {"gemini": FakeProvider(caches=caches)})
    return CacheMaintainer(register, providers, TokenEstimate(), budget_usd_per_hour=Decimal(budget))


def asked(
    tenant: Tenant, conversation_id: str, cache: RegisteredCache | None = None, *, was_missing: bool = False
) -> CacheObservation:
    plan = CachePlan(
        payload=replace(build_payload(MODEL, [b"{}"]), static_text=TEXT),
        expectation=CacheExpectation(),
        key=KEY,
        settings=CacheSettings(explicit=ExplicitChoice.ON),
        supports_cache=True,
        cache=cache,
    )
    return CacheObservation(
        tenant_id=tenant.id,
        conversation_id=conversation_id,
        plan=plan,
        usage=Usage(),
        started_at=datetime.now(UTC),
        was_missing=was_missing,
    )


async def observe(maintainer: CacheMaintainer, *turns: CacheObservation) -> None:
    for turn in turns:
        maintainer.observe_call(turn)
    await maintainer.settle()
