"""Access to the pages over HTTP."""

import hashlib
from collections.abc import AsyncIterator
from ipaddress import IPv4Network

import httpx2
import pytest

from server.app.asgi import serving
from server.app.http_server import bind
from server.app.settings import Settings
from server.app.wiring import open_program
from server.conversation.api_key import Scope, issue_key_text
from server.conversation.identifiers import API_KEY, new_id
from server.postgres.engine import Database
from server.web.admin.login import own_page
from tests.conftest import StrataServer
from tests.support.fakes.log_capture import capture_log
from tests.support.page_driver import PAGES, Operator, admin_key_of, audited, open_operator


@pytest.fixture
async def operator(strata_server: StrataServer) -> AsyncIterator[Operator]:
    async with open_operator(strata_server.url) as opened:
        yield opened


# --- logging in


async def test_a_session_opens_every_page_and_nothing_else_does(
    strata_server: StrataServer, operator: Operator
) -> None:
    for path in PAGES:
        answer = await operator.get(path)
        assert answer.status_code == 303
        assert answer.headers["location"].startswith("/admin/login")
    bearer = await operator.get("/admin/keys", authorization=f"Bearer {strata_server.admin_key}")
    assert bearer.status_code == 303
    assert (await operator.log_in(strata_server.admin_key)).status_code == 303
    assert [(await operator.get(path)).status_code for path in PAGES] == [200] * len(PAGES)
    # The cookie is for the pages; the routes of the API require keys.
    assert (await operator.get("/admin/api/keys")).status_code == 401


async def test_a_client_key_never_opens_a_page(strata_server: StrataServer, operator: Operator) -> None:
    answer = await operator.log_in(strata_server.client_key)
    assert answer.status_code == 403
    assert "set-cookie" not in answer.headers
    assert (await operator.get("/admin")).status_code == 303


async def test_the_database_has_no_token_and_the_page_no_key(
    strata_server: StrataServer, operator: Operator, database: Database
) -> None:
    await operator.log_in(strata_server.admin_key)
    token = operator.client.cookies["strata_admin"]
    async with database.connection() as connection:
        row = await connection.fetchrow("SELECT * FROM admin_sessions")
        dump = str(await connection.fetch("SELECT s::text FROM admin_sessions s"))
    assert row is not None
    assert row["token_hash"] == hashlib.sha256(token.encode()).digest()
    assert token not in dump
    for path in PAGES:
        assert strata_server.admin_key not in (await operator.get(path)).text


async def test_neither_key_nor_token_is_ever_logged(strata_server: StrataServer, operator: Operator) -> None:
    with capture_log() as log:
        await operator.log_in(strata_server.client_key)
        await operator.log_in(strata_server.admin_key)
        await operator.get("/admin/keys")
    written = log.getvalue()
    assert written.count("http.request_finished") == 3
    secrets = [strata_server.admin_key, strata_server.client_key, operator.client.cookies["strata_admin"]]
    # The secret of a key comes after its prefix. A session token may contain underscores itself.
    parts = [*(key.rpartition("_")[2] for key in secrets[:2]), secrets[2]]
    assert not any(part in written for part in parts)
    assert (await admin_key_of(strata_server)).id in written


async def test_the_cookie_is_for_the_pages_only_and_secure_with_tls(
    database: Database, server_settings: Settings
) -> None:
    settings = server_settings.model_copy(update={"trusted_proxies": (IPv4Network("127.0.0.0/8"),)})
    async with open_program(settings) as program, serving(program, bind("127.0.0.1", 0)) as url:
        tenant = await program.key_ring.create_tenant("acme")
        key, text = await program.key_ring.create_key(
            tenant_id=tenant.id, name="admin", scopes=frozenset({Scope.ADMIN}), expires_at=None
        )
        async with open_operator(url) as operator:
            plain = await operator.log_in(text)
            # The first is what the client claims, the second what the proxy adds in a separate header.
            forwarded = [("x-forwarded-for", "10.0.0.9"), ("x-forwarded-for", "192.0.2.7")]
            operator.client.headers = httpx2.Headers([*operator.client.headers.multi_items(), *forwarded])
            tls = await operator.log_in(text, **{"x-forwarded-proto": "https"})
    parts = {part.strip() for part in plain.headers["set-cookie"].lower().split(";")[1:]}
    assert parts == {"httponly", "samesite=strict", "path=/admin"}
    assert "secure" in {part.strip() for part in tls.headers["set-cookie"].lower().split(";")}
    async with database.connection() as connection:
        addresses = await connection.fetch("SELECT address FROM audit_log WHERE action = 'login' ORDER BY id")
    assert [row["address"] for row in addresses] == ["127.0.0.1", "192.0.2.7"]
    assert key.tenant_id == tenant.id


