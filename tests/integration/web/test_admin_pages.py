"""The pages over HTTP: the headers of every response, and what each role can see."""

import hashlib
import re
from collections.abc import AsyncIterator
from html import escape
from pathlib import Path

import httpx2
import pytest

from server.conversation.api_key import Scope
from server.postgres.engine import Database
from server.web.admin.assets import ASSETS
from tests.conftest import StrataServer
from tests.support.page_driver import PAGES, Operator, admin_key_of, audited, open_operator

STATIC = Path(__file__).parents[3] / "server" / "web" / "admin" / "static"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)


@pytest.fixture
async def operator(strata_server: StrataServer) -> AsyncIterator[Operator]:
    async with open_operator(strata_server.url) as opened:
        yield opened


# --- headers of every response


async def test_every_page_has_the_headers_and_no_inline_script_or_style(
    strata_server: StrataServer, operator: Operator
) -> None:
    answers = [await operator.get("/admin/login"), await operator.get("/admin/nowhere")]
    answers.append(await operator.log_in("nonsense"))
    await operator.log_in(strata_server.admin_key)
    key = await admin_key_of(strata_server)
    answers += [
        await operator.get(path) for path in (*PAGES, f"/admin/keys/{key.id}/revoke", "/admin/keys/key_x/revoke")
    ]
    answers.append(await operator.get("/admin/audit?cursor=nonsense"))
    for answer in answers:
        assert answer.headers["content-security-policy"] == POLICY, answer.url
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "same-origin"
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:|<script(?! src=\"/admin/static/)", answer.text)
        assert not re.search(r"(?:src|href|action)=\"(?!/admin|#)", answer.text)
    assert [answer.status_code for answer in answers] == [200, 404, 401, *[200] * (len(PAGES) + 1), 404, 400]


async def test_assets_are_cached_for_ever_under_their_hash_and_under_no_other(operator: Operator) -> None:
    assert {"htmx.min.js", "admin.css", "theme.js", "icon.svg"} <= set(ASSETS)
    for asset in ASSETS.values():
        answer = await operator.get(asset.url)
        assert (answer.status_code, answer.headers["content-type"]) == (200, asset.media_type)
        assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
        assert answer.content == (STATIC / asset.name).read_bytes()
        assert hashlib.sha256(answer.content).hexdigest().startswith(asset.url.split("/")[3])
        assert (await operator.get(f"/admin/static/0000000000000000/{asset.name}")).status_code == 404
    for name in ("VENDORED.md", "..%2Frendering.py", "htmx.LICENSE.txt"):
        assert (await operator.get(f"/admin/static/0000000000000000/{name}")).status_code == 404


@pytest.mark.parametrize("name", ["htmx.min.js", "uplot.min.js", "uplot.min.css"])
def test_third_party_assets_are_the_recorded_files(name: str) -> None:
    (noted,) = [line for line in (STATIC / "VENDORED.md").read_text().splitlines() if f"| `{name}` |" in line]
    assert hashlib.sha256((STATIC / name).read_bytes()).hexdigest() in noted
    licences = re.findall(r"`(\w+\.LICENSE\.txt)`", (STATIC / "VENDORED.md").read_text())
    assert licences
    assert all((STATIC / licence).is_file() for licence in licences)


async def test_api_clients_get_problems_where_browsers_get_pages(strata_server: StrataServer) -> None:
    async with httpx2.AsyncClient(base_url=strata_server.url) as client:
        for path, status, code in (("/admin", 401, "session_ended"), ("/admin/nowhere", 404, "route_not_found")):
            answer = await client.get(path)
            assert answer.status_code == status
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.json()["code"] == code
        posted = await client.post("/admin/login", data={"key": "x"})
        assert (posted.status_code, posted.json()["code"]) == (403, "request_forged")
        api = await client.get("/admin/api/nowhere", headers={"accept": "text/html"})
        assert api.headers["content-type"] == "application/problem+json"


async def test_htmx_is_redirected_to_the_login_and_shows_whole_errors(
    strata_server: StrataServer, operator: Operator
) -> None:
    answer = await operator.get("/admin/audit?action=login", **{"hx-request": "true"})
    assert answer.status_code == 401
    assert answer.headers["hx-redirect"] == "/admin/login?goal=/admin/audit%3Faction%3Dlogin"
    await operator.log_in(strata_server.admin_key)
    answer = await operator.get("/admin/audit?cursor=x", **{"hx-request": "true"})
    assert (answer.status_code, answer.headers["hx-retarget"]) == (400, "main")


