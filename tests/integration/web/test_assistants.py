"""Assistants over real HTTP, with the real store and renderer."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from server.conversation.identifiers import ASSISTANT, new_id
from server.postgres.engine import Database
from tests.conftest import StrataServer
from tests.support.builders import NASTY
from tests.support.emulators import EmulatedProviders
from tests.support.http_driver import WEATHER, ApiClient, open_api, turns

WHOLE = {
    "name": "helper",
    "language": "en",
    "description": "Helps.",
    "provider": "anthropic",
    "model": "claude-sonnet-5-5",
    "instructions": {"roles": "You help.", "procedure": "Think.", "constraints": "Be {{ tone }}."},
    "variables": {"tone": "friendly"},
    "tools": [WEATHER],
    "settings": {"max_output_tokens": 1024, "thinking": "low"},
}


@pytest.fixture
async def api(strata_server: StrataServer) -> AsyncIterator[ApiClient]:
    async with open_api(strata_server) as opened:
        yield opened


async def test_an_assistant_is_shown_as_created(api: ApiClient) -> None:
    answer = await api.ask("POST", "/v1/assistants", WHOLE)
    assert answer.status_code == 201
    made = answer.json()
    assert {name: made[name] for name in WHOLE} == WHOLE
    assert made["version"] == 1
    assert answer.headers["location"] == f"/v1/assistants/{made['id']}"
    assert await api.expect(200, "GET", answer.headers["location"]) == made


async def test_only_a_name_is_required(api: ApiClient) -> None:
    made = await api.expect(201, "POST", "/v1/assistants", {"name": "helper"})
    assert (made["provider"], made["model"]) == ("gemini", "gemini-3.1-pro-preview")
    other = await api.expect(201, "POST", "/v1/assistants", {"name": "helper", "provider": "anthropic"})
    assert other["model"] == "claude-sonnet-5-5"


async def test_each_change_is_a_version_and_an_empty_change_is_none(api: ApiClient) -> None:
    path = "/v1/assistants/" + (await api.expect(201, "POST", "/v1/assistants", WHOLE))["id"]
    assert (await api.expect(200, "PUT", path, WHOLE))["version"] == 1
    assert (await api.expect(200, "PUT", path, {**WHOLE, "description": "Helps a lot."}))["version"] == 2
    reordered = {**WHOLE, "tools": [{**WEATHER, "parameters": dict(reversed(WEATHER["parameters"].items()))}]}  # type: ignore[attr-defined]  # reason: a dict
    assert (await api.expect(200, "PUT", path, reordered))["version"] == 3
    assert (await api.expect(200, "GET", path))["version"] == 3
    assert (await api.expect(200, "GET", f"{path}?version=1"))["description"] == "Helps."
    problem = await api.expect(404, "GET", f"{path}?version=4")
    assert problem["code"] == "assistant_not_found"


async def test_a_change_replaces_everything(api: ApiClient) -> None:
    path = "/v1/assistants/" + (await api.expect(201, "POST", "/v1/assistants", WHOLE))["id"]
    changed = await api.expect(200, "PUT", path, {"name": "bare"})
    assert (changed["tools"], changed["variables"], changed["provider"]) == ([], {}, "gemini")


async def test_any_text_comes_back(api: ApiClient) -> None:
    body = {
        "name": NASTY,
        "description": NASTY,
        "language": "\x00",
        "variables": {NASTY: [NASTY, 1.0, 10**30]},
        "tools": [{**WEATHER, "description": NASTY}],
    }
    made = await api.expect(201, "POST", "/v1/assistants", body)
    # Two adjacent surrogate halves are one character after a round trip through JSON.
    joined = NASTY.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    assert made["name"] == joined
    assert made["variables"] == {joined: [joined, 1.0, 10**30]}
    assert (await api.expect(200, "GET", f"/v1/assistants/{made['id']}")) == made


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"name": ""}, "name"),
        ({"name": "x" * 201}, "name"),
        ({"name": None}, "name"),
        ({"description": "x" * 2001}, "description"),
        ({"provider": "openai"}, "provider"),
        ({"model": ""}, "model"),
        ({"instructions": {"roles": "x" * 200_001}}, "instructions.roles"),
        ({"instructions": {"rules": "x"}}, "instructions.rules"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [{**WEATHER, "name": "1st"}]}, "tools.0.name"),
        ({"tools": [{**WEATHER, "name": "a" * 65}]}, "tools.0.name"),
        ({"tools": [{**WEATHER, "parameters": {"type": "string"}}]}, "tools.0.parameters"),
        ({"tools": [{**WEATHER, "parameters": {"type": "object", "properties": []}}]}, "tools.0.parameters"),
        ({"tools": [{**WEATHER, "name": f"t{number}"} for number in range(129)]}, "tools"),
        ({"variables": {"a": "x" * 262_144}}, "variables"),
        ({"settings": {"max_output_tokens": "many"}}, "settings.max_output_tokens"),
        ({"settings": {"max_tokens": 1}}, "settings.max_tokens"),
        ({"colour": "blue"}, "colour"),
    ],
)
async def test_an_invalid_field_is_named(api: ApiClient, change: dict[str, Any], path: str) -> None:
    problem = await api.expect(422, "POST", "/v1/assistants", {**WHOLE, **change})
    assert problem["code"] == "validation_failed"
    assert [fault["path"] for fault in problem["errors"]] == [path]


@pytest.mark.parametrize("text", ["{{ unclosed", "It is {{ system.current_time }}."])
async def test_an_invalid_instruction_is_refused(api: ApiClient, text: str) -> None:
    problem = await api.expect(422, "POST", "/v1/assistants", {**WHOLE, "instructions": {"procedure": text}})
    assert (problem["code"], problem["template"]) == ("template_invalid", "procedure")
    assert (await api.expect(200, "GET", "/v1/assistants"))["data"] == []


async def test_the_list_is_paged_from_the_newest_to_the_oldest(api: ApiClient) -> None:
    made = [
        (await api.expect(201, "POST", "/v1/assistants", {"name": f"helper {number}"}))["id"] for number in range(5)
    ]
    await api.expect(200, "PUT", f"/v1/assistants/{made[1]}", {"name": "changed"})
    found: list[Any] = []
    cursor = ""
    while len(found) < 10:
        page = await api.expect(200, "GET", f"/v1/assistants?limit=2{cursor}")
        found += page["data"]
        if page["next_cursor"] is None:
            break
        cursor = f"&cursor={page['next_cursor']}"
    assert [item["id"] for item in found] == made[::-1]
    assert [item["version"] for item in found] == [1, 1, 1, 2, 1]


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "version=0", "version=99999999999"])
async def test_a_query_out_of_range_is_refused(api: ApiClient, query: str) -> None:
    path = "/v1/assistants" if query.startswith("limit") else f"/v1/assistants/{new_id(ASSISTANT)}"
    problem = await api.expect(422, "GET", f"{path}?{query}")
    assert problem["errors"][0]["path"] == query.partition("=")[0]


async def test_a_forged_cursor_is_refused(api: ApiClient) -> None:
    assert (await api.expect(400, "GET", "/v1/assistants?cursor=nonsense"))["code"] == "cursor_invalid"


@pytest.mark.parametrize("model", ["%2e%2e/cachedContents#", "x/%2e%2e/gemini-3.1-pro-preview", "gemini-3?key=x"])
async def test_a_model_name_that_would_change_the_url_is_refused(api: ApiClient, model: str) -> None:
    problem = await api.expect(422, "POST", "/v1/assistants", {"name": "helper", "provider": "gemini", "model": model})
    assert [fault["path"] for fault in problem["errors"]] == ["model"]
    assert model not in str(problem)
    made = await api.expect(201, "POST", "/v1/assistants", {"name": "helper"})
    await api.expect(422, "PUT", f"/v1/assistants/{made['id']}", {"name": "helper", "model": model})


async def test_a_stored_model_name_that_would_change_the_url_is_not_sent(
    api: ApiClient, database: Database, emulated: EmulatedProviders
) -> None:
    """From before names were checked: the turn fails, nothing is sent, and another version of the assistant works."""
    conversation_id = await api.begin("gemini")
    async with database.connection() as connection:
        await connection.execute("UPDATE assistants SET model = 'x/%2e%2e/gemini-3.1-pro-preview'")
    problem = await api.expect(422, "POST", turns(conversation_id), {"input": "Hello."})
    assert (problem["code"], problem["turn"]["state"]) == ("validation_failed", "failed")
    assert emulated.gemini.requests() == []
    path = f"/v1/conversations/{conversation_id}"
    assistant_id = (await api.expect(200, "GET", path))["assistant_id"]
    await api.expect(200, "PUT", f"/v1/assistants/{assistant_id}", {"name": "helper", "provider": "gemini"})
    await api.expect(200, "PATCH", path, {"assistant_version": 2})
    assert (await api.say(conversation_id))["turn"]["state"] == "complete"
