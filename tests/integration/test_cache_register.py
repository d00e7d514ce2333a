"""The register of explicit caches, and the keeper when the provider does not do what it should."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, cast

import pytest

from server.api_key import Tenant
from server.cache_expectation import CacheExpectation
from server.cache_keeper import Asked, CacheKeeper
from server.cache_register import CacheKey, RegisteredCache
from server.errors import CacheGone, ConversationNotFound, ProviderFailed, ProviderRejected, ProviderUnavailable
from server.explicit_cache_policy import CacheSettings, ExplicitChoice
from server.identifiers import CONVERSATION, new_id
from server.payload import Payload
from server.payload_caching import CachePlan
from server.postgres.caches import PostgresCacheRegister
from server.postgres.engine import Database
from server.postgres.store import PostgresStore
from server.provider import ExplicitCache, Provider
from server.token_estimate import TokenEstimate
from server.usage import Usage
from tests.builders import create_conversation, epoch
from tests.contracts.provider_rig import build_payload

MODEL = "gemini-3.1-pro-preview"
TEXT = "You help. " * 3_000
KEY = CacheKey(provider="gemini", account="a", model=MODEL, prefix_hash=epoch().prefix_hash)


@pytest.fixture
def register(database: Database) -> PostgresCacheRegister:
    return PostgresCacheRegister(database)


async def converse(store: PostgresStore, tenant: Tenant) -> str:
    """A conversation in an epoch whose prefix is that of the key."""
    conversation = await create_conversation(store, tenant.id)
    await store.begin_epoch(tenant.id, conversation.id, epoch())
    return conversation.id


def in_an_hour(minutes: float = 60) -> datetime:
    return datetime.now(UTC) + timedelta(minutes=minutes)


async def add(register: PostgresCacheRegister, tenant: Tenant, conversation_id: str, **changes: Any) -> RegisteredCache:
    values: dict[str, Any] = {"name": "cachedContents/1", "token_count": 5_000, "expires_at": in_an_hour()}
    return await register.add_cache(tenant.id, conversation_id, KEY, **values | changes)


async def used_by(store: PostgresStore, tenant: Tenant, conversation_id: str) -> RegisteredCache | None:
    return (await store.load_payload_source(tenant.id, conversation_id)).cache


async def test_a_cache_comes_with_what_its_users_load(
    register: PostgresCacheRegister, store: PostgresStore, tenant: Tenant
) -> None:
    first, second, third = [await converse(store, tenant) for _ in range(3)]
    cache = await add(register, tenant, first)
    assert (cache.key, cache.name, cache.token_count) == (KEY, "cachedContents/1", 5_000)
    assert await register.join_cache(tenant.id, second, KEY) == cache
    assert [await used_by(store, tenant, one) for one in (first, second, third)] == [cache, cache, None]
    later = in_an_hour(90)
    await register.prolong_cache(cache.id, later)
    await register.prolong_cache(cache.id, in_an_hour(1))
    assert await used_by(store, tenant, first) == replace(cache, expires_at=later)
    assert await register.measure_caches() == {MODEL: 5_000}
    await register.drop_cache(cache.id)
    assert [await used_by(store, tenant, one) for one in (first, second)] == [None, None]
    assert await register.measure_caches() == {}


async def test_a_cache_is_for_its_own_key_and_tenant(
    register: PostgresCacheRegister, store: PostgresStore, tenant: Tenant, key_ring: Any
) -> None:
    conversation = await converse(store, tenant)
    await add(register, tenant, conversation)
    for other in (replace(KEY, account="b"), replace(KEY, model="m"), replace(KEY, prefix_hash=b"q")):
        assert await register.join_cache(tenant.id, await converse(store, tenant), other) is None
    stranger = await key_ring.create_tenant("other")
    assert await register.join_cache(stranger.id, await converse(store, stranger), KEY) is None
    for call in (register.join_cache(stranger.id, conversation, KEY), add(register, stranger, conversation)):
        with pytest.raises(ConversationNotFound):
            await call
    with pytest.raises(ConversationNotFound):
        await register.join_cache(tenant.id, new_id(CONVERSATION), KEY)


async def test_of_two_that_are_added_at_once_one_is_kept(
    register: PostgresCacheRegister, store: PostgresStore, tenant: Tenant
) -> None:
    conversations = [await converse(store, tenant) for _ in range(4)]
    kept = await asyncio.gather(
        *(add(register, tenant, one, name=f"cachedContents/{place}") for place, one in enumerate(conversations))
    )
    assert len({cache.name for cache in kept}) == len({cache.id for cache in kept}) == 1
    assert [await used_by(store, tenant, one) for one in conversations] == list(kept)


async def test_one_whose_time_is_over_gives_way(
    register: PostgresCacheRegister, store: PostgresStore, tenant: Tenant
) -> None:
    conversation = await converse(store, tenant)
    await add(register, tenant, conversation, expires_at=in_an_hour(-1))
    assert await register.join_cache(tenant.id, conversation, KEY) is None
    fresh = await add(register, tenant, conversation, name="cachedContents/2", token_count=7)
    assert (fresh.name, fresh.token_count) == ("cachedContents/2", 7)
    assert await used_by(store, tenant, conversation) == fresh


async def test_a_conversation_uses_one_cache(
    register: PostgresCacheRegister, store: PostgresStore, tenant: Tenant, database: Database
) -> None:
    conversation = await converse(store, tenant)
    await add(register, tenant, conversation)
    assert await register.join_cache(tenant.id, conversation, replace(KEY, prefix_hash=b"next")) is None
    async with database.connection() as connection:
        assert await connection.fetchval("SELECT count(*) FROM provider_cache_uses") == 0


async def test_what_nobody_uses_is_claimed_once_until_its_claim_is_old(
    register: PostgresCacheRegister, store: PostgresStore, tenant: Tenant, database: Database
) -> None:
    conversation = await converse(store, tenant)
    cache = await add(register, tenant, conversation)
    assert await register.claim_unused_caches(["a"]) == []
    await store.erase_conversation(tenant.id, conversation)
    assert await register.claim_unused_caches(["b"]) == []
    assert await register.claim_unused_caches(["a", "b"]) == [cache]
    assert await register.claim_unused_caches(["a"]) == []
    other = await converse(store, tenant)
    assert await register.join_cache(tenant.id, other, KEY) is None
    assert (await add(register, tenant, other, name="cachedContents/2")).name == "cachedContents/2"
    async with database.connection() as connection:
        await connection.execute("UPDATE provider_caches SET removing_at = removing_at - interval '6 minutes'")
    assert await register.claim_unused_caches(["a"]) == [cache]


async def test_another_epoch_is_the_end_of_a_use(
    register: PostgresCacheRegister, store: PostgresStore, tenant: Tenant
) -> None:
    conversation = await converse(store, tenant)
    cache = await add(register, tenant, conversation)
    await store.begin_epoch(tenant.id, conversation, epoch(2, "You help otherwise."))
    assert await register.claim_unused_caches(["a"]) == [cache]
    assert await used_by(store, tenant, conversation) is None


@dataclass(slots=True, kw_only=True)
class FakeCaches:
    """A provider's caches that fail when they are told to."""

    failure: ProviderFailed | None = None
    names: list[str] = field(default_factory=list)
    created: int = 0
    prolonged: int = 0
    on_create: Any = None

    def may_stand_for(self, payload: Payload) -> bool:
        return bool(payload.static_text)

    async def create(self, payload: Payload, *, lifetime_seconds: int, label: str) -> ExplicitCache:
        assert (payload.cached_content, label) == (None, "strata")
        if self.failure is not None:
            raise self.failure
        self.created += 1
        name = f"cachedContents/{self.created}"
        self.names.append(name)
        if self.on_create is not None:
            await self.on_create()
        return ExplicitCache(name=name, expires_at=in_an_hour(lifetime_seconds / 60), token_count=5_000)

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


