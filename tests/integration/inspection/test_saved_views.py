"""Saved views: stored by name for a tenant, limited in number, and audited."""

import asyncio

import httpx2
import pytest

from server.conversation.api_key import Scope, Tenant
from server.conversation.audit import OPERATOR
from server.conversation.errors import ViewExists, ViewLimitReached, ViewNotFound
from server.inspection.conversation_list import VIEW_LIMIT
from server.postgres.access.key_ring import PostgresKeyRing
from server.postgres.engine import Database
from server.postgres.inspection.saved_views import PostgresSavedViews
from tests.conftest import StrataServer
from tests.support.builders import NASTY
from tests.support.page_driver import audited, open_operator

FILTERS = {"error_code": "provider_overloaded", "active_within": "7d"}


@pytest.fixture
def views(database: Database) -> PostgresSavedViews:
    return PostgresSavedViews(database)


async def test_views_are_stored_by_name_and_logged(
    views: PostgresSavedViews, tenant: Tenant, database: Database
) -> None:
    second = await views.save_view(tenant.id, "b", FILTERS, OPERATOR)
    first = await views.save_view(tenant.id, NASTY, {"text": NASTY}, OPERATOR)
    assert [view.id for view in await views.list_views(tenant.id)] == [first.id, second.id]
    assert (await views.load_view(tenant.id, first.id)).filters == {"text": NASTY}
    assert second.filters == FILTERS
    with pytest.raises(ViewExists, match="named “b” exists already"):
        await views.save_view(tenant.id, "b", FILTERS, OPERATOR)
    with pytest.raises(ViewExists):
        await views.rename_view(tenant.id, first.id, "b", OPERATOR)
    assert (await views.rename_view(tenant.id, first.id, "a", OPERATOR)).name == "a"
    await views.delete_view(tenant.id, second.id, OPERATOR)
    assert [view.name for view in await views.list_views(tenant.id)] == ["a"]
    assert await audited(database) == [
        ("view.save", "done", second.id),
        ("view.save", "done", first.id),
        ("view.rename", "done", first.id),
        ("view.delete", "done", second.id),
    ]


async def test_views_of_another_tenant_do_not_exist(
    views: PostgresSavedViews, tenant: Tenant, key_ring: PostgresKeyRing
) -> None:
    other = await key_ring.create_tenant("other")
    view = await views.save_view(tenant.id, "mine", FILTERS, OPERATOR)
    await views.save_view(other.id, "mine", FILTERS, OPERATOR)
    with pytest.raises(ViewNotFound):
        await views.load_view(other.id, view.id)
    with pytest.raises(ViewNotFound):
        await views.rename_view(other.id, view.id, "x", OPERATOR)
    with pytest.raises(ViewNotFound):
        await views.delete_view(other.id, view.id, OPERATOR)
    assert [found.id for found in await views.list_views(tenant.id)] == [view.id]


async def test_no_tenant_has_more_views_than_the_limit_under_concurrency(
    views: PostgresSavedViews, tenant: Tenant
) -> None:
    saving = (views.save_view(tenant.id, f"view {number}", FILTERS, OPERATOR) for number in range(VIEW_LIMIT + 5))
    ends = await asyncio.gather(*saving, return_exceptions=True)
    assert sum(isinstance(end, ViewLimitReached) for end in ends) == 5
    assert len(await views.list_views(tenant.id)) == VIEW_LIMIT


async def test_views_over_http(strata_server: StrataServer) -> None:
    bearer = {"authorization": f"Bearer {strata_server.admin_key}"}
    async with httpx2.AsyncClient(base_url=strata_server.url, headers=bearer) as client:
        made = await client.post("/admin/api/views", json={"name": "  Overloads \n of the week ", "filters": FILTERS})
        assert made.status_code == 201
        view = made.json()
        assert view["name"] == "Overloads of the week"
        assert view["page"] == "/admin/conversations?error_code=provider_overloaded&active_within=7d"
        assert (await client.get("/admin/api/views")).json()["data"] == [view]
        for body, status, code in (
            ({"name": "Overloads of the week", "filters": FILTERS}, 409, "view_exists"),
            ({"name": "x", "filters": {}}, 422, "validation_failed"),
            ({"name": "x", "filters": {"text": "  "}}, 422, "validation_failed"),
            ({"name": "x", "filters": {"colour": "red"}}, 422, "validation_failed"),
            ({"name": "x", "filters": {"active_within": "soon"}}, 422, "validation_failed"),
            ({"name": " ", "filters": FILTERS}, 422, "validation_failed"),
            ({"name": "x" * 81, "filters": FILTERS}, 422, "validation_failed"),
        ):
            answer = await client.post("/admin/api/views", json=body)
            assert (answer.status_code, answer.json()["code"]) == (status, code), body
        assert (await client.delete(f"/admin/api/views/{view['id']}")).status_code == 204
        again = await client.delete(f"/admin/api/views/{view['id']}")
        assert (again.status_code, again.json()["code"]) == (404, "view_not_found")


async def test_the_audit_log_over_http_is_filtered_and_paged(strata_server: StrataServer) -> None:
    ring = strata_server.key_ring
    _, text = await ring.create_key(
        tenant_id=strata_server.tenant.id, name="root", scopes=frozenset({Scope.SUPERADMIN}), expires_at=None
    )
    other = await ring.create_tenant("other")
    theirs, _ = await ring.create_key(
        tenant_id=other.id, name="theirs", scopes=frozenset({Scope.CLIENT}), expires_at=None
    )
    await ring.revoke_key(theirs.id)
    async with open_operator(strata_server.url) as operator:
        await operator.log_in("nonsense")
        await operator.log_in(strata_server.admin_key)
    bearer = {"authorization": f"Bearer {strata_server.admin_key}"}
    async with httpx2.AsyncClient(base_url=strata_server.url, headers=bearer) as client:
        own = (await client.get("/admin/api/audit")).json()
        login = own["data"][0]
        assert (login["action"], login["outcome"], login["tenant_id"]) == ("login", "done", strata_server.tenant.id)
        assert login["session_id"].startswith("session_")
        assert theirs.id not in str(own)
        for name, value in (("action", "login"), ("api_key_id", login["api_key_id"]), ("outcome", "done")):
            found = (await client.get("/admin/api/audit", params={name: value})).json()["data"]
            assert {row[name] for row in found} == {value}
        assert (await client.get("/admin/api/audit", params={"object_id": theirs.id})).json()["data"] == []
        assert (await client.get("/admin/api/audit?to=2026-01-01T00:00:00Z")).json()["data"] == []
        assert (await client.get("/admin/api/audit?tenant=all")).status_code == 403
        assert (await client.get("/admin/api/audit?outcome=perhaps")).status_code == 422
        assert (await client.get("/admin/api/audit?cursor=x")).status_code == 400

        first = (await client.get("/admin/api/audit?limit=1")).json()
        rest = (await client.get("/admin/api/audit", params={"cursor": first["next_cursor"]})).json()
        assert first["data"] + rest["data"] == own["data"]

        client.headers["authorization"] = f"Bearer {text}"
        everything = (await client.get("/admin/api/audit?tenant=all")).json()["data"]
        assert {row["tenant_id"] for row in everything} == {None, strata_server.tenant.id, other.id}
        revoked = (await client.get("/admin/api/audit", params={"tenant": other.id, "object_id": theirs.id})).json()
        assert "key.revoke" in [row["action"] for row in revoked["data"]]
