"""Remembered keys on the real key ring: a key that is revoked in one process opens nothing in another."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from server.conversation.api_key import PresentedKey, Scope, Tenant, parse_key_text
from server.postgres.access.key_cache import RememberedKeys
from server.postgres.access.key_ring import PostgresKeyRing
from server.postgres.engine import Database
from server.postgres.turns.channels import KEY_CHANNEL
from server.postgres.turns.notifications import PostgresNotifications

LONG = 20.0
"""Seconds for what must come; only a failure takes them."""


@asynccontextmanager
async def open_process(database: Database) -> AsyncIterator[tuple[RememberedKeys, PostgresNotifications]]:
    async with PostgresNotifications(database.options) as ears:
        async with asyncio.timeout(LONG):
            await ears.until_hearing()
        yield RememberedKeys(PostgresKeyRing(database), ears), ears


async def make_key(key_ring: PostgresKeyRing, tenant: Tenant) -> tuple[str, PresentedKey]:
    key, text = await key_ring.create_key(
        tenant_id=tenant.id, name="k", scopes=frozenset({Scope.CLIENT}), expires_at=None
    )
    presented = parse_key_text(text)
    assert presented is not None
    return key.id, presented


async def test_revoking_in_one_process_is_heard_in_another(
    database: Database, key_ring: PostgresKeyRing, tenant: Tenant
) -> None:
    key_id, presented = await make_key(key_ring, tenant)
    async with open_process(database) as (here, _), open_process(database) as (there, their_ears):
        heard = asyncio.Event()
        their_ears.listen(KEY_CHANNEL, heard=lambda _: heard.set(), missed=lambda: None)
        for keys in (here, there):
            assert await keys.find_live_key(presented) is not None
        revoked = await here.revoke_key(key_id)
        assert await here.find_live_key(presented) is None
        await asyncio.wait_for(heard.wait(), LONG)
        assert await there.find_live_key(presented) is None
        assert (await there.revoke_key(key_id)).revoked_at == revoked.revoked_at


async def test_a_key_that_the_command_line_revokes_is_heard_of(
    database: Database, key_ring: PostgresKeyRing, tenant: Tenant
) -> None:
    key_id, presented = await make_key(key_ring, tenant)
    async with open_process(database) as (keys, ears):
        heard = asyncio.Event()
        ears.listen(KEY_CHANNEL, heard=lambda _: heard.set(), missed=lambda: None)
        assert await keys.find_live_key(presented) is not None
        await key_ring.revoke_key(key_id)
        await asyncio.wait_for(heard.wait(), LONG)
        assert await keys.find_live_key(presented) is None


async def test_the_use_of_a_remembered_key_was_noted(
    database: Database, key_ring: PostgresKeyRing, tenant: Tenant
) -> None:
    key_id, presented = await make_key(key_ring, tenant)
    async with open_process(database) as (keys, _):
        for _ in range(2):
            assert await keys.find_live_key(presented) is not None
    assert (await key_ring.load_key(tenant_id=tenant.id, key_id=key_id)).last_used_at is not None
