"""The key cache with a database: a key that is revoked in one process is rejected in all."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from server.conversation.api_key import PresentedKey, Scope, Tenant, parse_key_text
from server.conversation.errors import DatabaseUnavailable
from server.conversation.identifiers import API_KEY, decode_id
from server.postgres.access.key_cache import KeyCache
from server.postgres.access.key_ring import PostgresKeyRing
from server.postgres.engine import Database
from server.postgres.notifications import KEY_CHANNEL, PostgresNotifications

LONG = 20.0
"""Seconds to wait for something that must happen; only a failure takes them."""


@asynccontextmanager
async def open_process(database: Database) -> AsyncIterator[tuple[PostgresKeyRing, PostgresNotifications]]:
    async with PostgresNotifications(database.options) as listener:
        async with asyncio.timeout(LONG):
            await listener.wait_until_listening()
        yield PostgresKeyRing(database, KeyCache(listener)), listener


async def make_key(key_ring: PostgresKeyRing, tenant: Tenant) -> tuple[str, PresentedKey]:
    key, text = await key_ring.create_key(
        tenant_id=tenant.id, name="k", scopes=frozenset({Scope.CLIENT}), expires_at=None
    )
    presented = parse_key_text(text)
    assert presented is not None
    return key.id, presented


async def test_revoking_in_one_process_takes_effect_in_another(
    database: Database, key_ring: PostgresKeyRing, tenant: Tenant
) -> None:
    key_id, presented = await make_key(key_ring, tenant)
    async with open_process(database) as (here, _), open_process(database) as (there, their_listener):
        received = asyncio.Event()
        their_listener.listen(KEY_CHANNEL, on_payload=lambda _: received.set(), on_gap=lambda: None)
        for keys in (here, there):
            assert await keys.find_live_key(presented) is not None
        revoked = await here.revoke_key(key_id)
        assert await here.find_live_key(presented) is None
        await asyncio.wait_for(received.wait(), LONG)
        assert await there.find_live_key(presented) is None
        assert (await there.revoke_key(key_id)).revoked_at == revoked.revoked_at


async def test_a_key_that_the_command_line_revokes_is_rejected(
    database: Database, key_ring: PostgresKeyRing, tenant: Tenant
) -> None:
    key_id, presented = await make_key(key_ring, tenant)
    async with open_process(database) as (keys, listener):
        received = asyncio.Event()
        listener.listen(KEY_CHANNEL, on_payload=lambda _: received.set(), on_gap=lambda: None)
        assert await keys.find_live_key(presented) is not None
        await key_ring.revoke_key(key_id)
        await asyncio.wait_for(received.wait(), LONG)
        assert await keys.find_live_key(presented) is None


async def test_a_revocation_whose_answer_was_lost_takes_effect_too(
    database: Database, key_ring: PostgresKeyRing, tenant: Tenant
) -> None:
    key_id, presented = await make_key(key_ring, tenant)
    async with PostgresNotifications(database.options) as listener:
        async with asyncio.timeout(LONG):
            await listener.wait_until_listening()
        cache = KeyCache(listener)
        keys = PostgresKeyRing(database, cache)
        closed = Database(database.options)
        assert await PostgresKeyRing(closed, cache).find_live_key(presented) is not None
        await closed.close()
        async with database.connection() as connection:
            await connection.execute("UPDATE api_keys SET revoked_at = now() WHERE id = $1", decode_id(API_KEY, key_id))
        assert await keys.find_live_key(presented) is not None
        with pytest.raises(DatabaseUnavailable):
            await PostgresKeyRing(closed, cache).revoke_key(key_id)
        assert await keys.find_live_key(presented) is None


async def test_the_use_of_a_cached_key_is_recorded(
    database: Database, key_ring: PostgresKeyRing, tenant: Tenant
) -> None:
    key_id, presented = await make_key(key_ring, tenant)
    async with open_process(database) as (keys, _):
        for _ in range(2):
            assert await keys.find_live_key(presented) is not None
    assert (await key_ring.load_key(tenant_id=tenant.id, key_id=key_id)).last_used_at is not None
