# ruff: noqa: SLF001  # reason: the plans are those of the statements themselves
"""Sessions of operators and the audit log, on the database itself."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.conversation.api_key import ApiKey, PresentedKey, Scope, Tenant, issue_key_text, parse_key_text
from server.conversation.audit import OPERATOR, Action, Actor, AuditDraft, AuditFilter, Outcome
from server.conversation.errors import CursorInvalid, KeyRejected, LoginLocked, ScopeMissing
from server.conversation.identifiers import API_KEY, new_id
from server.inspection.admin_sessions import AdminSession, SessionLimits, lock_subject
from server.postgres.access import admin_sessions
from server.postgres.access.admin_sessions import PostgresAdminSessions
from server.postgres.access.key_ring import PostgresKeyRing
from server.postgres.engine import Database
from server.postgres.inspection import audit_log as auditing
from server.postgres.inspection.audit_log import PostgresAuditLog
from tests.integration.postgres.test_plans import explain
from tests.support.builders import NASTY

LIMITS = SessionLimits(max_failures=3, lock_seconds=600)


def presented(text: str) -> PresentedKey:
    found = parse_key_text(text)
    assert found is not None
    return found


@pytest.fixture
def sessions(database: Database) -> PostgresAdminSessions:
    return PostgresAdminSessions(database, LIMITS)


@pytest.fixture
def audit_log(database: Database) -> PostgresAuditLog:
    return PostgresAuditLog(database)


@pytest.fixture
async def admin(key_ring: PostgresKeyRing, tenant: Tenant) -> tuple[ApiKey, PresentedKey]:
    key, text = await key_ring.create_key(
        tenant_id=tenant.id, name="admin", scopes=frozenset({Scope.ADMIN}), expires_at=None
    )
    return key, presented(text)


async def try_to_log_in(sessions: PostgresAdminSessions, key: PresentedKey | None, address: str | None) -> str:
    try:
        await sessions.log_in(key, address=address)
    except (KeyRejected, LoginLocked, ScopeMissing) as refusal:
        return refusal.code
    return "in"


OWNERS = "192.0.2.1"
ATTACKERS = "198.51.100.7"


async def waits_of(database: Database) -> dict[str, float]:
    """The approximate number of seconds that each pair of key and address has to wait."""
    async with database.connection() as connection:
        rows = await connection.fetch(
            "SELECT subject, round(extract(epoch FROM locked_until - now())) AS seconds FROM login_failures"
            " WHERE locked_until > now()"
        )
    return {row["subject"]: float(row["seconds"]) for row in rows}


async def let_waits_end(database: Database) -> None:
    async with database.connection() as connection:
        await connection.execute("UPDATE login_failures SET locked_until = now() - interval '1 millisecond'")


async def test_many_concurrent_wrong_secrets_are_logged_a_few_times(
    sessions: PostgresAdminSessions, admin: tuple[ApiKey, PresentedKey], audit_log: PostgresAuditLog
) -> None:
    forged = presented(issue_key_text(admin[0].id))
    outcomes = await asyncio.gather(*(try_to_log_in(sessions, forged, ATTACKERS) for _ in range(15)))
    assert sorted(outcomes) == ["key_rejected"] * 3 + ["login_locked"] * 12
    assert len((await audit_log.list_entries(None, AuditFilter(action=Action.LOGIN))).items) == 3


@given(attempts=st.lists(st.tuples(st.booleans(), st.sampled_from([OWNERS, ATTACKERS, None])), max_size=30))
@settings(max_examples=15)
async def test_the_right_secret_is_accepted_after_any_failures_from_other_addresses(
    database: Database, attempts: list[tuple[bool, str | None]]
) -> None:
    key_ring, sessions = PostgresKeyRing(database), PostgresAdminSessions(database, LIMITS)
    tenant = await key_ring.create_tenant(new_id("tenant"))
    key, text = await key_ring.create_key(
        tenant_id=tenant.id, name="admin", scopes=frozenset({Scope.ADMIN}), expires_at=None
    )
    forged = presented(issue_key_text(key.id))
    for is_right, address in attempts:
        outcome = await try_to_log_in(sessions, presented(text) if is_right else forged, address)
        assert (outcome == "in") is is_right
    for address in (OWNERS, ATTACKERS, None):
        assert await try_to_log_in(sessions, presented(text), address) == "in"


async def test_wrong_secrets_delay_only_their_own_address(
    sessions: PostgresAdminSessions, admin: tuple[ApiKey, PresentedKey]
) -> None:
    forged = presented(issue_key_text(admin[0].id))
    assert [await try_to_log_in(sessions, forged, ATTACKERS) for _ in range(5)][-1] == "login_locked"
    assert await try_to_log_in(sessions, forged, OWNERS) == "key_rejected"
    other = presented(issue_key_text(new_id(API_KEY)))
    assert await try_to_log_in(sessions, other, ATTACKERS) == "key_rejected"


async def test_each_failure_after_a_wait_doubles_it_up_to_a_limit(
    sessions: PostgresAdminSessions, admin: tuple[ApiKey, PresentedKey], database: Database
) -> None:
    forged = presented(issue_key_text(admin[0].id))
    waits = []
    for _ in range(14):
        await let_waits_end(database)
        assert await try_to_log_in(sessions, forged, ATTACKERS) == "key_rejected"
        waits.append(sum((await waits_of(database)).values()))
    assert waits[:2] == [0, 0]
    assert waits[5:12] == pytest.approx([8, 16, 32, 64, 128, 256, 512], abs=2)
    assert waits[12:] == pytest.approx([600, 600], abs=2)
    # The right one is still accepted, and resets everything.
    assert await try_to_log_in(sessions, admin[1], ATTACKERS) == "in"
    assert await waits_of(database) == {}


async def test_the_right_key_among_many_wrong_ones_is_accepted_and_not_counted(
    sessions: PostgresAdminSessions, admin: tuple[ApiKey, PresentedKey], database: Database
) -> None:
    outcomes = await asyncio.gather(*(try_to_log_in(sessions, admin[1], OWNERS) for _ in range(12)))
    assert outcomes == ["in"] * 12
    async with database.connection() as connection:
        assert await connection.fetchval("SELECT coalesce(sum(failure_count), 0) FROM login_failures") == 0


async def test_failures_far_apart_do_not_add_up(
    sessions: PostgresAdminSessions, admin: tuple[ApiKey, PresentedKey], database: Database
) -> None:
    forged = presented(issue_key_text(admin[0].id))
    for _ in range(6):
        assert await try_to_log_in(sessions, forged, None) == "key_rejected"
        async with database.connection() as connection:
            await connection.execute("UPDATE login_failures SET began_at = now() - interval '11 minutes'")


async def test_unknown_keys_and_addresses_of_one_network_are_counted_together(
    sessions: PostgresAdminSessions,
) -> None:
    outcomes = [
        await try_to_log_in(sessions, presented(issue_key_text(new_id(API_KEY))), f"2001:db8:0:1::{number}")
        for number in range(4)
    ]
    assert outcomes == ["key_rejected"] * 3 + ["login_locked"]
    other = presented(issue_key_text(new_id(API_KEY)))
    assert await try_to_log_in(sessions, other, "2001:db8:0:2::1") == "key_rejected"


def test_an_address_is_counted_in_one_spelling() -> None:
    assert lock_subject("key_x", "::ffff:192.0.2.1") == "key_x 192.0.2.1"
    assert lock_subject("key_x", "2001:DB8::0001") == "key_x 2001:db8::/64"
    assert lock_subject(None, "somewhere") == "unknown somewhere"
    assert lock_subject(None, None) == "unknown unknown"


async def test_the_rows_of_failures_are_bounded(
    sessions: PostgresAdminSessions, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_sessions, "_MAX_FAILURE_ROWS", 5)
    for number in range(12):
        await try_to_log_in(sessions, None, f"192.0.2.{number}")
    async with database.connection() as connection:
        assert await connection.fetchval("SELECT count(*) FROM login_failures") <= 6


async def test_expired_rows_are_deleted_with_the_next_login(
    sessions: PostgresAdminSessions, admin: tuple[ApiKey, PresentedKey], database: Database
) -> None:
    await sessions.log_in(admin[1], address="192.0.2.1")
    await try_to_log_in(sessions, presented(issue_key_text(new_id(API_KEY))), None)
    async with database.connection() as connection:
        await connection.execute("UPDATE admin_sessions SET created_at = now() - interval '1 day'")
        await connection.execute("UPDATE login_failures SET began_at = now() - interval '1 day'")
        await sessions.log_in(admin[1], address=None)
        assert await connection.fetchval("SELECT count(*) FROM admin_sessions") == 1
        assert await connection.fetchval("SELECT count(*) FROM login_failures") == 0


@pytest.mark.parametrize("scope", [Scope.ADMIN, Scope.SUPERADMIN])
async def test_a_super_admin_sees_all_tenants_and_an_admin_its_own(
    sessions: PostgresAdminSessions, key_ring: PostgresKeyRing, tenant: Tenant, scope: Scope
) -> None:
    _, text = await key_ring.create_key(tenant_id=tenant.id, name="x", scopes=frozenset({scope}), expires_at=None)
    opened, token = await sessions.log_in(presented(text), address=None)
    found = await sessions.find_session(token)
    assert isinstance(found, AdminSession)
    assert (found.id, found.csrf_token, found.key.id) == (opened.id, opened.csrf_token, opened.key.id)
    assert found.tenant_scope == (None if scope is Scope.SUPERADMIN else tenant.id)


@pytest.mark.parametrize("token", ["", "x", "\ud83d", "\x00", "a" * 10_000])
async def test_a_token_of_any_text_finds_nothing(sessions: PostgresAdminSessions, token: str) -> None:
    assert await sessions.find_session(token) is None


async def test_a_session_is_found_by_its_hash(database: Database) -> None:
    plan = await explain(database, admin_sessions._FIND)
    assert "uq_admin_sessions_token_hash" in plan
    assert "Seq Scan" not in plan.replace("Seq Scan on tenants", "")


# --- the log


@given(st.dictionaries(st.text(max_size=10), st.text(max_size=30) | st.integers() | st.none(), max_size=3), st.text())
@settings(max_examples=20)
async def test_a_row_is_read_as_written(
    database: Database, tenant: Tenant, details: dict[str, object], address: str
) -> None:
    log = PostgresAuditLog(database)
    draft = AuditDraft(
        tenant_id=tenant.id,
        actor=Actor(key_id=new_id(API_KEY), session_id=new_id("session"), address=address),
        action=Action.REVOKE_KEY,
        object_id=NASTY,
        details=details,
        outcome=Outcome.FAILED,
    )
    await log.append(draft)
    entry = (await log.list_entries(tenant.id, AuditFilter(), limit=1)).items[0]
    written = {name: getattr(draft, name) for name in ("tenant_id", "actor", "action", "object_id", "outcome")}
    assert {name: getattr(entry, name) for name in written} == written
    assert dict(entry.details) == details


async def test_filters_combine_and_pages_follow_each_other(
    audit_log: PostgresAuditLog, key_ring: PostgresKeyRing, tenant: Tenant
) -> None:
    other = await key_ring.create_tenant("other")
    key_id = new_id(API_KEY)
    for number in range(30):
        await audit_log.append(
            AuditDraft(
                tenant_id=(tenant.id, other.id, None)[number % 3],
                actor=Actor(key_id=key_id) if number % 2 else OPERATOR,
                action=Action.LOGIN,
                details={"number": number},
                outcome=Outcome.REFUSED if number % 5 == 0 else Outcome.DONE,
            )
        )

    async def numbers(tenant_id: str | None, wanted: AuditFilter, limit: int = 4) -> list[object]:
        found, cursor = [], None
        while True:
            page = await audit_log.list_entries(tenant_id, wanted, cursor=cursor, limit=limit)
            assert len(page.items) <= limit
            found += [entry.details["number"] for entry in page.items]
            cursor = page.next_cursor
            if cursor is None:
                return found

    assert await numbers(tenant.id, AuditFilter()) == list(range(27, -1, -3))
    assert await numbers(None, AuditFilter()) == list(range(29, -1, -1))
    assert await numbers(tenant.id, AuditFilter(key_id=key_id)) == [27, 21, 15, 9, 3]
    assert await numbers(tenant.id, AuditFilter(key_id=key_id, outcome=Outcome.REFUSED, action="login")) == [15]
    assert await numbers(tenant.id, AuditFilter(key_id="key_nonsense")) == []
    assert await numbers(tenant.id, AuditFilter(action="key.revoke")) == []
    soon = datetime.now(UTC) + timedelta(hours=1)
    assert await numbers(tenant.id, AuditFilter(since=soon)) == []
    assert len(await numbers(tenant.id, AuditFilter(until=soon))) == 10
    with pytest.raises(CursorInvalid):
        await audit_log.list_entries(tenant.id, AuditFilter(), cursor="nonsense")


@pytest.mark.parametrize("filters", [("tenant",), ("action", "tenant"), ("key_id", "tenant"), ()])
async def test_a_page_of_the_log_is_read_in_the_order_of_an_index(database: Database, filters: tuple[str, ...]) -> None:
    plan = await explain(database, auditing._statement_for(filters))
    assert "Limit" in plan
    assert "Sort" not in plan
    assert "audit_log" in plan
