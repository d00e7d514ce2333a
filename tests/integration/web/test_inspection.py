"""Inspection over HTTP: an admin key sees its tenant, a super-admin key all."""

import hashlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest

from server.conversation.api_key import Scope
from server.emulator.reply import Reply
from server.postgres.inspection.search_index import index_new
from tests.conftest import StrataServer
from tests.support.conversation_driver import start_driver, text_reply
from tests.support.emulators import BOTH, EmulatedProviders
from tests.support.http_driver import ApiClient, open_api

CONVERSATIONS = "/admin/api/conversations"


@pytest.fixture
async def admin(strata_server: StrataServer) -> AsyncIterator[ApiClient]:
    async with open_api(strata_server, strata_server.admin_key) as api:
        yield api


@pytest.fixture
async def super_admin(strata_server: StrataServer) -> AsyncIterator[ApiClient]:
    tenant = await strata_server.key_ring.create_tenant("operators")
    _, key = await strata_server.key_ring.create_key(
        tenant_id=tenant.id, name="all", scopes=frozenset({Scope.SUPERADMIN}), expires_at=None
    )
    async with open_api(strata_server, key) as api:
        yield api


async def take_turns(server: StrataServer, emulated: EmulatedProviders, provider: str, *replies: Reply) -> str:
    driver = await start_driver(server.program, server.tenant.id, emulated, provider)
    await driver.task("How is <b>Oslo</b>?", *(replies or (text_reply("Cold."),)))
    await index_new(server.program.database)
    return driver.conversation_id


@pytest.mark.parametrize("provider", BOTH)
async def test_a_conversation_is_found_and_opened_and_its_call_is_verified(
    strata_server: StrataServer, emulated: EmulatedProviders, admin: ApiClient, provider: str
) -> None:
    conversation_id = await take_turns(strata_server, emulated, provider)

    [listed] = (await admin.expect(200, "GET", f"{CONVERSATIONS}?text=oslo&provider={provider}&state=complete"))["data"]
    assert listed["id"] == conversation_id
    assert listed["facts"]["excerpt"] == "How is <b>Oslo</b>?"
    assert (await admin.expect(200, "GET", f"{CONVERSATIONS}?text=bergen"))["data"] == []

    timeline = await admin.expect(200, "GET", f"{CONVERSATIONS}/{conversation_id}")
    assert [item["turn"]["seq"] for item in timeline["turns"]] == [1, 2]
    assert timeline["turns"][1]["calls"][0]["status"] == 200
    assert timeline["conversation"]["id"] == conversation_id

    path = f"{CONVERSATIONS}/{conversation_id}/calls/2/1"
    call = await admin.expect(200, "GET", path)
    assert call["request"]["proof"] == "equal"
    assert [layer["layer"] for layer in call["layers"]] == ["static", "dynamic", "buffered", "trigger"]
    assert call["folded"]["blocks"][-1] == {"type": "text", "text": "Cold."}
    assert call["cost"]["total"] > 0
    assert (call["previous"], call["next"], call["differs_from_turn"]) == (None, None, False)
    assert "present" in [part["state"] for part in call["received_signatures"]]

    request = await admin.ask("GET", f"{path}/request")
    assert hashlib.sha256(request.content).hexdigest() == call["request"]["stored_hash"]
    assert request.headers["x-strata-proof"] == "equal"
    response = await admin.ask("GET", f"{path}/response")
    assert len(response.content) == call["raw_bytes"]
    for answer in (request, response):
        assert answer.headers["content-type"] == "application/octet-stream"
        assert answer.headers["content-disposition"].startswith("attachment")


