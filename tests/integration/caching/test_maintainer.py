"""The maintainer of explicit caches under failures of the provider and concurrent processes."""

import asyncio
from dataclasses import replace
from decimal import Decimal

import pytest

from server.caching.maintainer import CacheMaintainer
from server.conversation.api_key import Tenant
from server.conversation.errors import (
    CacheGone,
    ProviderFailed,
    ProviderRejected,
    ProviderTimedOut,
    ProviderUnavailable,
)
from server.postgres.caching import PostgresCacheRegister
from server.postgres.engine import Database
from server.postgres.store import PostgresStore
from server.providers.token_estimate import TokenEstimate
from tests.support.cache_builders import (
    KEY,
    MODEL,
    FakeCaches,
    add,
    age_places,
    asked,
    converse,
    in_an_hour,
    maintainer_of,
    observe,
    used_by,
)


@pytest.fixture
def register(database: Database) -> PostgresCacheRegister:
    return PostgresCacheRegister(database)


async def test_concurrent_first_turns_get_one_cache(
    register: PostgresCacheRegister, store: PostgresStore, tenant: Tenant
) -> None:
    conversations = [await converse(store, tenant) for _ in range(5)]
    caches = FakeCaches()
    await observe(maintainer_of(register, caches), *(asked(tenant, one) for one in conversations))
    assert caches.created == 1
    assert len({await used_by(store, tenant, one) for one in conversations}) == 1


async def test_two_processes_create_one_cache_for_one_prefix(
    register: PostgresCacheRegister, store: PostgresStore, tenant: Tenant
) -> None:
    conversations = [await converse(store, tenant) for _ in range(2)]
    caches = FakeCaches()
    keepers = [maintainer_of(register, caches) for _ in conversations]
    for maintainer, conversation in zip(keepers, conversations, strict=True):
        maintainer.observe_call(asked(tenant, conversation))
    for maintainer in keepers:
        await maintainer.settle()
    assert caches.created == 1


async def test_two_processes_together_stay_within_the_budget(
    register: PostgresCacheRegister, store: PostgresStore, tenant: Tenant
) -> None:
    """Some 7,500 tokens each at 4.50 USD per million and hour: one fits, two do not."""
    caches = FakeCaches()
    keepers = [maintainer_of(register, caches, "0.05") for _ in range(4)]
    for number, maintainer in enumerate(keepers):
        turn = asked(tenant, await converse(store, tenant))
        key = replace(KEY, prefix_hash=bytes([number]))
        maintainer.observe_call(replace(turn, plan=replace(turn.plan, key=key)))
    for maintainer in keepers:
        await maintainer.settle()
    assert caches.created == 1


async def test_a_process_that_was_too_slow_deletes_its_own_cache(
    register: PostgresCacheRegister, store: PostgresStore, tenant: Tenant, database: Database
) -> None:
    conversation = await converse(store, tenant)
    caches = FakeCaches()

    async def be_slow() -> None:
        await age_places(database)
        assert len(await register.claim_unused_caches(["a"])) == 1

    caches.on_create = be_slow
    await observe(maintainer_of(register, caches), asked(tenant, conversation))
    assert (caches.created, caches.names) == (1, [])
    assert (await used_by(store, tenant, conversation), await register.measure_caches()) == (None, {})


@pytest.mark.parametrize("was_made", [True, False])
async def test_a_process_that_dies_while_creating_a_cache_leaves_one_that_others_find_by_its_label(
    register: PostgresCacheRegister, store: PostgresStore, tenant: Tenant, database: Database, *, was_made: bool
) -> None:
    caches, at_it, never = FakeCaches(names=["cachedContents/another"]), asyncio.Event(), asyncio.Event()

    async def die() -> None:
        if not was_made:
            caches.names.pop()
        at_it.set()
        await never.wait()

    caches.on_create = die
    dying, living = maintainer_of(register, caches), maintainer_of(register, caches)
    dying.observe_call(asked(tenant, await converse(store, tenant)))
    await at_it.wait()
    await dying.close()
    assert await register.measure_caches() == {MODEL: dying._estimate_static(asked(tenant, "").plan.payload)}  # noqa: SLF001  reason: the same estimate
    assert await living.sweep() == 0
    await age_places(database)
    assert await living.sweep() == 1
    assert (caches.names, await register.measure_caches()) == (["cachedContents/another"], {})


