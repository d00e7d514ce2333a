"""The register of explicit caches on Postgres. Each method is one statement, the sweep three, a reservation four.

A reservation is a row without a name. Reservations are made under one lock, so that each of them counts all others.

A statement that joins a cache locks the conversation's row, as a running turn does: either an erasure waits for it, or
it finds no conversation and writes nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import asyncpg

from server.conversation.cache_register import CacheKey, RegisteredCache
from server.conversation.errors import ConversationNotFound
from server.conversation.identifiers import CONVERSATION, TENANT, decode_id, new_uuid
from server.postgres.codec import decode_text
from server.postgres.engine import Database, Statement
from server.postgres.rows import cache_from

_RESERVATION_LOCK: Final = 0x5354524154410002
_COLUMNS: Final = """id AS cache_id, provider AS cache_provider, account AS cache_account, model AS cache_model,
    prefix_hash AS cache_prefix_hash, name AS cache_name, token_count AS cache_token_count,
    expires_at AS cache_expires_at"""
_HELD_SQL: Final = """
WITH held AS (
    SELECT id FROM conversations WHERE id = :conversation AND (tenant_id = :tenant) IS TRUE FOR KEY SHARE
),"""
_USE_SQL: Final = """
used AS (
    INSERT INTO provider_cache_uses (conversation_id, cache_id)
    SELECT :conversation::uuid, found.id FROM held, found
    ON CONFLICT DO NOTHING
),
left_behind AS (
    DELETE FROM provider_cache_uses
    WHERE conversation_id = :conversation AND EXISTS (SELECT FROM held) AND cache_id NOT IN (SELECT id FROM found)
)"""

_JOIN: Final = Statement(f"""{_HELD_SQL}
found AS (
    SELECT k.* FROM held CROSS JOIN provider_caches k
    WHERE k.tenant_id = :tenant AND k.provider = :provider AND k.account = :account AND k.model = :model
        AND k.prefix_hash = :prefix_hash AND k.removing_at IS NULL AND k.expires_at > now() AND k.name <> ''
    FOR SHARE OF k
),{_USE_SQL}
SELECT held.id AS conversation_id, shown.*
FROM held LEFT JOIN (SELECT {_COLUMNS} FROM found) AS shown ON true
""")  # noqa: S608  reason: constants of this module only

_LOCK: Final = Statement(f"SELECT pg_advisory_xact_lock({_RESERVATION_LOCK})")
_DROP_EXPIRED_OF_KEY: Final = Statement("""
WITH over AS (
    DELETE FROM provider_caches
    WHERE tenant_id = :tenant AND provider = :provider AND account = :account AND model = :model
        AND prefix_hash = :prefix_hash AND removing_at IS NULL AND expires_at <= now()
    RETURNING id
)
DELETE FROM provider_cache_uses WHERE cache_id IN (SELECT id FROM over)
""")
_RESERVE: Final = Statement("""
INSERT INTO provider_caches (id, tenant_id, provider, account, model, prefix_hash, name, token_count, expires_at)
VALUES (:cache::uuid, :tenant::uuid, :provider::text, :account::text, :model::text, :prefix_hash::bytea, '',
    :token_count::bigint, :expires_at::timestamptz)