async def test_a_super_admin_sees_all_tenants_and_an_admin_its_own(
    strata_server: StrataServer, emulated: EmulatedProviders, admin: ApiClient, super_admin: ApiClient
) -> None:
    conversation_id = await take_turns(strata_server, emulated, "gemini")

    assert (await super_admin.expect(200, "GET", CONVERSATIONS))["data"] == []
    for tenant in ("all", strata_server.tenant.id):
        [listed] = (await super_admin.expect(200, "GET", f"{CONVERSATIONS}?tenant={tenant}"))["data"]
        assert listed["id"] == conversation_id
        assert (await super_admin.expect(200, "GET", f"/admin/api/overview?tenant={tenant}"))["total"]["calls"] == 1
    await super_admin.expect(200, "GET", f"{CONVERSATIONS}/{conversation_id}")
    await super_admin.expect(200, "GET", f"{CONVERSATIONS}/{conversation_id}/calls/2/1")

    for path in (f"{CONVERSATIONS}?tenant=all", "/admin/api/overview?tenant=all", f"{CONVERSATIONS}?tenant=tenant_x"):
        problem = await admin.expect(403, "GET", path)
        assert (problem["code"], problem["scope"]) == ("scope_missing", "superadmin")


async def test_an_admin_of_another_tenant_finds_nothing(
    strata_server: StrataServer, emulated: EmulatedProviders
) -> None:
    conversation_id = await take_turns(strata_server, emulated, "gemini")
    tenant = await strata_server.key_ring.create_tenant("other")
    _, key = await strata_server.key_ring.create_key(
        tenant_id=tenant.id, name="other", scopes=frozenset({Scope.ADMIN}), expires_at=None
    )
    async with open_api(strata_server, key) as other:
        assert (await other.expect(200, "GET", f"{CONVERSATIONS}?text=oslo"))["data"] == []
        for path in ("", "/calls/2/1", "/calls/2/1/request", "/calls/2/1/response"):
            problem = await other.expect(404, "GET", f"{CONVERSATIONS}/{conversation_id}{path}")
            assert problem["code"] == "conversation_not_found"


@pytest.mark.parametrize("path", ["", "/conv_x", "/conv_x/calls/2/1", "/conv_x/calls/2/1/request"])
async def test_a_client_key_has_no_access(strata_server: StrataServer, path: str) -> None:
    async with open_api(strata_server) as client:
        assert (await client.expect(403, "GET", f"{CONVERSATIONS}{path}"))["code"] == "scope_missing"


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=101",
        "cost_from=-1",
        "cost_from=nan",
        "tokens_from=x",
        "state=odd",
        "stop_reason=odd",
        "active_after=2026-01-01T00:00:00",
        f"text={'x' * 501}",
        "has_repairs=perhaps",
        "active_within=soon",
    ],
)
async def test_an_invalid_filter_is_refused(admin: ApiClient, query: str) -> None:
    assert (await admin.expect(422, "GET", f"{CONVERSATIONS}?{query}"))["code"] == "validation_failed"


async def test_missing_positions_and_calls_are_not_found(
    strata_server: StrataServer, emulated: EmulatedProviders, admin: ApiClient
) -> None:
    conversation_id = await take_turns(strata_server, emulated, "gemini")
    path = f"{CONVERSATIONS}/{conversation_id}"

    assert (await admin.expect(404, "GET", f"{path}/calls/4/1"))["code"] == "call_not_found"
    assert (await admin.expect(404, "GET", f"{path}/calls/-1/1"))["code"] == "call_not_found"
    assert (await admin.expect(422, "GET", f"{path}?after=1&around=1"))["code"] == "validation_failed"
    assert (await admin.expect(400, "GET", f"{CONVERSATIONS}?cursor=x"))["code"] == "cursor_invalid"
    assert (await admin.expect(200, "GET", f"{path}?after=99"))["turns"] == []


async def test_the_overview_has_the_requested_time_span(
    strata_server: StrataServer, emulated: EmulatedProviders, admin: ApiClient
) -> None:
    conversation_id = await take_turns(strata_server, emulated, "gemini")

    shown = await admin.expect(200, "GET", "/admin/api/overview?by=assistant")
    assert shown["step"] == "day"
    assert shown["total"]["calls"] == 1
    assert shown["by_key"][0]["name"] == "helper"
    assert [top["id"] for top in shown["most_expensive"]] == [conversation_id]
    assert {alarm["kind"]: alarm["estimated_count"] for alarm in shown["alarms"]}["has_prefix_break"] == 0

    since = (datetime.now(UTC) - timedelta(days=400)).strftime("%Y-%m-%dT00:00:00Z")
    assert (await admin.expect(422, "GET", f"/admin/api/overview?from={since}"))["code"] == "validation_failed"