@pytest.mark.parametrize(("failure", "may_be_there"), [(ProviderRejected(), False), (ProviderTimedOut(), True)])
async def test_only_a_refusal_proves_that_no_cache_was_created(
    register: PostgresCacheRegister,
    store: PostgresStore,
    tenant: Tenant,
    failure: ProviderFailed,
    *,
    may_be_there: bool,
) -> None:
    await observe(maintainer_of(register, FakeCaches(failure=failure)), asked(tenant, await converse(store, tenant)))
    assert bool(await register.measure_caches()) is may_be_there


async def test_a_conversation_that_was_erased_meanwhile_leaves_no_cache(
    register: PostgresCacheRegister, store: PostgresStore, tenant: Tenant
) -> None:
    conversation = await converse(store, tenant)
    caches = FakeCaches()
    caches.on_create = lambda: store.erase_conversation(tenant.id, conversation)
    await observe(maintainer_of(register, caches), asked(tenant, conversation))
    assert (caches.created, caches.names) == (1, [])
    assert await register.measure_caches() == {}


async def test_a_refusing_provider_is_not_called_again_at_once(
    register: PostgresCacheRegister, store: PostgresStore, tenant: Tenant
) -> None:
    conversation = await converse(store, tenant)
    caches = FakeCaches(failure=ProviderRejected())
    maintainer = maintainer_of(register, caches)
    await observe(maintainer, asked(tenant, conversation))
    caches.failure = None
    await observe(maintainer, asked(tenant, conversation))
    assert caches.created == 0
    assert await used_by(store, tenant, conversation) is None


async def test_without_a_budget_no_cache_is_created(
    register: PostgresCacheRegister, store: PostgresStore, tenant: Tenant
) -> None:
    caches = FakeCaches()
    await observe(maintainer_of(register, caches, "0"), asked(tenant, await converse(store, tenant)))
    assert caches.created == 0


@pytest.mark.parametrize(
    ("failure", "kept", "prolonged"), [(None, True, 1), (CacheGone(), False, 0), (ProviderUnavailable(), True, 0)]
)
async def test_a_cache_that_cannot_be_extended_is_kept_unless_it_is_missing(
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
    await observe(maintainer_of(register, caches), asked(tenant, conversation, cache))
    assert (await used_by(store, tenant, conversation) is not None) is kept
    assert caches.prolonged == prolonged


async def test_deleting_a_cache_is_retried(
    register: PostgresCacheRegister, store: PostgresStore, tenant: Tenant, database: Database
) -> None:
    conversation = await converse(store, tenant)
    await add(register, tenant, conversation)
    await store.erase_conversation(tenant.id, conversation)
    caches = FakeCaches(failure=ProviderUnavailable(), names=["cachedContents/1"])
    maintainer = maintainer_of(register, caches)
    assert await maintainer.sweep() == 0
    assert await register.measure_caches() == {MODEL: 5_000}
    async with database.connection() as connection:
        await connection.execute("UPDATE provider_caches SET removing_at = removing_at - interval '6 minutes'")
    caches.failure = None
    assert await maintainer.sweep() == 1
    assert (caches.names, await register.measure_caches()) == ([], {})


async def test_a_maintainer_without_providers_observes_nothing(register: PostgresCacheRegister) -> None:
    async with asyncio.timeout(5):
        await CacheMaintainer(register, {}, TokenEstimate(), budget_usd_per_hour=Decimal(1)).watch()


async def test_closing_cancels_running_work(
    register: PostgresCacheRegister, store: PostgresStore, tenant: Tenant
) -> None:
    creating, never = asyncio.Event(), asyncio.Event()

    async def create_forever() -> None:
        creating.set()
        await never.wait()

    maintainer = maintainer_of(register, FakeCaches(on_create=create_forever))
    maintainer.observe_call(asked(tenant, await converse(store, tenant)))
    async with asyncio.timeout(5):
        await creating.wait()
        assert "maintain explicit cache" in {task.get_name() for task in asyncio.all_tasks()}
        await maintainer.close()
        await maintainer.settle()
    assert "maintain explicit cache" not in {task.get_name() for task in asyncio.all_tasks()}