ON CONFLICT (tenant_id, provider, account, model, prefix_hash) WHERE removing_at IS NULL DO NOTHING
RETURNING id
""")
_ADD: Final = Statement(f"""{_HELD_SQL}
found AS (
    UPDATE provider_caches SET name = :name::text, token_count = :token_count::bigint, created_at = now(),
        expires_at = :expires_at::timestamptz
    WHERE id = :cache AND tenant_id = :tenant AND name = '' AND removing_at IS NULL AND EXISTS (SELECT FROM held)
    RETURNING *
),{_USE_SQL}
SELECT held.id AS conversation_id, shown.*
FROM held LEFT JOIN (SELECT {_COLUMNS} FROM found) AS shown ON true
""")  # noqa: S608  reason: constants of this module only

_PROLONG: Final = Statement(
    "UPDATE provider_caches SET expires_at = greatest(expires_at, :expires_at::timestamptz) WHERE id = :cache"
)
_DROP: Final = Statement("""
WITH gone AS (
    DELETE FROM provider_cache_uses WHERE cache_id = :cache
)
DELETE FROM provider_caches WHERE id = :cache
""")
_DROP_EXPIRED: Final = Statement("""
WITH over AS (
    DELETE FROM provider_caches
    WHERE id IN (SELECT id FROM provider_caches WHERE expires_at <= now() FOR UPDATE SKIP LOCKED)
    RETURNING id
)
DELETE FROM provider_cache_uses WHERE cache_id IN (SELECT id FROM over)
""")
_END_USES: Final = Statement("""
DELETE FROM provider_cache_uses
WHERE (conversation_id, cache_id) IN (
    SELECT u.conversation_id, u.cache_id
    FROM provider_cache_uses u
    JOIN provider_caches k ON k.id = u.cache_id
    JOIN conversations c ON c.id = u.conversation_id
    JOIN epochs e ON e.conversation_id = c.id AND e.number = c.epoch
    JOIN assistants a ON a.id = c.assistant_id AND a.version = e.assistant_version
    WHERE (e.prefix_hash, a.provider, a.model) IS DISTINCT FROM (k.prefix_hash, k.provider, k.model)
    FOR UPDATE OF u SKIP LOCKED
)
""")
_CLAIM: Final = Statement(f"""
UPDATE provider_caches SET removing_at = now()
WHERE id IN (
    SELECT id FROM provider_caches k
    WHERE account = ANY(:accounts::text[]) AND (
        removing_at < now() - interval '5 minutes'
        OR removing_at IS NULL AND NOT EXISTS (SELECT FROM provider_cache_uses WHERE cache_id = k.id)
            AND (name <> '' OR created_at < now() - interval '5 minutes')
    )
    LIMIT :limit
    FOR UPDATE SKIP LOCKED
)
RETURNING {_COLUMNS}
""")  # noqa: S608  reason: constants of this module only
_MEASURE: Final = Statement("""
SELECT model, sum(token_count) AS token_count FROM provider_caches WHERE expires_at > now() GROUP BY model
""")


class PostgresCacheRegister:
    """Implements `server.conversation.cache_register.CacheRegister`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def join_cache(self, tenant_id: str, conversation_id: str, key: CacheKey) -> RegisteredCache | None:
        rows = await self._database.run(_JOIN, **_conversation_values(tenant_id, conversation_id), **_key_values(key))
        if not rows:
            raise ConversationNotFound
        return None if rows[0]["cache_id"] is None else cache_from(rows[0])

    async def reserve_cache(
        self,
        tenant_id: str,
        key: CacheKey,
        *,
        token_count: int,
        expires_at: datetime,
        fits: Callable[[Mapping[str, int]], bool],
    ) -> UUID | None:
        reservation = {"tenant": decode_id(TENANT, tenant_id), **_key_values(key)}
        async with self._database.transaction() as connection:
            await _LOCK.fetch(connection)
            await _DROP_EXPIRED_OF_KEY.fetch(connection, **reservation)
            kept = _read_measure(await _MEASURE.fetch(connection))
            if not fits(kept | {key.model: kept.get(key.model, 0) + token_count}):
                return None
            rows = await _RESERVE.fetch(
                connection, **reservation, cache=new_uuid(), token_count=token_count, expires_at=expires_at
            )
        return rows[0]["id"] if rows else None

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
        rows = await self._database.run(
            _ADD,
            # A second run after a lost connection would find the reservation already filled.
            repeatable=False,
            **_conversation_values(tenant_id, conversation_id),
            cache=cache_id,
            name=name,
            token_count=token_count,
            expires_at=expires_at,
        )
        if not rows:
            raise ConversationNotFound
        return None if rows[0]["cache_id"] is None else cache_from(rows[0])

    async def prolong_cache(self, cache_id: UUID, expires_at: datetime) -> None:
        await self._database.run(_PROLONG, cache=cache_id, expires_at=expires_at)

    async def drop_cache(self, cache_id: UUID) -> None:
        await self._database.run(_DROP, cache=cache_id)

    async def claim_unused_caches(self, accounts: Sequence[str], *, limit: int = 100) -> Sequence[RegisteredCache]:
        await self._database.run(_DROP_EXPIRED)
        await self._database.run(_END_USES)
        rows = await self._database.run(_CLAIM, accounts=list(accounts), limit=limit)
        return [cache_from(row) for row in rows]

    async def measure_caches(self) -> Mapping[str, int]:
        return _read_measure(await self._database.run(_MEASURE))


def _read_measure(rows: Sequence[asyncpg.Record]) -> dict[str, int]:
    return {decode_text(row["model"]): int(row["token_count"]) for row in rows}


def _conversation_values(tenant_id: str, conversation_id: str) -> dict[str, Any]:
    return {"conversation": decode_id(CONVERSATION, conversation_id), "tenant": decode_id(TENANT, tenant_id)}


def _key_values(key: CacheKey) -> dict[str, Any]:
    return {
        "provider": key.provider,
        "account": key.account,
        "model": key.model,
        "prefix_hash": key.prefix_hash,
    }
