from datetime import UTC, datetime, timedelta

import pytest

from server.conversation.api_key import Scope, issue_key_text
from server.conversation.identifiers import API_KEY, new_id
from server.web.admin.sessions import require_session
from server.web.app import ROUTES
from server.web.auth import KeyGuard
from tests.support.fakes.site import Site

LOCKED = ("/v1", "/admin/api")
OPEN = {"/healthz", "/readyz", "/metrics", "/schema", "/schema/openapi.json", "/schema/{path:str}"}
OPEN_PAGES = {("/admin/login", "GET"), ("/admin/login", "POST"), ("/admin/static/{digest:str}/{name:str}", "GET")}


def test_every_page_but_the_login_needs_a_session_and_no_page_accepts_a_key(site: Site) -> None:
    open_pages: set[tuple[str, str]] = set()
    locked_pages: set[tuple[str, str]] = set()
    for route in site.app.litestar.routes:
        if not route.path.startswith("/admin") or route.path.startswith("/admin/api"):
            continue
        for handler in getattr(route, "route_handlers", ()):
            if handler.http_methods == {"OPTIONS"}:
                continue
            guards = handler.resolve_guards()
            assert not any(isinstance(guard, KeyGuard) for guard in guards)
            pages = locked_pages if guards.count(require_session) == 1 else open_pages
            pages |= {(route.path, str(method)) for method in handler.http_methods}
    assert open_pages == OPEN_PAGES
    assert {("/admin", "GET"), ("/admin/logout", "POST"), ("/admin/keys/{key_id:str}/revoke", "POST")} <= locked_pages


def test_every_route_under_v1_and_admin_api_is_guarded(site: Site) -> None:
    open_paths = set()
    for route in site.app.litestar.routes:
        for handler in getattr(route, "route_handlers", ()):
            if handler.http_methods == {"OPTIONS"} or route.path.startswith("/test/"):
                continue
            if route.path.startswith("/admin") and not route.path.startswith("/admin/api"):
                continue
            guards = [guard for guard in handler.resolve_guards() if isinstance(guard, KeyGuard)]
            if route.path.startswith(LOCKED):
                assert len(guards) == 1, f"{route.path} has no lock"
                wanted = Scope.ADMIN if route.path.startswith("/admin") else Scope.CLIENT
                assert guards[0].scope is (None if route.path == "/v1/key" else wanted), route.path
                assert guards[0].limited == route.path.startswith("/v1")
            else:
                assert not guards
                open_paths.add(route.path)
    assert open_paths == OPEN
    assert len(ROUTES) == 66


@pytest.mark.parametrize("path", ["/v1/key", "/admin/api/keys", "/admin/api/keys/key_x", "/admin/api/jobs"])
async def test_without_a_key_access_is_denied(site: Site, path: str) -> None:
    answer = await site.get(path)
    assert (answer.status_code, answer.json()["code"]) == (401, "key_rejected")
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Basic {key}", "{key}", "Bearer {key}x", "Bearer x{key}", "Bearer {key} {key}", "Bearer é"],
)
async def test_what_is_not_a_bearer_key_is_rejected(site: Site, header: str) -> None:
    value = header.format(key=site.client_key).encode()
    answer = await site.client.get("/v1/key", headers=[(b"authorization", value)])
    assert answer.status_code == 401


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_the_scheme_may_be_written_in_any_case(site: Site, scheme: str) -> None:
    answer = await site.client.get("/v1/key", headers={"authorization": f"{scheme} {site.client_key}"})
    assert answer.status_code == 200


async def test_two_authorization_headers_are_refused(site: Site) -> None:
    headers = [("authorization", f"Bearer {site.client_key}")] * 2
    assert (await site.client.get("/v1/key", headers=headers)).status_code == 401


async def test_a_key_is_read_from_no_other_place(site: Site) -> None:
    assert (await site.get("/v1/key", headers={"x-api-key": site.client_key})).status_code == 401
    assert (await site.get(f"/v1/key?api_key={site.client_key}")).status_code == 401


async def test_an_unknown_and_a_forged_key_are_rejected(site: Site) -> None:
    known_id = site.client_key.split("_")[1]
    for text in (issue_key_text(new_id(API_KEY)), issue_key_text(f"{API_KEY}_{known_id}")):
        assert (await site.get("/v1/key", key=text)).status_code == 401


async def test_an_expired_key_is_rejected(site: Site) -> None:
    _, text = await site.key_ring.create_key(
        tenant_id=site.tenant.id,
        name="old",
        scopes=frozenset({Scope.CLIENT}),
        expires_at=datetime.now(UTC) - timedelta(seconds=1),
    )
    assert (await site.get("/v1/key", key=text)).status_code == 401


async def test_a_missing_scope_is_named(site: Site) -> None:
    answer = await site.get("/admin/api/keys", key=site.client_key)
    assert (answer.status_code, answer.json()["code"], answer.json()["scope"]) == (403, "scope_missing", "admin")


async def test_an_unavailable_database_is_not_the_fault_of_the_caller(site: Site) -> None:
    site.key_ring.down = True
    answer = await site.get("/v1/key", key=site.client_key)
    assert (answer.status_code, answer.json()["code"]) == (503, "database_unavailable")
    assert answer.headers["retry-after"] == "2"
    site.key_ring.down = False
    assert (await site.get("/v1/key", key=site.client_key)).status_code == 200


async def test_the_key_is_checked_before_the_body_is_read(site: Site) -> None:
    answer = await site.client.request("DELETE", "/admin/api/keys/key_x", content=b" " * 10_000)
    assert answer.status_code == 401


async def test_every_request_under_v1_counts_against_its_key(site: Site) -> None:
    site.rate_limiter.left = 1
    assert (await site.get("/v1/key", key=site.client_key)).status_code == 200
    for path in ("/v1/key", "/v1/assistants", "/v1/conversations/conv_x/turns"):
        answer = await site.get(path, key=site.client_key)
        assert (answer.status_code, answer.json()["code"]) == (429, "rate_limited")
        assert answer.headers["retry-after"] == "7"
    assert len(set(site.rate_limiter.asked)) == 1


async def test_requests_without_a_valid_key_count_against_no_key(site: Site) -> None:
    await site.get("/v1/key")
    await site.get("/v1/assistants", key=site.admin_key)
    await site.get("/admin/api/keys", key=site.admin_key)
    await site.get("/healthz")
    assert site.rate_limiter.asked == []


async def test_a_turn_above_the_rate_is_refused_before_its_body_is_read_unless_it_may_be_a_duplicate(
    site: Site,
) -> None:
    site.rate_limiter.left = 0
    bearer = {"authorization": f"Bearer {site.client_key}"}
    url = "/v1/conversations/conv_x/turns"
    assert (await site.client.post(url, content=b"{", headers=bearer)).status_code == 429
    for header in ("idempotency-key", "x-stainless-retry-count"):
        assert (await site.client.post(url, content=b"{", headers={**bearer, header: "1"})).status_code == 400
