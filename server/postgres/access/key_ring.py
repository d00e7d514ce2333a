"""Tenants and API keys. Creating and revoking a key writes the audit log in the same statement."""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from asyncpg import exceptions as pg
from sqlalchemy import bindparam, select
from sqlalchemy.dialects.postgresql import insert

from server.conversation.api_key import ApiKey, PresentedKey, Scope, Tenant, issue_key_text, parse_key_text
from server.conversation.audit import OPERATOR, Action, Actor, AuditDraft
from server.conversation.errors import ApiKeyNotFound, Internal, TenantExists, TenantNotFound
from server.conversation.identifiers import API_KEY, TENANT, decode_id, encode_id, new_id, new_uuid
from server.postgres.access.key_cache import KeyCache
from server.postgres.access.tables import api_keys, tenants
from server.postgres.codec import decode_text
from server.postgres.engine import Database, Statement
from server.postgres.inspection.audit_log import AUDIT_COLUMNS, AUDIT_VALUES, audit_values
from server.postgres.notifications import KEY_CHANNEL
from server.postgres.rows import Row

_k = api_keys.c
_KEY_COLUMNS: Final = (
    _k.id,
    _k.tenant_id,
    tenants.c.name.label("tenant_name"),
    _k.name,
    _k.scopes,
    _k.created_at,
    _k.expires_at,
    _k.revoked_at,
    _k.last_used_at,
)
_KEYS: Final = select(*_KEY_COLUMNS).select_from(api_keys.join(tenants, tenants.c.id == _k.tenant_id)).order_by(_k.id)

_CREATE_TENANT: Final = Statement(
    insert(tenants).values(id=bindparam("tenant"), name=bindparam("name")).returning(tenants)
)
_LOAD_TENANT: Final = Statement(select(tenants).where(tenants.c.name == bindparam("name")))
_LIST_TENANTS: Final = Statement(select(tenants).order_by(tenants.c.name))
# A repeated statement finds the key, and writes no second entry.
_CREATE_KEY: Final = Statement(f"""
WITH made AS (
    INSERT INTO api_keys (id, tenant_id, name, secret_hash, scopes, expires_at)
    SELECT :key, t.id, :name, :secret_hash, :scopes, :expires_at FROM tenants t WHERE t.id = :tenant
    ON CONFLICT (id) DO NOTHING
    RETURNING tenant_id
)
INSERT INTO audit_log ({AUDIT_COLUMNS})
SELECT {AUDIT_VALUES.replace(":audit_tenant::uuid", "made.tenant_id")} FROM made
ON CONFLICT (id) DO NOTHING
""")  # noqa: S608  reason: constants of this module only
# Records the use in the same round trip, at most once a minute, so that most lookups only read.
FIND_LIVE_KEY: Final = Statement("""
WITH found AS (
    SELECT k.*, t.name AS tenant_name
    FROM api_keys k JOIN tenants t ON t.id = k.tenant_id
    WHERE k.id = :key AND k.revoked_at IS NULL AND (k.expires_at IS NULL OR k.expires_at > now())
),
used AS (
    UPDATE api_keys SET last_used_at = now()
    FROM found
    WHERE api_keys.id = found.id AND found.secret_hash = :secret_hash
        AND (found.last_used_at IS NULL OR found.last_used_at < now() - interval '1 minute')
)
SELECT * FROM found
""")
_LOAD_KEY: Final = Statement(_KEYS.where(_k.id == bindparam("key"), _k.tenant_id == bindparam("tenant")))
_LIST_KEYS: Final = Statement(_KEYS)
_LIST_TENANT_KEYS: Final = Statement(_KEYS.where(_k.tenant_id == bindparam("tenant")))
# The notification removes the key from the caches of all processes. The audit entry belongs to the key's tenant.
_REVOKE_KEY: Final = Statement(f"""
WITH revoked AS (
    UPDATE api_keys k SET revoked_at = coalesce(k.revoked_at, now())
    FROM tenants t
    WHERE k.id = :key AND t.id = k.tenant_id
    RETURNING k.*, t.name AS tenant_name
),
audited AS (
    INSERT INTO audit_log ({AUDIT_COLUMNS})
    SELECT {AUDIT_VALUES.replace(":audit_tenant::uuid", "revoked.tenant_id")} FROM revoked
    ON CONFLICT (id) DO NOTHING
)
SELECT revoked.*, pg_notify('{KEY_CHANNEL}', id::text) IS NULL FROM revoked
""")  # noqa: S608  reason: constants of this module only


