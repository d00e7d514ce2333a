"""Conversations over real HTTP, with the real store."""

import base64
from collections.abc import AsyncIterator
from typing import Any

import pytest

from server.conversation.identifiers import ASSISTANT, new_id
from server.emulator.reply import FaultKind
from tests.conftest import StrataServer
from tests.support.builders import NASTY
from tests.support.emulators import EmulatedProviders
from tests.support.http_driver import ApiClient, open_api, turns
from tests.unit.conversation.test_image import png


@pytest.fixture
async def api(strata_server: StrataServer) -> AsyncIterator[ApiClient]:
    async with open_api(strata_server) as opened:
        yield opened


async def test_a_conversation_begins_idle(api: ApiClient) -> None:
    assistant = await api.expect(201, "POST", "/v1/assistants", {"name": "helper"})
    chosen = {
        "identifier": "ticket-4711",
        "source": "web",
        "direction": "inbound",
        "mode": "voice",
        "args": {"city": "Oslo"},
        "context": {"todos": ["pack"], "other": {"b": 1, "a": 2}},
        "metadata": {"client.language": "nb"},
    }
    answer = await api.ask("POST", "/v1/conversations", {"assistant_id": assistant["id"], **chosen})
    assert answer.status_code == 201
    made = answer.json()
    assert made == {
        "id": made["id"],
        "assistant_id": assistant["id"],
        "assistant_version": 1,
        "revision": 0,
        "state": "idle",
        "pending_tool_calls": [],
        "forked_from": None,
        "created_at": made["created_at"],
        "updated_at": made["updated_at"],
        **chosen,
    }
    assert answer.headers["location"] == f"/v1/conversations/{made['id']}"
    assert answer.headers["etag"] == '"0"'
    assert await api.expect(200, "GET", answer.headers["location"]) == made


async def test_a_missing_assistant_is_not_found(api: ApiClient) -> None:
    assistant = await api.expect(201, "POST", "/v1/assistants", {"name": "helper"})
    for body in (
        {"assistant_id": new_id(ASSISTANT)},
        {"assistant_id": "nonsense"},
        {"assistant_id": assistant["id"], "assistant_version": 2},
    ):
        assert (await api.expect(404, "POST", "/v1/conversations", body))["code"] == "assistant_not_found"


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"identifier": "x" * 257}, "identifier"),
        ({"args": []}, "args"),
        ({"args": {"a": "x" * 262_144}}, "args"),
        ({"assistant_version": 0}, "assistant_version"),
        ({"assistant_version": 2**31}, "assistant_version"),
        ({"colour": 1}, "colour"),
    ],
)
async def test_an_invalid_field_is_named(api: ApiClient, change: dict[str, Any], path: str) -> None:
    problem = await api.expect(422, "POST", "/v1/conversations", {"assistant_id": "asst_x", **change})
    assert [fault["path"] for fault in problem["errors"]] == [path]


async def test_the_list_can_be_filtered_and_paged(api: ApiClient) -> None:
    first = await api.begin(identifier="a")
    second = await api.begin(identifier="b")
    third = await api.begin(identifier="a")

    async def ids(query: str) -> list[str]:
        return [item["id"] for item in (await api.expect(200, "GET", f"/v1/conversations?{query}"))["data"]]

    assert await ids("") == [third, second, first]
    assert await ids("identifier=a") == [third, first]
    shown = await api.expect(200, "GET", f"/v1/conversations/{second}")
    assert await ids(f"assistant_id={shown['assistant_id']}") == [second]
    assert await ids("created_before=2020-01-01T00:00:00Z") == []
    assert await ids("created_after=2020-01-01T00:00:00%2B02:00&identifier=b") == [second]
    page = await api.expect(200, "GET", "/v1/conversations?limit=2")
    rest = await api.expect(200, "GET", f"/v1/conversations?limit=2&cursor={page['next_cursor']}")
    assert [item["id"] for item in rest["data"]] == [first]
    assert rest["next_cursor"] is None


@pytest.mark.parametrize(
    "query",
    ["created_after=yesterday", "created_after=2026-01-01T00:00:00", "created_before=0001-01-01T00:00:00%2B10:00"],
)
async def test_an_invalid_time_is_refused(api: ApiClient, query: str) -> None:
    problem = await api.expect(422, "GET", f"/v1/conversations?{query}")
    assert problem["errors"][0]["path"] == query.partition("=")[0]
    assert problem["errors"][0]["source"] == "query"


