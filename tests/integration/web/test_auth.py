"""Keys over real HTTP against the real key ring in Postgres."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import httpx2
import pytest

from server.conversation.api_key import ApiKey, Scope, issue_key_text
from server.conversation.identifiers import API_KEY, new_id
from tests.conftest import StrataServer
from tests.integration.web.test_replays import REPLAY_ROUTES
from tests.integration.web.test_tenants import ADMIN_ROUTES, FOREIGN_ROUTES

ID_ROUTES = [("GET", "/admin/api/keys/{id}"), ("DELETE", "/admin/api/keys/{id}")]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
async def client(strata_server: StrataServer) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=strata_server.url) as opened:
        yield opened


async def make_key(
    server: StrataServer, *, tenant_id: str = "", scope: Scope = Scope.CLIENT, lives: timedelta | None = None
) -> tuple[ApiKey, str]:
    return await server.key_ring.create_key(
        tenant_id=tenant_id or server.tenant.id,
        name="made by a test",
        scopes=frozenset({scope}),
        expires_at=datetime.now(UTC) + lives if lives else None,
    )


async def test_a_live_key_gets_its_own_description(strata_server: StrataServer, client: httpx2.AsyncClient) -> None:
    answer = await client.get("/v1/key", headers=bearer(strata_server.client_key))
    assert answer.status_code == 200
    body = answer.json()
    assert body["tenant"] == {"id": strata_server.tenant.id, "name": strata_server.tenant.name}
    assert body["scopes"] == ["client"]
    assert body["created_at"].endswith("Z")
    assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("path", ["/v1/key", "/admin/api/keys", "/admin/api/keys/key_x"])
async def test_no_key_is_401(client: httpx2.AsyncClient, path: str) -> None:
    answer = await client.get(path)
    assert (answer.status_code, answer.json()["code"]) == (401, "key_rejected")
    assert answer.headers["www-authenticate"] == "Bearer"


async def test_a_wrong_key_is_401(strata_server: StrataServer, client: httpx2.AsyncClient) -> None:
    key, text = await make_key(strata_server)
    forged = issue_key_text(key.id)
    unknown = issue_key_text(new_id(API_KEY))
    for wrong in (forged, unknown, text[:-1], text.upper(), "strata_"):
        answer = await client.get("/v1/key", headers=bearer(wrong))
        assert answer.status_code == 401, wrong
        assert answer.headers["www-authenticate"] == "Bearer"
    assert (await client.get("/v1/key", headers=bearer(text))).status_code == 200


async def test_an_expired_key_is_401(strata_server: StrataServer, client: httpx2.AsyncClient) -> None:
    _, expired = await make_key(strata_server, lives=timedelta(seconds=-1))
    _, living = await make_key(strata_server, lives=timedelta(hours=1))
    assert (await client.get("/v1/key", headers=bearer(expired))).status_code == 401
    assert (await client.get("/v1/key", headers=bearer(living))).status_code == 200


async def test_a_missing_scope_is_403(strata_server: StrataServer, client: httpx2.AsyncClient) -> None:
    for method, path in [("GET", "/admin/api/keys"), *ID_ROUTES]:
        answer = await client.request(method, path.format(id="key_x"), headers=bearer(strata_server.client_key))
        assert (answer.status_code, answer.json()["code"]) == (403, "scope_missing")
        assert answer.json()["scope"] == "admin"


async def test_every_route_with_an_id_is_covered(client: httpx2.AsyncClient) -> None:
    """A new route with an id belongs here, or into one of the other two lists: ids of other tenants are tried on it."""
    paths = (await client.get("/schema")).json()["paths"]
    found = {(method.upper(), path) for path, item in paths.items() if "{" in path for method in item}
    keys = {(method, path.replace("{id}", "{key_id}")) for method, path in ID_ROUTES}
    foreign = {(method, path) for method, path, _ in (*FOREIGN_ROUTES, *ADMIN_ROUTES)}
    assert found == keys | foreign | set(REPLAY_ROUTES)


@pytest.mark.parametrize(("method", "path"), ID_ROUTES, ids=[method for method, _ in ID_ROUTES])
async def test_an_object_of_another_tenant_is_404(
    strata_server: StrataServer, client: httpx2.AsyncClient, method: str, path: str
) -> None:
    other = await strata_server.key_ring.create_tenant("other")
    theirs, text = await make_key(strata_server, tenant_id=other.id)
    for key_id in (theirs.id, new_id(API_KEY), "key_", "nonsense", "key_%00", "é", "x" * 3000):
        answer = await client.request(method, path.format(id=key_id), headers=bearer(strata_server.admin_key))
        assert (answer.status_code, answer.json()["code"]) == (404, "api_key_not_found"), key_id
    assert (await client.get("/v1/key", headers=bearer(text))).status_code == 200


async def test_the_list_has_the_keys_of_one_tenant(strata_server: StrataServer, client: httpx2.AsyncClient) -> None:
    other = await strata_server.key_ring.create_tenant("other")
    theirs, _ = await make_key(strata_server, tenant_id=other.id)
    answer = await client.get("/admin/api/keys", headers=bearer(strata_server.admin_key))
    ids = [key["id"] for key in answer.json()["data"]]
    assert len(ids) == 2
    assert theirs.id not in ids


async def test_revoking_takes_effect_at_once(strata_server: StrataServer, client: httpx2.AsyncClient) -> None:
    key, text = await make_key(strata_server)
    assert (await client.get("/v1/key", headers=bearer(text))).status_code == 200
    url = f"/admin/api/keys/{key.id}"
    revoked = await client.delete(url, headers=bearer(strata_server.admin_key))
    assert (revoked.status_code, revoked.json()["id"]) == (200, key.id)
    assert revoked.json()["revoked_at"] is not None
    assert (await client.get("/v1/key", headers=bearer(text))).status_code == 401
    again = await client.delete(url, headers=bearer(strata_server.admin_key))
    assert again.json()["revoked_at"] == revoked.json()["revoked_at"]
    assert (await client.get(url, headers=bearer(strata_server.admin_key))).json() == again.json()


async def test_the_last_use_is_recorded(strata_server: StrataServer, client: httpx2.AsyncClient) -> None:
    key, text = await make_key(strata_server)
    url = f"/admin/api/keys/{key.id}"
    before = await client.get(url, headers=bearer(strata_server.admin_key))
    assert before.json()["last_used_at"] is None
    await client.get("/v1/key", headers=bearer(text))
    after = await client.get(url, headers=bearer(strata_server.admin_key))
    used_at = datetime.fromisoformat(after.json()["last_used_at"])
    assert abs(datetime.now(UTC) - used_at) < timedelta(minutes=2)


async def test_a_rejected_key_is_not_recorded_as_used(strata_server: StrataServer, client: httpx2.AsyncClient) -> None:
    key, _ = await make_key(strata_server)
    await client.get("/v1/key", headers=bearer(issue_key_text(key.id)))
    after = await client.get(f"/admin/api/keys/{key.id}", headers=bearer(strata_server.admin_key))
    assert after.json()["last_used_at"] is None
