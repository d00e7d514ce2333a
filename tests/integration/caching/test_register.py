"""The register of explicit caches: shared, counted, and complete."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from server.conversation.api_key import Tenant
from server.conversation.errors import (
    ConversationNotFound,
)
from server.conversation.identifiers import CONVERSATION, new_id
from server.postgres.caching import PostgresCacheRegister
from server.postgres.engine import Database
from server.postgres.store import PostgresStore
from tests.support.builders import epoch
from tests.support.cache_builders import (
    KEY,
    MODEL,
    add,
    age_places,
    converse,
    in_an_hour,
    reserve,
    used_by,
)


@pytest.fixture
def register(database: Database) -> PostgresCacheRegister:
    return PostgresCacheRegister(database)


async def test_a_cache_is_loaded_with_the_payload_of_its_users(
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
    place = await reserve(register, tenant, replace(KEY, model="m"))
    assert place is not None
    theirs = await converse(store, stranger)
    assert (
        await register.add_cache(stranger.id, theirs, place, name="n", token_count=1, expires_at=in_an_hour()) is None
    )
    with pytest.raises(ConversationNotFound):
        await register.join_cache(tenant.id, new_id(CONVERSATION), KEY)


async def test_only_one_of_concurrent_creators_gets_the_reservation(
    register: PostgresCacheRegister, store: PostgresStore, tenant: Tenant
) -> None:
    places = await asyncio.gather(*(reserve(register, tenant) for _ in range(4)))
    (place,) = [place for place in places if place is not None]
    conversation = await converse(store, tenant)
    assert await register.join_cache(tenant.id, conversation, KEY) is None
    assert await register.measure_caches() == {MODEL: 4_000}
    await register.drop_cache(place)
    assert await register.measure_caches() == {}
    await add(register, tenant, conversation)
    assert await reserve(register, tenant) is None


async def test_concurrent_reservations_do_not_exceed_a_limit_together(
    register: PostgresCacheRegister, tenant: Tenant
) -> None:
    """Each of eight would fit alone; together they have room for three."""
    keys = [replace(KEY, prefix_hash=bytes([number])) for number in range(8)]
    places = await asyncio.gather(
        *(
            register.reserve_cache(
                tenant.id,
                key,
                token_count=1_000,
                expires_at=in_an_hour(),
                fits=lambda kept: sum(kept.values()) <= 3_500,
            )
            for key in keys
        )
    )
    assert sum(place is not None for place in places) == 3
    assert await register.measure_caches() == {MODEL: 3_000}


async def test_an_unused_reservation_expires_and_cannot_be_used_afterwards(
    register: PostgresCacheRegister, store: PostgresStore, tenant: Tenant, database: Database
) -> None:
    place = await reserve(register, tenant)
    assert place is not None
    assert await register.claim_unused_caches(["a"]) == []
    await age_places(database)
    (claimed,) = await register.claim_unused_caches(["a"])
    assert (claimed.id, claimed.name, claimed.label) == (place, "", f"strata {place}")
    filled = await register.add_cache(
        tenant.id, await converse(store, tenant), place, name="n", token_count=1, expires_at=in_an_hour()
    )
    assert filled is None
    assert await reserve(register, tenant) not in {None, place}


async def test_an_expired_cache_is_replaced(
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


async def test_an_unused_cache_is_claimed_for_deletion_once_until_the_claim_expires(
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


async def test_another_epoch_ends_the_use(
    register: PostgresCacheRegister, store: PostgresStore, tenant: Tenant
) -> None:
    conversation = await converse(store, tenant)
    cache = await add(register, tenant, conversation)
    await store.begin_epoch(tenant.id, conversation, epoch(2, "You help otherwise."))
    assert await register.claim_unused_caches(["a"]) == [cache]
    assert await used_by(store, tenant, conversation) is None