async def test_a_client_with_the_current_revision_gets_not_modified(api: ApiClient) -> None:
    path = f"/v1/conversations/{await api.begin()}"
    answer = await api.ask("GET", path, if_none_match='"0"')
    assert (answer.status_code, answer.content, answer.headers["etag"]) == (304, b"", '"0"')
    await api.expect(200, "PATCH", path, {"metadata": {"a": 1}})
    answer = await api.ask("GET", path, if_none_match='"0"')
    assert (answer.status_code, answer.headers["etag"]) == (200, '"1"')


async def test_a_change_keeps_the_other_fields(api: ApiClient) -> None:
    path = f"/v1/conversations/{await api.begin(args={'a': 1}, metadata={'m': 1}, context={'todos': []})}"
    before = await api.expect(200, "GET", path)
    changed = await api.expect(200, "PATCH", path, {"args": {}, "metadata": {"m": 2}})
    assert (changed["args"], changed["metadata"], changed["context"]) == ({}, {"m": 2}, {"todos": []})
    assert changed["revision"] == 1
    assert before["assistant_version"] == changed["assistant_version"] == 1
    assert await api.expect(200, "GET", path) == changed


async def test_a_conversation_changes_to_another_version_on_request(api: ApiClient) -> None:
    path = f"/v1/conversations/{await api.begin()}"
    assistant = (await api.expect(200, "GET", path))["assistant_id"]
    await api.expect(200, "PUT", f"/v1/assistants/{assistant}", {"name": "second"})
    await api.expect(200, "PUT", f"/v1/assistants/{assistant}", {"name": "third"})
    assert (await api.expect(200, "GET", path))["assistant_version"] == 1
    assert (await api.expect(200, "PATCH", path, {"assistant_version": 2}))["assistant_version"] == 2
    assert (await api.expect(200, "PATCH", path, {"assistant_version": "latest"}))["assistant_version"] == 3
    assert (await api.expect(404, "PATCH", path, {"assistant_version": 9}))["code"] == "assistant_not_found"


@pytest.mark.parametrize(
    "body",
    [{}, {"expected_revision": 0}, {"args": None}, {"assistant_version": None}, {"assistant_version": "newest"}, []],
    ids=str,
)
async def test_an_empty_change_is_refused(api: ApiClient, body: Any) -> None:
    path = f"/v1/conversations/{await api.begin()}"
    assert (await api.expect(422, "PATCH", path, body))["code"] == "validation_failed"
    assert (await api.expect(200, "GET", path))["revision"] == 0


async def test_a_stale_client_does_not_overwrite_newer_data(api: ApiClient) -> None:
    path = f"/v1/conversations/{await api.begin()}"
    await api.expect(200, "PUT", f"{path}/context", {"todos": ["first"]}, if_match='"0"')
    stale: list[tuple[str, str, Any, dict[str, str]]] = [
        ("PUT", f"{path}/context", {"todos": ["second"]}, {"if_match": '"0"'}),
        ("PATCH", path, {"context": {}, "expected_revision": 0}, {}),
        ("PATCH", path, {"context": {}}, {"if_match": '"0"'}),
        ("POST", f"{path}/turns", {"input": "Hello"}, {"if_match": '"0"'}),
        ("POST", f"{path}/turns", {"input": "Hello", "expected_revision": 0}, {}),
    ]
    for method, where, body, headers in stale:
        answer = await api.ask(method, where, body, **headers)
        assert (answer.status_code, answer.json()["code"]) == (409, "revision_mismatch")
        assert answer.headers["x-should-retry"] == "false"
    shown = await api.expect(200, "GET", path)
    assert (shown["revision"], shown["context"]) == (1, {"todos": ["first"]})
    await api.expect(200, "PATCH", path, {"args": {"a": 1}, "expected_revision": 1}, if_match='"1"')


async def test_the_body_of_a_context_is_the_context(api: ApiClient) -> None:
    path = f"/v1/conversations/{await api.begin()}/context"
    context = {"todos": [NASTY.replace("\ud83d\udc00", "")], "z": {"b": 1.0, "a": None}, "": []}
    changed = await api.expect(200, "PUT", path, context)
    assert changed["context"] == context
    assert list(changed["context"]) == ["todos", "z", ""]
    wrong: list[Any] = [[], "text", {"a": "x" * 4_194_304}]
    for body in wrong:
        assert (await api.expect(422, "PUT", path, body))["code"] == "validation_failed"


