"""Operators' sessions on Postgres.

Nothing is remembered by the process: each request asks for its session, its key among it, so that a key that is revoked
or expires ends its sessions everywhere at once. Logging in is one transaction of a few statements; it is rare, and its
attempts on one key or from one address wait for each other.
"""

import base64
from datetime import datetime
from typing import Any, Final

from server.admin_sessions import AdminSession, SessionLimits, hash_token, lock_subjects, new_secret
from server.api_key import ApiKey, PresentedKey, Scope
from server.audit import Action, Actor, AuditDraft, Outcome
from server.errors import KeyRejected, LoginLocked, ScopeMissing, StrataError
from server.identifiers import ADMIN_SESSION, API_KEY, TENANT, decode_id, encode_id, new_uuid
from server.postgres.auditing import AUDIT_COLUMNS, AUDIT_VALUES, audit_values
from server.postgres.codec import decode_text
from server.postgres.connecting import Connection
from server.postgres.engine import Database, Statement
from server.postgres.key_ring import FIND_LIVE_KEY, key_from
from server.postgres.rows import Row

# Counted from anew where the last failures are long ago; while it is locked nothing moves its end.
_COUNT: Final = Statement("""
INSERT INTO login_failures AS known (subject, failure_count)
SELECT subject, 1 FROM unnest(:subjects::text[]) AS subject ORDER BY subject
ON CONFLICT (subject) DO UPDATE SET
    failure_count = CASE
        WHEN known.locked_until > now() THEN known.failure_count
        WHEN known.locked_until IS NOT NULL OR known.began_at < now() - make_interval(secs => :lock_seconds) THEN 1
        ELSE known.failure_count + 1
    END,
    began_at = CASE
        WHEN known.locked_until > now() THEN known.began_at
        WHEN known.locked_until IS NOT NULL OR known.began_at < now() - make_interval(secs => :lock_seconds) THEN now()
        ELSE known.began_at
    END,
    locked_until = CASE WHEN known.locked_until > now() THEN known.locked_until END
RETURNING extract(epoch FROM locked_until - now())::float8 AS locked_seconds
""")
_LOCK: Final = Statement("""
UPDATE login_failures SET locked_until = now() + make_interval(secs => :lock_seconds)
WHERE locked_until IS NULL AND (
    (subject = :key_subject AND failure_count >= :key_failures)
    OR (subject = :address_subject AND failure_count >= :address_failures)
)
RETURNING subject
""")
# Who has the secret has not failed. Of an address only this attempt is taken back: others may try from there too.
_FORGIVE: Final = Statement("""
WITH forgiven AS (DELETE FROM login_failures WHERE subject = :key_subject)
UPDATE login_failures SET failure_count = failure_count - 1 WHERE subject = :address_subject AND failure_count > 0
""")
_SWEEP: Final = Statement("""
WITH sessions AS (DELETE FROM admin_sessions WHERE created_at < now() - make_interval(secs => :age_seconds))
DELETE FROM login_failures
WHERE began_at < now() - make_interval(secs => :lock_seconds) AND (locked_until IS NULL OR locked_until < now())
""")
_WHOSE: Final = Statement("SELECT tenant_id FROM api_keys WHERE id = :key")
_AUDIT: Final = Statement(
    f"INSERT INTO audit_log ({AUDIT_COLUMNS}) VALUES ({AUDIT_VALUES})"  # noqa: S608  reason: constants only
)
_OPEN: Final = Statement("""
INSERT INTO admin_sessions (id, tenant_id, api_key_id, token_hash, csrf_secret, address)
VALUES (:session, :tenant, :key, :token_hash, :csrf_secret, :address)
RETURNING created_at
""")
_FIND: Final = Statement("""
WITH found AS (
    SELECT k.*, t.name AS tenant_name, s.id AS session_id, s.csrf_secret, s.address,
        s.created_at AS session_created_at, s.last_seen_at
    FROM admin_sessions s JOIN api_keys k ON k.id = s.api_key_id JOIN tenants t ON t.id = k.tenant_id
    WHERE s.token_hash = :token_hash
        AND s.created_at > now() - make_interval(secs => :age_seconds)
        AND s.last_seen_at > now() - make_interval(secs => :idle_seconds)
        AND k.revoked_at IS NULL AND (k.expires_at IS NULL OR k.expires_at > now())
),
seen AS (
    UPDATE admin_sessions SET last_seen_at = now()
    FROM found
    WHERE admin_sessions.id = found.session_id
        AND found.last_seen_at < now() - make_interval(secs => least(60, :idle_seconds / 10))
)
SELECT * FROM found
""")
_CLOSE: Final = Statement(f"""
WITH closed AS (DELETE FROM admin_sessions WHERE id = :session RETURNING 1)
INSERT INTO audit_log ({AUDIT_COLUMNS}) SELECT {AUDIT_VALUES} FROM closed
""")  # noqa: S608  reason: constants only


