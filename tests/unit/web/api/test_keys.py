from datetime import UTC, datetime

from server.conversation.api_key import Scope
from tests.support.fakes.site import Site


async def stranger(site: Site) -> tuple[str, str]:
    """The id and text of an admin key of another tenant."""
    tenant = await site.key_ring.create_tenant("other")
    key, text = await site.key_ring.create_key(
        tenant_id=tenant.id, name="theirs", scopes=frozenset(Scope), expires_at=datetime(2100, 1, 1, tzinfo=UTC)
    )
    return key.id, text


async def revoke(site: Site, key_id: str, key: str) -> tuple[int, dict[str, object]]:
    answer = await site.client.delete(f"/admin/api/keys/{key_id}", headers={"authorization": f"Bearer {key}"})
    return answer.status_code, answer.json()


async def test_a_key_can_request_its_own_description(site: Site) -> None:
    _, text = await stranger(site)
    body = (await site.get("/v1/key", key=text)).json()
    assert body["name"] == "theirs"
    assert body["tenant"]["name"] == "other"
    assert body["scopes"] == ["admin", "client", "superadmin"]
    assert body["expires_at"] == "2100-01-01T00:00:00Z"
    assert body["revoked_at"] is None
    assert body["created_at"].endswith("Z")
    assert body["last_used_at"].endswith("Z")
    assert set(body) == {
        "id", "name", "tenant", "scopes", "created_at", "expires_at", "revoked_at", "last_used_at",
    }  # fmt: skip


async def test_an_admin_sees_the_keys_of_its_own_tenant_only(site: Site) -> None:
    await stranger(site)
    page = (await site.get("/admin/api/keys", key=site.admin_key)).json()
    assert [key["name"] for key in page["data"]] == ["client", "admin"]
    assert page["next_cursor"] is None


async def test_a_key_of_another_tenant_does_not_exist(site: Site) -> None:
    theirs, text = await stranger(site)
    answer = await site.get(f"/admin/api/keys/{theirs}", key=site.admin_key)
    assert (answer.status_code, answer.json()["code"]) == (404, "api_key_not_found")
    status, body = await revoke(site, theirs, site.admin_key)
    assert (status, body["code"]) == (404, "api_key_not_found")
    assert (await site.get("/v1/key", key=text)).status_code == 200


async def test_revoking_takes_effect_at_once_and_keeps_the_first_time(site: Site) -> None:
    key_id = (await site.get("/v1/key", key=site.client_key)).json()["id"]
    status, first = await revoke(site, key_id, site.admin_key)
    assert status == 200
    assert first["revoked_at"] is not None
    assert (await site.get("/v1/key", key=site.client_key)).status_code == 401
    assert await revoke(site, key_id, site.admin_key) == (200, first)
    assert (await site.get(f"/admin/api/keys/{key_id}", key=site.admin_key)).json() == first


async def test_a_client_key_cannot_revoke(site: Site) -> None:
    key_id = (await site.get("/v1/key", key=site.client_key)).json()["id"]
    status, body = await revoke(site, key_id, site.client_key)
    assert (status, body["code"]) == (403, "scope_missing")
    assert (await site.get("/v1/key", key=site.client_key)).status_code == 200
