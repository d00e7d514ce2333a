"""Every route with ids of another tenant: no data is returned, and nothing changes."""

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from server.conversation.api_key import Scope
from server.conversation.identifiers import ASSISTANT, CONVERSATION, SAVED_VIEW, TENANT, decode_id, encode_id, new_id
from server.postgres.schema import metadata
from server.web.tenant_boundary import _READ_ONLY_POSTS
from tests.conftest import StrataServer
from tests.integration.web.test_conversations import picture_of
from tests.support.http_driver import ApiClient, open_api, turns
from tests.support.page_driver import open_operator

_CONVERSATION = "/v1/conversations/{conversation_id}"
FOREIGN_ROUTES: list[tuple[str, str, Any]] = [
    ("GET", "/v1/assistants/{assistant_id}", None),
    ("PUT", "/v1/assistants/{assistant_id}", {"name": "mine now"}),
    ("GET", _CONVERSATION, None),
    ("PATCH", _CONVERSATION, {"metadata": {"mine": True}}),
    ("DELETE", _CONVERSATION, None),
    ("PUT", f"{_CONVERSATION}/context", {"mine": True}),
    ("POST", f"{_CONVERSATION}/fork", {"at_seq": 2}),
    ("POST", f"{_CONVERSATION}/cancel", {}),
    ("POST", f"{_CONVERSATION}/turns", {"input": "Hello"}),
    ("GET", f"{_CONVERSATION}/turns", None),
    ("GET", f"{_CONVERSATION}/turns/{{seq}}", None),
    ("GET", f"{_CONVERSATION}/turns/{{seq}}/events", None),
    ("GET", f"{_CONVERSATION}/images/{{sha256}}", None),
    ("POST", f"{_CONVERSATION}/compactions", {"force": True}),
    ("GET", f"{_CONVERSATION}/compactions", None),
    ("DELETE", f"{_CONVERSATION}/compactions/latest", None),
]
"""Routes with an object of a tenant, with a body that its owner could send."""
_INSPECTED = "/admin/api/conversations/{conversation_id}"
_INSPECTED_ASSISTANT = "/admin/api/assistants/{assistant_id}"
ADMIN_ROUTES: list[tuple[str, str, Any]] = [
    ("GET", _INSPECTED, None),
    ("GET", f"{_INSPECTED}/calls/{{turn_seq}}/{{attempt}}", None),
    ("GET", f"{_INSPECTED}/calls/{{turn_seq}}/{{attempt}}/request", None),
    ("GET", f"{_INSPECTED}/calls/{{turn_seq}}/{{attempt}}/response", None),
    ("GET", f"{_INSPECTED}/export", None),
    ("POST", f"{_INSPECTED}/fork", {"at_seq": 2}),
    ("POST", f"{_INSPECTED}/cancel", {}),
    ("POST", f"{_INSPECTED}/compactions", {"force": True}),
    ("DELETE", f"{_INSPECTED}/compactions/latest", None),
    ("GET", _INSPECTED_ASSISTANT, None),
    ("GET", f"{_INSPECTED_ASSISTANT}/versions", None),
    ("GET", f"{_INSPECTED_ASSISTANT}/versions/{{version}}", None),
    ("POST", f"{_INSPECTED_ASSISTANT}/render", {}),
    ("POST", f"{_INSPECTED_ASSISTANT}/check", {}),
    ("DELETE", "/admin/api/views/{view_id}", None),
    ("DELETE", _INSPECTED, None),
]
"""The same for operators. What a superadmin may do in all tenants is in the order in which it can be done."""


@pytest.fixture
async def owner(strata_server: StrataServer) -> AsyncIterator[ApiClient]:
    async with open_api(strata_server) as opened:
        yield opened


@pytest.fixture
async def stranger(strata_server: StrataServer) -> AsyncIterator[ApiClient]:
    tenant = await strata_server.key_ring.create_tenant("other")
    _, key = await strata_server.key_ring.create_key(
        tenant_id=tenant.id, name="other", scopes=frozenset({Scope.CLIENT}), expires_at=None
    )
    async with open_api(strata_server, key) as opened:
        yield opened