class PostgresAdminSessions:
    """Implements `server.admin_sessions.AdminSessions`."""

    def __init__(self, database: Database, limits: SessionLimits) -> None:
        self._database = database
        self._limits = limits

    async def log_in(self, presented: PresentedKey | None, *, address: str | None) -> tuple[AdminSession, str]:
        key_subject, address_subject = lock_subjects(presented, address)
        subjects = {"key_subject": key_subject, "address_subject": address_subject}
        async with self._database.transaction() as connection:
            await self._sweep(connection)
            locked_seconds = await self._count(connection, subjects)
            key = None if locked_seconds or presented is None else await _find_key(connection, presented)
            refusal = _refusal_of(key, locked_seconds)
            if key is not None and refusal is None:
                await _run(connection, _FORGIVE, **subjects)
                return await _open(connection, key, address)
            locked = await self._lock(connection, subjects)
            if not locked_seconds:
                await _note_failure(connection, presented, key, address, refusal, locked=locked)
        # Outside the transaction, which would otherwise take back what was counted.
        raise refusal or KeyRejected()

    async def find_session(self, token: str) -> AdminSession | None:
        rows = await self._database.run(
            _FIND,
            token_hash=hash_token(token),
            age_seconds=self._limits.age_seconds,
            idle_seconds=self._limits.idle_seconds,
        )
        if not rows:
            return None
        session = _session_from(rows[0])
        return session if session.key.opens(Scope.ADMIN) else None

    async def log_out(self, session: AdminSession, *, address: str | None) -> None:
        draft = AuditDraft(tenant_id=session.key.tenant_id, actor=session.actor(address), action=Action.LOGOUT)
        await self._database.run(_CLOSE, session=decode_id(ADMIN_SESSION, session.id), **audit_values(draft))

    async def _sweep(self, connection: Connection) -> None:
        await _run(connection, _SWEEP, age_seconds=self._limits.age_seconds, lock_seconds=self._limits.lock_seconds)

    async def _count(self, connection: Connection, subjects: dict[str, str | None]) -> float | None:
        """Counts the attempt. For how long it is locked out; None where it is not."""
        named = [subject for subject in subjects.values() if subject is not None]
        rows = await _run(connection, _COUNT, subjects=named, lock_seconds=self._limits.lock_seconds)
        return max((row["locked_seconds"] for row in rows if row["locked_seconds"] is not None), default=None)

    async def _lock(self, connection: Connection, subjects: dict[str, str | None]) -> bool:
        """Whether this failure was one too many."""
        rows = await _run(
            connection,
            _LOCK,
            lock_seconds=self._limits.lock_seconds,
            key_failures=self._limits.key_failures,
            address_failures=self._limits.address_failures,
            **subjects,
        )
        return bool(rows)


async def _run(connection: Connection, statement: Statement, **values: Any) -> list[Row]:
    rows: list[Row] = await connection.fetch(statement.sql, *statement.arguments(values))
    return rows


async def _find_key(connection: Connection, presented: PresentedKey) -> ApiKey | None:
    rows = await _run(
        connection, FIND_LIVE_KEY, key=decode_id(API_KEY, presented.id), secret_hash=presented.secret_hash
    )
    return key_from(rows[0]) if rows and presented.matches(rows[0]["secret_hash"]) else None


def _refusal_of(key: ApiKey | None, locked_seconds: float | None) -> StrataError | None:
    if locked_seconds:
        return LoginLocked(retry_after_seconds=max(1, round(locked_seconds)))
    if key is None:
        return KeyRejected()
    return None if key.opens(Scope.ADMIN) else ScopeMissing(scope=Scope.ADMIN.value)


async def _note_failure(
    connection: Connection,
    presented: PresentedKey | None,
    key: ApiKey | None,
    address: str | None,
    refusal: StrataError | None,
    *,
    locked: bool,
) -> None:
    """Whose key it claims to be is told, so that its tenant can see it; an unknown key is told to nobody's."""
    tenant_id = key.tenant_id if key else None
    if presented is not None and tenant_id is None:
        rows = await _run(connection, _WHOSE, key=decode_id(API_KEY, presented.id))
        tenant_id = encode_id(TENANT, rows[0]["tenant_id"]) if rows else None
    draft = AuditDraft(
        tenant_id=tenant_id,
        actor=Actor(key_id=presented.id if presented else None, address=address),
        action=Action.LOGIN,
        details={"code": refusal.code if refusal else KeyRejected.code, "locked": locked},
        outcome=Outcome.REFUSED,
    )
    await _run(connection, _AUDIT, **audit_values(draft))


async def _open(connection: Connection, key: ApiKey, address: str | None) -> tuple[AdminSession, str]:
    session_id, csrf_secret = new_uuid(), new_secret()
    token = base64.urlsafe_b64encode(new_secret()).decode().rstrip("=")
    rows = await _run(
        connection,
        _OPEN,
        session=session_id,
        tenant=decode_id(TENANT, key.tenant_id),
        key=decode_id(API_KEY, key.id),
        token_hash=hash_token(token),
        csrf_secret=csrf_secret,
        address=address,
    )
    opened_at: datetime = rows[0]["created_at"]
    session = AdminSession(
        id=encode_id(ADMIN_SESSION, session_id),
        key=key,
        csrf_secret=csrf_secret,
        address=address,
        created_at=opened_at,
        last_seen_at=opened_at,
    )
    draft = AuditDraft(tenant_id=key.tenant_id, actor=session.actor(address), action=Action.LOGIN)
    await _run(connection, _AUDIT, **audit_values(draft))
    return session, token


def _session_from(row: Row) -> AdminSession:
    return AdminSession(
        id=encode_id(ADMIN_SESSION, row["session_id"]),
        key=key_from(row),
        csrf_secret=row["csrf_secret"],
        address=None if row["address"] is None else decode_text(row["address"]),
        created_at=row["session_created_at"],
        last_seen_at=row["last_seen_at"],
    )
