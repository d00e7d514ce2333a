"""Tenants by the names that options give."""

from server.conversation.api_key import Tenant
from server.conversation.errors import TenantExists, TenantNotFound
from server.postgres.access.key_ring import PostgresKeyRing
from server.postgres.engine import Database


async def load_tenant_id(database: Database, name: str | None) -> str | None:
    """Return the id of the tenant with this name; None, which means all tenants, if there is no name.

    Raises `TenantNotFound`.
    """
    return None if name is None else (await PostgresKeyRing(database).load_tenant(name)).id


async def find_or_create_tenant(ring: PostgresKeyRing, name: str) -> Tenant:
    """Return the tenant with this name, which is created if it does not exist."""
    try:
        return await ring.load_tenant(name)
    except TenantNotFound:
        try:
            return await ring.create_tenant(name)
        except TenantExists:
            # Another process created it after the first attempt to load it.
            return await ring.load_tenant(name)