async def everything(server: StrataServer) -> dict[str, list[Any]]:
    """All rows of all tables, except those that record the use of a key."""
    connection = await asyncpg.connect(server.program.database.options.url)
    try:
        return {
            table.fullname: sorted(map(repr, await connection.fetch(f"SELECT * FROM {table.fullname}")))  # noqa: S608  reason: our own tables
            for table in metadata.sorted_tables
            if table.name not in {"api_keys", "rate_limits"}
        }
    finally:
        await connection.close()


async def test_ids_of_another_tenant_are_not_found_and_nothing_changes(
    strata_server: StrataServer, owner: ApiClient, stranger: ApiClient
) -> None:
    conversation, sha256 = await picture_of(owner)
    assistant = (await owner.expect(200, "GET", f"/v1/conversations/{conversation}"))["assistant_id"]
    foreign = {"conversation_id": conversation, "assistant_id": assistant, "seq": "2", "sha256": sha256}
    missing = {**foreign, "conversation_id": new_id(CONVERSATION), "assistant_id": new_id(ASSISTANT)}
    before = await everything(strata_server)
    assert before["turns"]
    for method, path, body in FOREIGN_ROUTES:
        answers = []
        for ids in (foreign, missing):
            answer = await stranger.ask(method, path.format(**ids), body)
            answers.append(re.sub("req_[0-9a-f]+", "", answer.text))
            assert answer.status_code == 404, (method, path, answer.text)
        assert answers[0] == answers[1], "an answer reveals that the object exists"
        for key in ("none", strata_server.admin_key):
            answer = await ApiClient(client=stranger.client, key=key).ask(method, path.format(**foreign), body)
            assert answer.status_code == (401 if key == "none" else 403)
    body = {"assistant_id": assistant}
    assert (await stranger.expect(404, "POST", "/v1/conversations", body))["code"] == "assistant_not_found"
    for path in ("/v1/assistants", "/v1/conversations", f"/v1/conversations?assistant_id={assistant}"):
        assert (await stranger.expect(200, "GET", path))["data"] == []
    assert await everything(strata_server) == before


async def test_the_owner_can_use_all_these_routes(owner: ApiClient) -> None:
    """The routes above are refused because of the tenant, not because they would not work."""
    conversation, sha256 = await picture_of(owner)
    assistant = (await owner.expect(200, "GET", f"/v1/conversations/{conversation}"))["assistant_id"]
    ids = {"conversation_id": conversation, "assistant_id": assistant, "seq": "2", "sha256": sha256}
    last = ("DELETE", _CONVERSATION)
    for method, path, body in sorted(FOREIGN_ROUTES, key=lambda route: route[:2] == last):
        answer = await owner.ask(method, path.format(**ids), body)
        nothing_there = {"/cancel": {409}, "/latest": {404}}
        expected = nothing_there.get(path[path.rindex("/") :], {200, 201})
        assert answer.status_code in expected, (method, path, answer.text)


async def test_ids_of_another_tenant_are_not_found_by_its_operators_either(
    strata_server: StrataServer, owner: ApiClient
) -> None:
    ids = await inspected(strata_server, owner)
    missing = {
        **ids,
        "conversation_id": new_id(CONVERSATION),
        "assistant_id": new_id(ASSISTANT),
        "view_id": new_id(SAVED_VIEW),
    }
    stranger = ApiClient(client=owner.client, key=await make_key(strata_server, "other", Scope.ADMIN))
    before = await everything(strata_server)
    for method, path, body in ADMIN_ROUTES:
        answers = []
        for named in (ids, missing):
            answer = await stranger.ask(method, path.format(**named), body)
            answers.append(re.sub("req_[0-9a-f]+", "", answer.text))
            assert answer.status_code == 404, (method, path, answer.text)
        assert answers[0] == answers[1], "an answer reveals that the object exists"
        for key in ("none", owner.key):
            answer = await ApiClient(client=owner.client, key=key).ask(method, path.format(**ids), body)
            assert answer.status_code == (401 if key == "none" else 403)
    after = await everything(strata_server)
    # The attempts to export, fork, cancel, compact, undo and erase are audited in the tenant of the key.
    tried = set(after.pop("audit_log")) - set(before.pop("audit_log"))
    assert len(tried) == 2 * 6
    assert not [row for row in tried if repr(decode_id(TENANT, strata_server.tenant.id)) in row]
    assert after == before


READING = {"render", "check"}
"""Routes that only read, although they are a POST."""


