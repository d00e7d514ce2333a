"""Sessions of operators on Postgres.

Sessions are not cached: each request loads its session together with its key, so that revocation or expiry of the key
ends its sessions in all processes at once. A login is one transaction of a few statements. A failed login while its key
and address are locked only reads.
"""

import base64
import math
from datetime import datetime
from typing import Final

from server.conversation.api_key import ApiKey, PresentedKey, Scope
from server.conversation.audit import Action, Actor, AuditDraft, Outcome
from server.conversation.errors import KeyRejected, LoginLocked, ScopeMissing, StrataError
from server.conversation.identifiers import ADMIN_SESSION, API_KEY, TENANT, decode_id, encode_id, new_uuid
from server.inspection.admin_sessions import AdminSession, SessionLimits, hash_token, lock_subject, new_secret
from server.postgres.access.key_ring import FIND_LIVE_KEY, key_from
from server.postgres.codec import decode_text
from server.postgres.connections import Connection
from server.postgres.engine import Database, Statement
from server.postgres.inspection.audit_log import AUDIT_COLUMNS, AUDIT_VALUES, append_on, audit_values
from server.postgres.rows import Row

_WAIT: Final = Statement("""
SELECT extract(epoch FROM locked_until - now())::float8 AS seconds
FROM login_failures WHERE subject = :subject AND locked_until > now()
""")
# The count restarts if the last failure, or the lock after it, is old. No row is returned while the subject is locked.
_COUNT: Final = Statement("""
INSERT INTO login_failures AS known (subject, failure_count, locked_until)
VALUES (:subject, 1, CASE WHEN :max_failures <= 1 THEN now() + interval '1 second' END)
ON CONFLICT (subject) DO UPDATE SET (failure_count, began_at, locked_until) = (
    SELECT counted.failure_count,
        CASE WHEN counted.failure_count = 1 THEN now() ELSE known.began_at END,
        CASE WHEN counted.failure_count >= :max_failures THEN now() + make_interval(
            secs => least(:lock_seconds::float8, power(2, least(counted.failure_count - :max_failures, 30)))
        ) END
    FROM (
        SELECT CASE
            WHEN coalesce(known.locked_until, known.began_at) < now() - make_interval(secs => :lock_seconds) THEN 1
            ELSE known.failure_count + 1
        END AS failure_count
    ) AS counted
)
WHERE known.locked_until IS NULL OR known.locked_until <= now()
RETURNING locked_until IS NOT NULL AS locked
""")
_CLEAR_FAILURES: Final = Statement("DELETE FROM login_failures WHERE subject = :subject")
# The number of rows is bounded: the oldest are deleted, which only ends a lock early.
_SWEEP: Final = Statement("""
WITH sessions AS (DELETE FROM admin_sessions WHERE created_at < now() - make_interval(secs => :age_seconds))
DELETE FROM login_failures
WHERE coalesce(locked_until, began_at) < now() - make_interval(secs => :lock_seconds)
    OR subject IN (SELECT subject FROM login_failures ORDER BY began_at DESC OFFSET :max_rows)
""")
_OWNER: Final = Statement("SELECT tenant_id FROM api_keys WHERE id = :key")
_OPEN: Final = Statement("""
INSERT INTO admin_sessions (id, tenant_id, api_key_id, token_hash, csrf_secret, address)
VALUES (:session, :tenant, :key, :token_hash, :csrf_secret, :address)
RETURNING created_at
""")
# `IS TRUE` prevents the use of the index on the age, which the planner might prefer to that on the token.
_FIND: Final = Statement("""
WITH found AS (
    SELECT k.*, t.name AS tenant_name, s.id AS session_id, s.csrf_secret, s.address,
        s.created_at AS session_created_at, s.last_seen_at
    FROM admin_sessions s JOIN api_keys k ON k.id = s.api_key_id JOIN tenants t ON t.id = k.tenant_id
    WHERE s.token_hash = :token_hash
        AND (s.created_at > now() - make_interval(secs => :age_seconds)) IS TRUE
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
_MAX_FAILURE_ROWS: Final = 10_000
_CLOSE: Final = Statement(f"""
WITH closed AS (DELETE FROM admin_sessions WHERE id = :session RETURNING 1)
INSERT INTO audit_log ({AUDIT_COLUMNS}) SELECT {AUDIT_VALUES} FROM closed
""")  # noqa: S608  reason: constants only


class PostgresAdminSessions:
    """Implements `server.inspection.admin_sessions.AdminSessions`."""

    def __init__(self, database: Database, limits: SessionLimits) -> None:
        self._database = database
        self._limits = limits

    async def log_in(self, presented: PresentedKey | None, *, address: str | None) -> tuple[AdminSession, str]:
        async with self._database.transaction() as connection:
            key = None if presented is None else await _find_key(connection, presented)
            if key is not None and key.opens(Scope.ADMIN):
                await self._sweep(connection)
                await _CLEAR_FAILURES.fetch(connection, subject=lock_subject(key.id, address))
                return await _open(connection, key, address)
            refusal = await self._fail(connection, presented, key, address)
        # Outside the transaction, which would otherwise be rolled back with the count.
        raise refusal

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

    async def _fail(
        self, connection: Connection, presented: PresentedKey | None, key: ApiKey | None, address: str | None
    ) -> StrataError:
        """Count and audit the failure, unless the key and address are locked. Returns the error to raise."""
        tenant_id = None if presented is None else await _find_owner(connection, presented)
        subject = lock_subject(presented.id if presented and tenant_id else None, address)
        wait_seconds = await _find_wait(connection, subject)
        if wait_seconds is not None:
            return LoginLocked(retry_after_seconds=max(1, math.ceil(wait_seconds)))
        await self._sweep(connection)
        limits = self._limits
        counted = await _COUNT.fetch(
            connection, subject=subject, max_failures=limits.max_failures, lock_seconds=limits.lock_seconds
        )
        if not counted:
            # A concurrent failure of the same pair has locked it.
            return LoginLocked(retry_after_seconds=max(1, math.ceil(await _find_wait(connection, subject) or 0)))
        refusal = KeyRejected() if key is None else ScopeMissing(scope=Scope.ADMIN.value)
        draft = AuditDraft(
            tenant_id=tenant_id,
            actor=Actor(key_id=presented.id if presented else None, address=address),
            action=Action.LOGIN,
            details={"code": refusal.code, "locked": counted[0]["locked"]},
            outcome=Outcome.REFUSED,
        )
        await append_on(connection, draft)
        return refusal

    async def _sweep(self, connection: Connection) -> None:
        await _SWEEP.fetch(
            connection,
            age_seconds=self._limits.age_seconds,
            lock_seconds=self._limits.lock_seconds,
            max_rows=_MAX_FAILURE_ROWS,
        )


async def _find_key(connection: Connection, presented: PresentedKey) -> ApiKey | None:
    rows = await FIND_LIVE_KEY.fetch(
        connection, key=decode_id(API_KEY, presented.id), secret_hash=presented.secret_hash
    )
    return key_from(rows[0]) if rows and presented.matches(rows[0]["secret_hash"]) else None


async def _find_owner(connection: Connection, presented: PresentedKey) -> str | None:
    """Return the tenant of the key id, whose audit log gets the entry; None for an unknown id."""
    rows = await _OWNER.fetch(connection, key=decode_id(API_KEY, presented.id))
    return encode_id(TENANT, rows[0]["tenant_id"]) if rows else None


async def _find_wait(connection: Connection, subject: str) -> float | None:
    """Return for how many seconds the subject is locked; None if it is not."""
    rows = await _WAIT.fetch(connection, subject=subject)
    return rows[0]["seconds"] if rows else None


async def _open(connection: Connection, key: ApiKey, address: str | None) -> tuple[AdminSession, str]:
    session_id, csrf_secret = new_uuid(), new_secret()
    token = base64.urlsafe_b64encode(new_secret()).decode().rstrip("=")
    rows = await _OPEN.fetch(
        connection,
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
    await append_on(connection, draft)
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