async def test_forwarded_headers_of_untrusted_clients_are_ignored(
    strata_server: StrataServer, operator: Operator, database: Database
) -> None:
    answer = await operator.log_in(
        strata_server.admin_key, **{"x-forwarded-proto": "https", "x-forwarded-for": "192.0.2.7"}
    )
    assert "secure" not in answer.headers["set-cookie"].lower()
    async with database.connection() as connection:
        assert await connection.fetchval("SELECT address FROM audit_log WHERE action = 'login'") == "127.0.0.1"


async def test_logging_in_again_ends_the_previous_session(strata_server: StrataServer, operator: Operator) -> None:
    await operator.log_in(strata_server.admin_key)
    before = operator.client.cookies["strata_admin"]
    await operator.log_in(strata_server.admin_key)
    assert operator.client.cookies["strata_admin"] != before
    async with open_operator(strata_server.url) as other:
        other.client.cookies.set("strata_admin", before)
        assert (await other.get("/admin")).status_code == 303


@pytest.mark.parametrize(
    "goal", ["https://evil.example/", "//evil.example", "/\\evil", "/admin/login", "/v1", "/adminx", "/admin/ö"]
)
def test_a_login_never_redirects_to_another_site(goal: str) -> None:
    assert own_page(goal) == "/admin"


def test_a_login_redirects_to_the_requested_page() -> None:
    for goal in ("/admin", "/admin/keys", "/admin/audit?action=login&key=key_x", "/admin?x=//y"):
        assert own_page(goal) == goal


# --- logging out


async def test_logging_out_ends_the_session_for_every_copy_of_the_cookie(
    strata_server: StrataServer, operator: Operator, database: Database
) -> None:
    await operator.log_in(strata_server.admin_key)
    token = operator.client.cookies["strata_admin"]
    answer = await operator.send("/admin/logout", {"csrf_token": await operator.csrf_token()})
    assert (answer.status_code, answer.headers["location"]) == (303, "/admin/login")
    operator.client.cookies.set("strata_admin", token)
    assert (await operator.get("/admin")).status_code == 303
    assert await audited(database) == [("login", "done", None), ("logout", "done", None)]


async def test_a_session_ends_at_once_with_its_key(strata_server: StrataServer, operator: Operator) -> None:
    await operator.log_in(strata_server.admin_key)
    # By another process, which this one learns only through the database.
    await strata_server.key_ring.revoke_key((await admin_key_of(strata_server)).id)
    answer = await operator.get("/admin/keys")
    assert (answer.status_code, answer.headers["location"]) == (303, "/admin/login?goal=/admin/keys")
    assert 'strata_admin=""' in answer.headers["set-cookie"] or "strata_admin=;" in answer.headers["set-cookie"]


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE admin_sessions SET last_seen_at = now() - interval '31 minutes'",
        "UPDATE admin_sessions SET created_at = now() - interval '13 hours'",
        "UPDATE api_keys SET expires_at = now() - interval '1 second'",
        "UPDATE api_keys SET scopes = '{client}'",
    ],
)
async def test_idle_time_age_and_the_end_of_the_key_end_a_session(
    strata_server: StrataServer, operator: Operator, database: Database, change: str
) -> None:
    await operator.log_in(strata_server.admin_key)
    assert (await operator.get("/admin")).status_code == 200
    async with database.connection() as connection:
        await connection.execute(change)
    assert (await operator.get("/admin")).status_code == 303


async def test_a_request_resets_the_idle_time_of_a_session(
    strata_server: StrataServer, operator: Operator, database: Database
) -> None:
    await operator.log_in(strata_server.admin_key)
    async with database.connection() as connection:
        await connection.execute("UPDATE admin_sessions SET last_seen_at = now() - interval '29 minutes'")
        assert (await operator.get("/admin")).status_code == 200
        assert await connection.fetchval("SELECT last_seen_at > now() - interval '1 minute' FROM admin_sessions")


# --- forms


@pytest.mark.parametrize("token", [None, "", "0" * 64, "ä"])
async def test_a_form_without_the_token_of_the_session_has_no_effect(
    strata_server: StrataServer, operator: Operator, token: str | None
) -> None:
    await operator.log_in(strata_server.admin_key)
    key = await admin_key_of(strata_server)
    data = {} if token is None else {"csrf_token": token}
    for path in ("/admin/logout", f"/admin/keys/{key.id}/revoke"):
        answer = await operator.send(path, data, **{"content-type": "application/x-www-form-urlencoded"})
        assert answer.status_code == 403
        assert "request_forged" in answer.text
    assert (await operator.get("/admin")).status_code == 200
    assert (await admin_key_of(strata_server)).revoked_at is None


