"""Assistants for operators over HTTP: versions, differences, checks and prompts; and their pages without a browser."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from server.conversation.api_key import Scope
from server.conversation.assistant import Instructions
from server.postgres.engine import Database
from server.postgres.inspection.inspector import PostgresInspector
from tests.conftest import StrataServer
from tests.support.builders import create_assistant, definition
from tests.support.http_driver import ApiClient, open_api
from tests.support.page_driver import Operator, audited, open_operator

ASSISTANTS = "/admin/api/assistants"
TEXTS = Instructions(roles="You know {{ city }}.", procedure="Look.", constraints="Be {{ tone }}.")


@pytest.fixture
async def admin(strata_server: StrataServer) -> AsyncIterator[ApiClient]:
    async with open_api(strata_server, strata_server.admin_key) as api:
        yield api


@pytest.fixture
async def operator(strata_server: StrataServer) -> AsyncIterator[Operator]:
    async with open_operator(strata_server.url) as opened:
        await opened.log_in(strata_server.admin_key)
        yield opened


async def superadmin_key(server: StrataServer) -> str:
    tenant = await server.key_ring.create_tenant("operators")
    _, key = await server.key_ring.create_key(
        tenant_id=tenant.id, name="all", scopes=frozenset({Scope.SUPERADMIN}), expires_at=None
    )
    return key


async def two_versions(server: StrataServer) -> str:
    store, tenant_id = server.program.store, server.tenant.id
    made = await store.create_assistant(tenant_id, definition(instructions=TEXTS))
    await store.revise_assistant(tenant_id, made.id, definition(instructions=TEXTS, settings={"thinking": "high"}))
    return made.id


def form_of(token: str, **changes: str) -> dict[str, str]:
    return {
        "csrf_token": token,
        "base_version": "2",
        "roles": TEXTS.roles,
        "procedure": TEXTS.procedure,
        "constraints": TEXTS.constraints,
        "variables": '{\r\n  "tone": "friendly"\r\n}',
        "args": "",
        **changes,
    }


async def test_versions_are_listed_and_compared(strata_server: StrataServer, admin: ApiClient) -> None:
    assistant_id = await two_versions(strata_server)
    async with open_api(strata_server) as client:
        for version in (1, 2, 2):
            body = {"assistant_id": assistant_id, "assistant_version": version}
            await client.expect(201, "POST", "/v1/conversations", body)

    [outline] = (await admin.expect(200, "GET", ASSISTANTS))["data"]
    assert (outline["id"], outline["version"], outline["versions"], outline["conversations"]) == (assistant_id, 2, 2, 3)
    shown = await admin.expect(200, "GET", f"{ASSISTANTS}/{assistant_id}")
    assert shown["conversations_by_version"] == {"1": 1, "2": 2}
    assert shown["assistant"]["settings"] == {"thinking": "high"}
    first = await admin.expect(200, "GET", f"{ASSISTANTS}/{assistant_id}/versions?limit=1")
    assert [item["version"] for item in first["data"]] == [2]
    rest = await admin.expect(200, "GET", f"{ASSISTANTS}/{assistant_id}/versions?cursor={first['next_cursor']}")
    assert ([item["version"] for item in rest["data"]], rest["next_cursor"]) == ([1], None)

    compared = await admin.expect(200, "GET", f"{ASSISTANTS}/{assistant_id}/versions/2?against=1")
    difference = compared["difference"]
    assert (difference["against"], difference["cache_effect"]) == (1, "none")
    assert [(change["path"], change["change"]) for change in difference["changes"]] == [
        ("settings.max_output_tokens", "removed"),
        ("settings.thinking", "changed"),
    ]
    assert (await admin.expect(200, "GET", f"{ASSISTANTS}/{assistant_id}/versions/1"))["difference"] is None
    for path in ("versions/3", "versions/2?against=3", "versions/99999999999999"):
        assert (await admin.expect(404, "GET", f"{ASSISTANTS}/{assistant_id}/{path}"))["code"] == "assistant_not_found"


async def test_instructions_are_checked_and_rendered_without_being_saved(
    strata_server: StrataServer, admin: ApiClient
) -> None:
    assistant_id = await two_versions(strata_server)
    tried = {"instructions": {"roles": "Hello\n{{ system.current_date }} {{ town }}"}}
    checked = await admin.expect(200, "POST", f"{ASSISTANTS}/{assistant_id}/check", tried)
    assert not checked["is_valid"]
    assert [(problem["severity"], problem["line"]) for problem in checked["problems"]] == [("error", 2), ("warning", 2)]
    assert checked["args"] == ["town"]

    prompt = await admin.expect(
        200, "POST", f"{ASSISTANTS}/{assistant_id}/render", {"version": 1, "args": {"city": "Oslo"}}
    )
    assert "You know Oslo." in prompt["text"]
    assert (prompt["version"], prompt["bytes"], prompt["missing"]) == (1, len(prompt["text"].encode()), [])
    assert 0 < prompt["tokens"] < prompt["bytes"]
    failing = {"instructions": {"roles": "{{ nothing.at.all }}"}}
    prompt = await admin.expect(200, "POST", f"{ASSISTANTS}/{assistant_id}/render", failing)
    assert [problem["template"] for problem in prompt["problems"]] == ["roles"]
    unknown = await admin.expect(404, "POST", f"{ASSISTANTS}/{assistant_id}/render", {"conversation_id": "conv_x"})
    assert unknown["code"] == "conversation_not_found"
    assert (await admin.expect(200, "GET", f"{ASSISTANTS}/{assistant_id}"))["newest_version"] == 2


async def test_the_rendered_text_is_the_text_that_a_model_gets(
    strata_server: StrataServer, admin: ApiClient, database: Database
) -> None:
    assistant_id = await two_versions(strata_server)
    async with open_api(strata_server) as client:
        body = {"assistant_id": assistant_id, "args": {"city": "Bergen"}}
        conversation = (await client.expect(201, "POST", "/v1/conversations", body))["id"]
        await client.say(conversation)
    prompt = await admin.expect(200, "POST", f"{ASSISTANTS}/{assistant_id}/render", {"conversation_id": conversation})
    async with database.connection() as connection:
        assert await connection.fetchval("SELECT encode(static_hash, 'hex') FROM epochs") == prompt["sha256"]


async def test_a_super_admin_sees_assistants_of_all_tenants_and_saves_its_own_only(strata_server: StrataServer) -> None:
    assistant_id = await two_versions(strata_server)
    key = await superadmin_key(strata_server)
    async with open_api(strata_server, key) as api, open_operator(strata_server.url) as operator:
        assert (await api.expect(200, "GET", ASSISTANTS))["data"] == []
        [outline] = (await api.expect(200, "GET", f"{ASSISTANTS}?tenant=all"))["data"]
        assert (outline["id"], outline["tenant_name"]) == (assistant_id, "acme")
        await api.expect(200, "GET", f"{ASSISTANTS}/{assistant_id}/versions")
        await operator.log_in(key)
        assert assistant_id in (await operator.get("/admin/assistants")).text
        token = await operator.csrf_token()
        answer = await operator.send(f"/admin/assistants/{assistant_id}/edit", form_of(token, procedure="Wait."))
        assert (answer.status_code, "other_tenant_read_only" in answer.text) == (403, True)
        assert (
            f"/admin/assistants/{assistant_id}/edit"
            not in (await operator.get(f"/admin/assistants/{assistant_id}")).text
        )
    unchanged = await strata_server.program.store.load_assistant(strata_server.tenant.id, assistant_id)
    assert unchanged.version == 2


async def test_an_assistant_of_another_tenant_has_no_page_and_cannot_be_saved(
    strata_server: StrataServer, operator: Operator, database: Database
) -> None:
    other = await strata_server.key_ring.create_tenant("other")
    theirs = await create_assistant(strata_server.program.store, other.id)
    here, token = f"/admin/assistants/{theirs.id}", await operator.csrf_token()
    for path in ("", "/versions/1", "/versions/1?against=1", "/versions/1/prompt", "/versions/1/definition", "/edit"):
        assert (await operator.get(here + path)).status_code == 404, path
    for path in ("/edit", "/check"):
        assert (await operator.send(here + path, form_of(token, base_version="1"))).status_code == 404
    assert theirs.id not in (await operator.get("/admin/assistants")).text
    assert "assistant.save" not in {action for action, _, _ in await audited(database)}


async def test_a_form_is_checked_and_saved_without_script(strata_server: StrataServer, operator: Operator) -> None:
    assistant_id, token = await two_versions(strata_server), await operator.csrf_token()
    here = f"/admin/assistants/{assistant_id}"
    answer = await operator.send(f"{here}/check", form_of(token, roles="Hi {{ system }}"))
    assert answer.status_code == 200
    assert "Hi {{ system }}</textarea>" in answer.text
    assert "The draft cannot be saved" in answer.text
    for wrong in ({"roles": "{% if %}"}, {"roles": "x" * 200_001}, {"variables": "["}):
        answer = await operator.send(f"{here}/edit", form_of(token, **wrong))
        assert (answer.status_code, "The draft cannot be saved" in answer.text) == (422, True), list(wrong)
    # As long as the API takes it, also with characters that take twelve bytes each in a form.
    texts = {"roles": "\U0001f600" * 20_000, "procedure": "x" * 200_000, "constraints": "x" * 200_000}
    long = await operator.send(f"{here}/check", form_of(token, **texts))
    assert (long.status_code, "The draft can be saved" in long.text) == (200, True)
    unchanged = await operator.send(f"{here}/edit", form_of(token))
    assert (unchanged.status_code, "There is no difference" in unchanged.text) == (200, True)
    assert (await operator.send(f"{here}/edit", form_of("forged", roles="Mine."))).status_code == 403
    assert (await operator.send(f"{here}/edit", form_of(token, base_version="x"))).status_code == 400
    assert (await strata_server.program.store.load_assistant(strata_server.tenant.id, assistant_id)).version == 2


async def test_truncated_content_can_be_downloaded(strata_server: StrataServer, operator: Operator) -> None:
    store, tenant_id = strata_server.program.store, strata_server.tenant.id
    long = definition(instructions=Instructions(roles="<b>" + "x" * 150_000))
    made = await store.create_assistant(tenant_id, long)
    page = await operator.get(f"/admin/assistants/{made.id}")
    assert "20,000 of 150,003 characters." in page.text
    whole = await operator.get(f"/admin/assistants/{made.id}/versions/1/definition")
    assert whole.json()["instructions"]["roles"] == long.instructions.roles
    prompt = await operator.get(f"/admin/assistants/{made.id}/versions/1/prompt/whole")
    assert long.instructions.roles in prompt.text
    for answer in (whole, prompt):
        assert answer.headers["content-disposition"].startswith("attachment")
        assert answer.headers["x-content-type-options"] == "nosniff"


async def test_the_list_has_one_row_per_assistant_for_any_number_of_versions(
    strata_server: StrataServer, database: Database
) -> None:
    store, tenant_id = strata_server.program.store, strata_server.tenant.id
    other = await strata_server.key_ring.create_tenant("other")
    made: list[Any] = []
    for number in range(5):
        owner = tenant_id if number % 2 else other.id
        made.append(await create_assistant(store, owner, name=str(number)))
        for _ in range(number):
            await store.revise_assistant(owner, made[-1].id, definition(name=f"{number} again"))
    inspector = PostgresInspector(database)
    for tenant, expected in ((None, [4, 3, 2, 1, 0]), (tenant_id, [3, 1]), (other.id, [4, 2, 0])):
        seen: list[Any] = []
        cursor = None
        while True:
            page = await inspector.list_assistants(tenant, cursor=cursor, limit=2)
            seen += page.items
            cursor = page.next_cursor
            if cursor is None:
                break
        assert [outline.id for outline in seen] == [made[number].id for number in expected]
        assert [outline.version_count for outline in seen] == [number + 1 for number in expected]
    assert (await inspector.list_assistants("tenant_x")).items == []