class PostgresKeyRing:
    """Implements `server.conversation.api_key.KeyRing`."""

    def __init__(self, database: Database, cache: KeyCache | None = None) -> None:
        self._database = database
        self._cache = cache

    async def create_tenant(self, name: str) -> Tenant:
        try:
            rows = await self._database.run(_CREATE_TENANT, repeatable=False, tenant=new_uuid(), name=name)
        except pg.UniqueViolationError as error:
            raise TenantExists(f"A tenant called {name} already exists.") from error
        return _tenant_from(rows[0])

    async def load_tenant(self, name: str) -> Tenant:
        rows = await self._database.run(_LOAD_TENANT, name=name)
        if not rows:
            raise TenantNotFound(f"There is no tenant called {name}.")
        return _tenant_from(rows[0])

    async def list_tenants(self) -> Sequence[Tenant]:
        return [_tenant_from(row) for row in await self._database.run(_LIST_TENANTS)]

    async def create_key(
        self,
        *,
        tenant_id: str,
        name: str,
        scopes: frozenset[Scope],
        expires_at: datetime | None,
        by: Actor = OPERATOR,
    ) -> tuple[ApiKey, str]:
        key_id = new_id(API_KEY)
        text = issue_key_text(key_id)
        presented = parse_key_text(text)
        if presented is None:
            raise Internal
        details = {"scopes": sorted(scopes), "expires_at": None if expires_at is None else expires_at.isoformat()}
        draft = AuditDraft(tenant_id=None, actor=by, action=Action.CREATE_KEY, object_id=key_id, details=details)
        await self._database.run(
            _CREATE_KEY,
            key=decode_id(API_KEY, key_id),
            tenant=decode_id(TENANT, tenant_id),
            name=name,
            secret_hash=presented.secret_hash,
            scopes=sorted(scopes),
            expires_at=expires_at,
            **audit_values(draft),
        )
        try:
            return await self.load_key(tenant_id=tenant_id, key_id=key_id), text
        except ApiKeyNotFound:
            raise TenantNotFound from None

    async def find_live_key(self, presented: PresentedKey) -> ApiKey | None:
        if self._cache is None:
            return await self._load_live_key(presented)
        return await self._cache.find(presented, self._load_live_key)

    async def _load_live_key(self, presented: PresentedKey) -> ApiKey | None:
        rows = await self._database.run(
            FIND_LIVE_KEY, key=decode_id(API_KEY, presented.id), secret_hash=presented.secret_hash
        )
        if not rows or not presented.matches(rows[0]["secret_hash"]):
            return None
        return key_from(rows[0])

    async def load_key(self, *, tenant_id: str, key_id: str) -> ApiKey:
        rows = await self._database.run(_LOAD_KEY, key=decode_id(API_KEY, key_id), tenant=decode_id(TENANT, tenant_id))
        if not rows:
            raise ApiKeyNotFound
        return key_from(rows[0])

    async def list_keys(self, tenant_id: str | None = None) -> Sequence[ApiKey]:
        if tenant_id is None:
            rows = await self._database.run(_LIST_KEYS)
        else:
            rows = await self._database.run(_LIST_TENANT_KEYS, tenant=decode_id(TENANT, tenant_id))
        return [key_from(row) for row in rows]

    async def revoke_key(self, key_id: str, by: Actor = OPERATOR) -> ApiKey:
        draft = AuditDraft(tenant_id=None, actor=by, action=Action.REVOKE_KEY, object_id=key_id)
        try:
            rows = await self._database.run(_REVOKE_KEY, key=decode_id(API_KEY, key_id), **audit_values(draft))
        finally:
            # Also after an error: the key may be revoked and the answer lost.
            if self._cache is not None:
                self._cache.remove(key_id)
        if not rows:
            raise ApiKeyNotFound
        return key_from(rows[0])


def _tenant_from(row: Row) -> Tenant:
    return Tenant(id=encode_id(TENANT, row["id"]), name=decode_text(row["name"]), created_at=row["created_at"])


def key_from(row: Row) -> ApiKey:
    """Read a key from a row that includes the name of its tenant."""
    return ApiKey(
        id=encode_id(API_KEY, row["id"]),
        tenant_id=encode_id(TENANT, row["tenant_id"]),
        tenant_name=decode_text(row["tenant_name"]),
        name=decode_text(row["name"]),
        scopes=frozenset(Scope(scope) for scope in row["scopes"]),
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        revoked_at=row["revoked_at"],
        last_used_at=row["last_used_at"],
    )