async def test_a_superadmin_reads_everything_and_changes_nothing_of_another_tenant(
    strata_server: StrataServer, owner: ApiClient
) -> None:
    ids = await inspected(strata_server, owner)
    superadmin = ApiClient(client=owner.client, key=await make_key(strata_server, "other", Scope.SUPERADMIN))
    before = await everything(strata_server)
    read = set()
    for method, path, body in ADMIN_ROUTES:
        answer = await superadmin.ask(method, path.format(**ids), body)
        if "view_id" in path:
            # A saved view is visible to its tenant only.
            assert answer.status_code == 404
        elif method == "GET" or path.rpartition("/")[2] in READING:
            assert answer.status_code == 200, (method, path, answer.text)
            read.add(path)
        else:
            assert answer.status_code == 403, (method, path, answer.text)
            assert answer.json()["code"] == "other_tenant_read_only"
    after = await everything(strata_server)
    rows = await audit_rows(strata_server)
    assert {name: table for name, table in after.items() if name != "audit_log"} == {
        name: table for name, table in before.items() if name != "audit_log"
    }
    # Every read is audited once in the tenant that was read; the export is also audited as an export.
    reads = [row for row in rows if row["action"] == "tenant.read"]
    assert {row["details"]["route"] for row in reads} == read
    assert len(reads) == len(read)
    assert {row["tenant_id"] for row in rows if row["action"] in {"tenant.read", "conversation.export"}} == {
        strata_server.tenant.id
    }
    assert {row["object"] for row in reads} == {ids["conversation_id"], ids["assistant_id"]}
    assert [row["details"] for row in reads if row["details"]["route"].endswith("/response")] == [
        {
            "route": f"{_INSPECTED}/calls/{{turn_seq}}/{{attempt}}/response",
            "turn_seq": ids["turn_seq"],
            "attempt": ids["attempt"],
        }
    ]


async def test_reading_again_adds_no_second_row_and_reading_the_own_tenant_none(
    strata_server: StrataServer, owner: ApiClient
) -> None:
    ids = await inspected(strata_server, owner)
    superadmin = ApiClient(client=owner.client, key=await make_key(strata_server, "other", Scope.SUPERADMIN))
    at_home = ApiClient(client=owner.client, key=await make_key(strata_server, None, Scope.SUPERADMIN))
    for path in (f"/admin/api/conversations/{ids['conversation_id']}", "/admin/api/conversations"):
        for _ in range(3):
            await superadmin.expect(200, "GET", path)
            await at_home.expect(200, "GET", path)
    rows = [row for row in await audit_rows(strata_server) if row["action"] == "tenant.read"]
    assert [(row["object"], row["tenant_id"]) for row in rows] == [(ids["conversation_id"], strata_server.tenant.id)]
    # A key of the tenant itself may do everything there.
    await at_home.expect(200, "DELETE", f"/admin/api/conversations/{ids['conversation_id']}")


async def test_searching_other_tenants_is_logged_without_the_search_text(
    strata_server: StrataServer, owner: ApiClient
) -> None:
    await inspected(strata_server, owner)
    superadmin = ApiClient(client=owner.client, key=await make_key(strata_server, "other", Scope.SUPERADMIN))
    theirs = strata_server.tenant.id
    await superadmin.expect(200, "GET", "/admin/api/conversations?tenant=all&phrase=secret+words")
    await superadmin.expect(200, "GET", f"/admin/api/assistants?tenant={theirs}")
    rows = [row for row in await audit_rows(strata_server) if row["action"] == "tenant.read"]
    assert [(row["tenant_id"], row["object"], row["details"]) for row in rows] == [
        (None, None, {"route": "/admin/api/conversations", "filters": ["phrase"], "tenants": "all"}),
        (theirs, None, {"route": "/admin/api/assistants"}),
    ]


@pytest.mark.parametrize("route", ["conversations", "assistants", "replays", "overview", "audit"])
async def test_naming_two_tenants_does_not_hide_which_one_is_read(
    strata_server: StrataServer, owner: ApiClient, route: str
) -> None:
    superadmin = ApiClient(client=owner.client, key=await make_key(strata_server, "other", Scope.SUPERADMIN))
    own = (await superadmin.expect(200, "GET", "/v1/key"))["tenant"]["id"]
    for other in (strata_server.tenant.id, "all"):
        for named in (f"tenant={own}&tenant={other}", f"tenant={other}&tenant={own}"):
            answer = await superadmin.ask("GET", f"/admin/api/{route}?{named}")
            assert answer.status_code == 422, answer.text
            assert answer.json()["errors"][0]["path"] == "tenant"
    assert "tenant.read" not in {row["action"] for row in await audit_rows(strata_server)}


