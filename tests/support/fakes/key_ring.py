"""A key ring in memory: the whole port, with the clock of this machine."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from server.conversation.api_key import ApiKey, PresentedKey, Scope, Tenant, issue_key_text, parse_key_text
from server.conversation.audit import OPERATOR, Actor
from server.conversation.errors import ApiKeyNotFound, DatabaseUnavailable, TenantExists, TenantNotFound
from server.conversation.identifiers import API_KEY, TENANT, new_id


class InMemoryKeyRing:
    """Set `down` to make every method raise `DatabaseUnavailable`."""

    def __init__(self) -> None:
        self.down = False
        self.lookups = 0
        """How often a live key was requested."""
        self._tenants: dict[str, Tenant] = {}
        self._keys: dict[str, tuple[ApiKey, bytes]] = {}

    async def create_tenant(self, name: str) -> Tenant:
        self._reach()
        if any(tenant.name == name for tenant in self._tenants.values()):
            raise TenantExists
        tenant = Tenant(id=new_id(TENANT), name=name, created_at=datetime.now(UTC))
        self._tenants[tenant.id] = tenant
        return tenant

    async def load_tenant(self, name: str) -> Tenant:
        self._reach()
        for tenant in self._tenants.values():
            if tenant.name == name:
                return tenant
        raise TenantNotFound

    async def list_tenants(self) -> Sequence[Tenant]:
        self._reach()
        return sorted(self._tenants.values(), key=lambda tenant: tenant.name)

    async def create_key(
        self,
        *,
        tenant_id: str,
        name: str,
        scopes: frozenset[Scope],
        expires_at: datetime | None,
        by: Actor = OPERATOR,
    ) -> tuple[ApiKey, str]:
        self._reach()
        tenant = self._tenants.get(tenant_id)
        if tenant is None:
            raise TenantNotFound
        key = ApiKey(
            id=new_id(API_KEY),
            tenant_id=tenant.id,
            tenant_name=tenant.name,
            name=name,
            scopes=scopes,
            created_at=datetime.now(UTC),
            expires_at=expires_at,
            revoked_at=None,
            last_used_at=None,
        )
        text = issue_key_text(key.id)
        presented = parse_key_text(text)
        assert presented is not None
        self._keys[key.id] = (key, presented.secret_hash)
        return key, text

    async def find_live_key(self, presented: PresentedKey) -> ApiKey | None:
        self._reach()
        self.lookups += 1
        key, secret_hash = self._keys.get(presented.id, (None, b""))
        now = datetime.now(UTC)
        if key is None or not presented.matches(secret_hash) or not key.is_live(now):
            return None
        used = replace(key, last_used_at=now)
        self._keys[key.id] = (used, secret_hash)
        return used

    async def load_key(self, *, tenant_id: str, key_id: str) -> ApiKey:
        self._reach()
        key, _ = self._keys.get(key_id, (None, b""))
        if key is None or key.tenant_id != tenant_id:
            raise ApiKeyNotFound
        return key

    async def list_keys(self, tenant_id: str | None = None) -> Sequence[ApiKey]:
        self._reach()
        return [key for key, _ in self._keys.values() if tenant_id in {None, key.tenant_id}]

    async def revoke_key(self, key_id: str, by: Actor = OPERATOR) -> ApiKey:
        self._reach()
        if key_id not in self._keys:
            raise ApiKeyNotFound
        key, secret_hash = self._keys[key_id]
        revoked = replace(key, revoked_at=key.revoked_at or datetime.now(UTC))
        self._keys[key_id] = (revoked, secret_hash)
        return revoked

    def _reach(self) -> None:
        if self.down:
            raise DatabaseUnavailable