async def test_erasing_reports_what_is_erased_and_has_a_dry_run(api: ApiClient) -> None:
    conversation = await api.begin()
    await api.say(conversation)
    path = f"/v1/conversations/{conversation}"
    planned = await api.expect(200, "DELETE", f"{path}?dry_run=true")
    assert planned["dry_run"] is True
    assert planned["rows"]["turns"] == 2
    done = await api.expect(200, "DELETE", path)
    assert planned["stored_bytes"] > 0
    assert done == {"dry_run": False, "rows": planned["rows"], "stored_bytes": None}
    assert (await api.expect(404, "GET", path))["code"] == "conversation_not_found"
    assert (await api.expect(404, "DELETE", path))["code"] == "conversation_not_found"


async def test_a_running_conversation_is_not_erased(api: ApiClient, emulated: EmulatedProviders) -> None:
    conversation = await api.begin()
    emulated.gemini.inject_fault(FaultKind.SILENCE, after_chunks=1)
    async with api.listen("POST", turns(conversation), {"input": "Hello"}) as (_, events):
        assert (await anext(events))[1] == "turn.started"
        answer = await api.ask("DELETE", f"/v1/conversations/{conversation}")
        assert (answer.status_code, answer.json()["code"]) == (409, "conversation_busy")
    await api.expect(200, "POST", f"/v1/conversations/{conversation}/cancel")
    await api.expect(200, "DELETE", f"/v1/conversations/{conversation}")


async def test_a_fork_is_independent_of_its_source(api: ApiClient) -> None:
    conversation = await api.begin(args={"a": 1}, identifier="mine")
    await api.say(conversation, "One.")
    await api.say(conversation, "Two.")
    answer = await api.ask("POST", f"/v1/conversations/{conversation}/fork", {"at_seq": 2})
    assert answer.status_code == 201
    fork = answer.json()
    assert fork["forked_from"] == {"conversation_id": conversation, "seq": 2}
    assert (fork["identifier"], fork["args"]) == (None, {"a": 1})
    assert answer.headers["location"] == f"/v1/conversations/{fork['id']}"
    assert [turn["seq"] for turn in (await api.expect(200, "GET", turns(fork["id"])))["data"]] == [1, 2]
    await api.say(fork["id"], "Another two.")
    assert len((await api.expect(200, "GET", turns(conversation)))["data"]) == 4
    for at_seq, status in ((9, 404), (0, 422), (2**63, 422), ("2", 422)):
        await api.expect(status, "POST", f"/v1/conversations/{conversation}/fork", {"at_seq": at_seq})


async def picture_of(api: ApiClient) -> tuple[str, str]:
    """A conversation with an image in it, and the hash of the image."""
    conversation = await api.begin()
    await api.expect(
        200, "POST", turns(conversation), {"input": [{"type": "image", "data": base64.b64encode(png()).decode()}]}
    )
    asked = await api.expect(200, "GET", turns(conversation, 1))
    return conversation, str(asked["blocks"][0]["sha256"])


async def test_an_image_can_be_fetched_with_its_type(api: ApiClient) -> None:
    conversation = await api.begin()
    picture = png()
    part = {"type": "image", "data": base64.b64encode(picture).decode()}
    await api.expect(200, "POST", turns(conversation), {"input": [part, {"type": "text", "text": "What is this?"}]})
    asked = await api.expect(200, "GET", turns(conversation, 1))
    image, text = asked["blocks"]
    assert (image["media_type"], image["size_bytes"], text["text"]) == ("image/png", len(picture), "What is this?")
    assert set(image) == {"type", "media_type", "sha256", "size_bytes"}
    answer = await api.ask("GET", f"/v1/conversations/{conversation}/images/{image['sha256']}")
    assert (answer.status_code, answer.content) == (200, picture)
    assert answer.headers["content-type"] == "image/png"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert answer.headers["cache-control"] == "private, max-age=31536000, immutable"
    for other in ("0" * 64, "nonsense", image["sha256"].upper()):
        problem = await api.expect(404, "GET", f"/v1/conversations/{conversation}/images/{other}")
        assert problem["code"] == "image_not_found"