def keeper_of(register: PostgresCacheRegister, caches: FakeCaches, budget: str = "1") -> CacheKeeper:
    providers = cast(Mapping[str, Provider], {"gemini": FakeProvider(caches=caches)})
    return CacheKeeper(register, providers, TokenEstimate(), budget_usd_per_hour=Decimal(budget))


def asked(
    tenant: Tenant, conversation_id: str, cache: RegisteredCache | None = None, *, was_gone: bool = False
) -> Asked:
    plan = CachePlan(
        payload=replace(build_payload(MODEL, [b"{}"]), static_text=TEXT),
        expectation=CacheExpectation(),
        key=KEY,
        settings=CacheSettings(explicit=ExplicitChoice.ON),
        may_have_cache=True,
        cache=cache,
    )
    return Asked(
        tenant_id=tenant.id,
        conversation_id=conversation_id,
        plan=plan,
        usage=Usage(),
        started_at=datetime.now(UTC),
        was_gone=was_gone,
    )


async def tell(keeper: CacheKeeper, *turns: Asked) -> None:
    for turn in turns:
        keeper.turn_asked(turn)
    await keeper.settle()


async def test_conversations_that_begin_at_once_get_one_cache(
    register: PostgresCacheRegister, store: PostgresStore, tenant: Tenant
) -> None:
    conversations = [await converse(store, tenant) for _ in range(5)]
    caches = FakeCaches()
    await tell(keeper_of(register, caches), *(asked(tenant, one) for one in conversations))
    assert caches.created == 1
    assert len({await used_by(store, tenant, one) for one in conversations}) == 1