async def test_the_token_of_another_session_is_refused(strata_server: StrataServer, operator: Operator) -> None:
    await operator.log_in(strata_server.admin_key)
    async with open_operator(strata_server.url) as other:
        await other.log_in(strata_server.admin_key)
        foreign = await other.csrf_token()
    assert (await operator.send("/admin/logout", {"csrf_token": foreign})).status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": ""},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "none"},
    ],
)
async def test_a_form_of_another_site_has_no_effect(
    strata_server: StrataServer, operator: Operator, headers: dict[str, str]
) -> None:
    assert (await operator.send("/admin/login", {"key": strata_server.admin_key}, **headers)).status_code == 403
    await operator.log_in(strata_server.admin_key)
    token = await operator.csrf_token()
    assert (await operator.send("/admin/logout", {"csrf_token": token}, **headers)).status_code == 403
    assert (await operator.get("/admin")).status_code == 200


async def test_the_token_may_be_in_a_header(strata_server: StrataServer, operator: Operator) -> None:
    await operator.log_in(strata_server.admin_key)
    answer = await operator.send("/admin/logout", {"x": "y"}, **{"x-csrf-token": await operator.csrf_token()})
    assert answer.status_code == 303


@pytest.mark.parametrize(
    ("content", "media_type", "status"),
    [
        (b'{"key": "x"}', "application/json", 415),
        (b"key=\xff\xfe", "application/x-www-form-urlencoded", 400),
        (b"&".join(b"a=1" for _ in range(200)), "application/x-www-form-urlencoded", 400),
        (b"key=" + b"x" * 100_000, "application/x-www-form-urlencoded", 413),
        (b"key=%ff%00", "application/x-www-form-urlencoded", 401),
        (b"", "application/x-www-form-urlencoded", 401),
    ],
)
async def test_an_invalid_form_is_refused_as_such(
    strata_server: StrataServer, operator: Operator, content: bytes, media_type: str, status: int
) -> None:
    headers = {"origin": strata_server.url, "content-type": media_type}
    answer = await operator.client.post("/admin/login", content=content, headers=headers)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "text/html; charset=utf-8"


# --- lock-out


async def test_wrong_secrets_are_delayed_and_the_owner_can_still_log_in(
    strata_server: StrataServer, operator: Operator, database: Database
) -> None:
    await operator.log_in(strata_server.admin_key)
    key = await admin_key_of(strata_server)
    forged = issue_key_text(key.id)
    async with open_operator(strata_server.url) as other:
        assert [(await other.log_in(forged)).status_code for _ in range(5)] == [401] * 5
        async with database.connection() as connection:
            await connection.execute("UPDATE login_failures SET locked_until = now() + interval '15 minutes'")
        locked = await other.log_in(forged)
        assert locked.status_code == 429
        assert 800 < int(locked.headers["retry-after"]) <= 900
        assert "Try again in 15 minutes" in locked.text
        assert "set-cookie" not in locked.headers
        # From the same address, as with a shared one, while wrong secrets have to wait.
        assert (await other.log_in(strata_server.admin_key)).status_code == 303
        assert (await operator.get("/admin")).status_code == 200
    # Five failures are audited, the last of them with the lock; failures during the lock are not.
    assert await audited(database) == [
        ("login", "done", None),
        *[("login", "refused", None)] * 5,
        ("login", "done", None),
    ]
    async with database.connection() as connection:
        details = await connection.fetch(
            "SELECT details ->> 'locked' AS locked FROM audit_log WHERE outcome = 'refused' ORDER BY id"
        )
        assert [row["locked"] for row in details] == ["false"] * 4 + ["true"]
        assert await connection.fetchval("SELECT count(*) FROM login_failures") == 0


async def test_a_failure_is_logged_for_the_tenant_whose_key_it_claims(
    strata_server: StrataServer, operator: Operator, database: Database
) -> None:
    await operator.log_in(issue_key_text((await admin_key_of(strata_server)).id))
    await operator.log_in(issue_key_text(new_id(API_KEY)))
    await operator.log_in("nonsense")
    async with database.connection() as connection:
        rows = await connection.fetch(
            "SELECT tenant_id IS NOT NULL AS has_tenant FROM audit_log WHERE action = 'login' ORDER BY id"
        )
    assert [row["has_tenant"] for row in rows] == [True, False, False]