# --- content


HOSTILE = "\"><script>alert(1)</script>{{7*7}}'\x00\x1b[31m\u202e\ud83d</td>&amp;"


async def test_any_text_is_shown_and_never_executed(strata_server: StrataServer, operator: Operator) -> None:
    key, _ = await strata_server.key_ring.create_key(
        tenant_id=strata_server.tenant.id, name=HOSTILE, scopes=frozenset({Scope.CLIENT}), expires_at=None
    )
    await operator.log_in(strata_server.admin_key)
    for path in ("/admin/keys", f"/admin/keys/{key.id}/revoke"):
        text = (await operator.get(path)).text
        assert "<script>alert" not in text
        assert "{{7*7}}" in text
        assert "␀␛[31m[U+202E]\ufffd" in text
    query = {"key": HOSTILE, "action": HOSTILE, "outcome": HOSTILE, "cursor": ""}
    for name in ("key", "action", "outcome"):
        answer = await operator.client.get("/admin/audit", params={name: query[name].replace("\ud83d", "")})
        assert answer.status_code == 200
        assert "<script>alert" not in answer.text
    assert escape('"><script>') in (await operator.get('/admin/audit?key="><script>')).text.replace("&#34;", "&quot;")


async def test_keys_and_the_log_of_another_tenant_do_not_exist(
    strata_server: StrataServer, operator: Operator, database: Database
) -> None:
    other = await strata_server.key_ring.create_tenant("other")
    key, text = await strata_server.key_ring.create_key(
        tenant_id=other.id, name="theirs", scopes=frozenset({Scope.ADMIN}), expires_at=None
    )
    async with open_operator(strata_server.url) as stranger:
        await stranger.log_in(text)
    await operator.log_in(strata_server.admin_key)
    assert key.id not in (await operator.get("/admin/keys")).text
    assert key.id not in (await operator.get("/admin/audit")).text
    token = await operator.csrf_token()
    assert (await operator.get(f"/admin/keys/{key.id}/revoke")).status_code == 404
    assert (await operator.send(f"/admin/keys/{key.id}/revoke", {"csrf_token": token})).status_code == 404
    assert ("key.revoke", "done", key.id) not in await audited(database)


async def test_revoking_is_logged_from_everywhere(
    strata_server: StrataServer, operator: Operator, database: Database
) -> None:
    made = [
        await strata_server.key_ring.create_key(
            tenant_id=strata_server.tenant.id, name=name, scopes=frozenset({Scope.CLIENT}), expires_at=None
        )
        for name in ("page", "api", "command")
    ]
    ids = [key.id for key, _ in made]
    await operator.log_in(strata_server.admin_key)
    answer = await operator.send(f"/admin/keys/{ids[0]}/revoke", {"csrf_token": await operator.csrf_token()})
    assert (answer.status_code, answer.headers["location"]) == (303, f"/admin/keys?revoked={ids[0]}")
    bearer = {"authorization": f"Bearer {strata_server.admin_key}"}
    assert (await operator.client.delete(f"/admin/api/keys/{ids[1]}", headers=bearer)).status_code == 200
    await strata_server.key_ring.revoke_key(ids[2])
    async with database.connection() as connection:
        rows = await connection.fetch(
            "SELECT object, api_key_id, session_id, address FROM audit_log WHERE action = 'key.revoke' ORDER BY id"
        )
    assert [row["object"] for row in rows] == ids
    assert [row["api_key_id"] is not None for row in rows] == [True, True, False]
    assert [row["session_id"] is not None for row in rows] == [True, False, False]
    assert [row["address"] for row in rows] == ["127.0.0.1", "127.0.0.1", None]


async def test_the_log_is_read_page_by_page(strata_server: StrataServer, operator: Operator) -> None:
    for _ in range(60):
        await strata_server.key_ring.revoke_key((await strata_server.key_ring.list_keys())[0].id)
    await operator.log_in(strata_server.admin_key)
    first = (await operator.get("/admin/audit?action=key.revoke")).text
    older = re.search(r'rel="next" href="([^"]+)"', first)
    assert older is not None
    second = (await operator.get(older[1].replace("&amp;", "&"))).text
    assert (first.count('<th scope="row">'), second.count('<th scope="row">')) == (50, 10)
    assert 'rel="next"' not in second