@pytest.mark.parametrize("route", ["keys", "views", "jobs", "usage"])
async def test_a_route_of_the_own_tenant_only_logs_nothing_for_another(
    strata_server: StrataServer, owner: ApiClient, route: str
) -> None:
    superadmin = ApiClient(client=owner.client, key=await make_key(strata_server, "other", Scope.SUPERADMIN))
    await superadmin.expect(200, "GET", f"/admin/api/{route}?tenant={strata_server.tenant.id}")
    assert "tenant.read" not in {row["action"] for row in await audit_rows(strata_server)}


async def test_no_route_of_operators_can_change_objects_of_another_tenant(strata_server: StrataServer) -> None:
    """Derived from the routes themselves: one that is added later is refused unless it is listed as reading."""
    changing = {
        (method, route.path_format)
        for route in strata_server.program.app.litestar.routes
        if route.path.startswith("/admin") and any(name in route.path for name in ("conversation_id", "assistant_id"))
        for method in getattr(route, "methods", set()) - {"GET", "HEAD", "OPTIONS"}
    }
    reading = {(method, path) for method, path in changing if path in _READ_ONLY_POSTS}
    assert {path.rpartition("/")[2] for _, path in reading} == {"render", "check", "export"}
    superadmin = await make_key(strata_server, "other", Scope.SUPERADMIN)
    async with open_api(strata_server) as owner, open_operator(strata_server.url) as operator:
        ids = await inspected(strata_server, owner)
        await operator.log_in(superadmin)
        token = await operator.csrf_token()
        api = ApiClient(client=owner.client, key=superadmin)
        for method, path in changing - reading:
            if path.startswith("/admin/api"):
                answer = await api.ask(method, path.format(**ids), {})
            else:
                answer = await operator.send(path.format(**ids), {"csrf_token": token})
                assert (await operator.get(path.format(**ids))).status_code == 403
            assert answer.status_code == 403, (method, path)
            assert "other_tenant_read_only" in answer.text


async def audit_rows(server: StrataServer) -> list[dict[str, Any]]:
    connection = await asyncpg.connect(server.program.database.options.url)
    try:
        rows = await connection.fetch("SELECT tenant_id, action, object, details FROM audit_log ORDER BY id")
    finally:
        await connection.close()
    return [
        {
            "tenant_id": row["tenant_id"] and encode_id(TENANT, row["tenant_id"]),
            "action": row["action"],
            "object": row["object"],
            "details": json.loads(row["details"]),
        }
        for row in rows
    ]


async def inspected(server: StrataServer, owner: ApiClient) -> dict[str, str]:
    """The ids of objects of the owner's tenant."""
    conversation, sha256 = await picture_of(owner)
    shown = await owner.expect(200, "GET", f"/v1/conversations/{conversation}")
    admin = ApiClient(client=owner.client, key=server.admin_key)
    view = await admin.expect(201, "POST", "/admin/api/views", {"name": "mine", "filters": {"state": "failed"}})
    return {
        "conversation_id": conversation,
        "assistant_id": shown["assistant_id"],
        "view_id": view["id"],
        "version": "1",
        "turn_seq": "2",
        "attempt": "1",
        "seq": "2",
        "sha256": sha256,
    }


async def make_key(server: StrataServer, tenant_name: str | None, scope: Scope) -> str:
    """A key of a new tenant; without a name, of the server's own tenant."""
    tenant = server.tenant if tenant_name is None else await server.key_ring.create_tenant(tenant_name)
    _, key = await server.key_ring.create_key(
        tenant_id=tenant.id, name="other", scopes=frozenset({scope}), expires_at=None
    )
    return key


async def test_an_image_of_another_conversation_is_not_available_to_another_tenant(
    owner: ApiClient, stranger: ApiClient
) -> None:
    _, sha256 = await picture_of(owner)
    own = await stranger.begin()
    await stranger.say(own)
    assert (await stranger.expect(404, "GET", f"/v1/conversations/{own}/images/{sha256}"))["code"] == "image_not_found"
    assert (await stranger.expect(200, "GET", turns(own, 2)))["state"] == "complete"