async def test_a_process_that_was_too_late_removes_its_own(
    register: PostgresCacheRegister, store: PostgresStore, tenant: Tenant
) -> None:
    mine, theirs = [await converse(store, tenant) for _ in range(2)]
    caches = FakeCaches()
    caches.on_create = lambda: add(register, tenant, theirs, name="cachedContents/theirs")
    await tell(keeper_of(register, caches), asked(tenant, mine))
    assert (caches.created, caches.names) == (1, [])
    found = await used_by(store, tenant, mine)
    assert found is not None
    assert found.name == "cachedContents/theirs"


async def test_a_conversation_that_was_erased_meanwhile_leaves_no_cache(
    register: PostgresCacheRegister, store: PostgresStore, tenant: Tenant
) -> None:
    conversation = await converse(store, tenant)
    caches = FakeCaches()
    caches.on_create = lambda: store.erase_conversation(tenant.id, conversation)
    await tell(keeper_of(register, caches), asked(tenant, conversation))
    assert (caches.created, caches.names) == (1, [])
    assert await register.measure_caches() == {}


async def test_a_provider_that_refuses_is_not_asked_again_at_once(
    register: PostgresCacheRegister, store: PostgresStore, tenant: Tenant
) -> None:
    conversation = await converse(store, tenant)
    caches = FakeCaches(failure=ProviderRejected())
    keeper = keeper_of(register, caches)
    await tell(keeper, asked(tenant, conversation))
    caches.failure = None
    await tell(keeper, asked(tenant, conversation))
    assert caches.created == 0
    assert await used_by(store, tenant, conversation) is None


async def test_without_a_budget_none_is_made(
    register: PostgresCacheRegister, store: PostgresStore, tenant: Tenant
) -> None:
    caches = FakeCaches()
    await tell(keeper_of(register, caches, "0"), asked(tenant, await converse(store, tenant)))
    assert caches.created == 0


@pytest.mark.parametrize(
    ("failure", "kept", "prolonged"), [(None, True, 1), (CacheGone(), False, 0), (ProviderUnavailable(), True, 0)]
)
async def test_a_cache_that_cannot_be_prolonged_is_kept_unless_it_is_gone(
    register: PostgresCacheRegister,
    store: PostgresStore,
    tenant: Tenant,
    failure: ProviderFailed | None,
    *,
    kept: bool,
    prolonged: int,
) -> None:
    conversation = await converse(store, tenant)
    cache = await add(register, tenant, conversation, expires_at=in_an_hour(5))
    caches = FakeCaches(failure=failure)
    await tell(keeper_of(register, caches), asked(tenant, conversation, cache))
    assert (await used_by(store, tenant, conversation) is not None) is kept
    assert caches.prolonged == prolonged


async def test_a_cache_that_cannot_be_removed_is_tried_again(
    register: PostgresCacheRegister, store: PostgresStore, tenant: Tenant, database: Database
) -> None:
    conversation = await converse(store, tenant)
    await add(register, tenant, conversation)
    await store.erase_conversation(tenant.id, conversation)
    caches = FakeCaches(failure=ProviderUnavailable(), names=["cachedContents/1"])
    keeper = keeper_of(register, caches)
    assert await keeper.sweep() == 0
    assert await register.measure_caches() == {MODEL: 5_000}
    async with database.connection() as connection:
        await connection.execute("UPDATE provider_caches SET removing_at = removing_at - interval '6 minutes'")
    caches.failure = None
    assert await keeper.sweep() == 1
    assert (caches.names, await register.measure_caches()) == ([], {})


async def test_a_keeper_of_nothing_watches_nothing(register: PostgresCacheRegister) -> None:
    async with asyncio.timeout(5):
        await CacheKeeper(register, {}, TokenEstimate(), budget_usd_per_hour=Decimal(1)).watch()


async def test_closing_ends_what_is_under_way(
    register: PostgresCacheRegister, store: PostgresStore, tenant: Tenant
) -> None:
    never = asyncio.Event()
    caches = FakeCaches(on_create=never.wait)
    keeper = keeper_of(register, caches)
    keeper.turn_asked(asked(tenant, await converse(store, tenant)))
    async with asyncio.timeout(5):
        await keeper.close()
        await keeper.settle()
