import re
from typing import Any

import jsonschema
import pytest

from server.web.sse import EVENTS
from tests.support.fakes.site import VERSION, Site

METHODS = {"get", "put", "post", "delete", "patch", "head"}


@pytest.fixture
async def document(site: Site) -> dict[str, Any]:
    answer = await site.get("/schema")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    found: dict[str, Any] = answer.json()
    assert (await site.get("/schema/openapi.json")).json() == found
    return found


def operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (path, method, item[method])
        for path, item in document["paths"].items()
        for method in METHODS & item.keys()
        if not path.startswith("/test/")
    ]


def validate(document: dict[str, Any], schema: dict[str, Any], value: object) -> None:
    jsonschema.Draft202012Validator(
        {**schema, "components": document["components"]}, format_checker=jsonschema.FormatChecker()
    ).validate(value)


def references(node: object) -> list[str]:
    match node:
        case {"$ref": str(target)}:
            return [target]
        case dict():
            return [target for value in node.values() for target in references(value)]
        case list():
            return [target for value in node for target in references(value)]
        case _:
            return []


def test_the_document_has_a_title_and_a_version(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1.")
    assert (document["info"]["title"], document["info"]["version"]) == ("Strata", VERSION)
    assert document["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    assert document["components"]["securitySchemes"]["bearer"]["type"] == "http"


def test_every_operation_is_described(document: dict[str, Any]) -> None:
    found = operations(document)
    assert {path for path, _, _ in found} == {
        "/healthz", "/readyz", "/metrics", "/v1/key", "/admin/api/keys", "/admin/api/keys/{key_id}",
        "/v1/assistants", "/v1/assistants/{assistant_id}", "/v1/conversations", "/v1/conversations/{conversation_id}",
        "/v1/conversations/{conversation_id}/context", "/v1/conversations/{conversation_id}/fork",
        "/v1/conversations/{conversation_id}/cancel", "/v1/conversations/{conversation_id}/images/{sha256}",
        "/v1/conversations/{conversation_id}/turns", "/v1/conversations/{conversation_id}/turns/{seq}",
        "/v1/conversations/{conversation_id}/turns/{seq}/events", "/admin/api/usage", "/admin/api/jobs",
        "/admin/api/conversations/{conversation_id}/export", "/admin/api/conversations", "/admin/api/overview",
        "/admin/api/views", "/admin/api/views/{view_id}", "/admin/api/audit",
        "/admin/api/conversations/{conversation_id}", "/admin/api/conversations/{conversation_id}/fork",
        "/admin/api/conversations/{conversation_id}/cancel",
        "/admin/api/conversations/{conversation_id}/compactions",
        "/admin/api/conversations/{conversation_id}/compactions/latest",
        "/admin/api/conversations/{conversation_id}/calls/{turn_seq}/{attempt}",
        "/admin/api/conversations/{conversation_id}/calls/{turn_seq}/{attempt}/request",
        "/admin/api/conversations/{conversation_id}/calls/{turn_seq}/{attempt}/response",
        "/admin/api/assistants", "/admin/api/assistants/{assistant_id}",
        "/admin/api/assistants/{assistant_id}/versions",
        "/admin/api/assistants/{assistant_id}/versions/{version}", "/admin/api/assistants/{assistant_id}/render",
        "/admin/api/assistants/{assistant_id}/check",
        "/v1/conversations/{conversation_id}/compactions", "/v1/conversations/{conversation_id}/compactions/latest",
        "/admin/api/replays", "/admin/api/replays/{replay_id}", "/admin/api/replays/{replay_id}/report",
        "/admin/api/replays/{replay_id}/items", "/admin/api/replays/{replay_id}/results",
        "/admin/api/replays/{replay_id}/export", "/admin/api/replays/{replay_id}/pause",
        "/admin/api/replays/{replay_id}/continue", "/admin/api/replays/{replay_id}/cancel",
        "/admin/api/replays/{replay_id}/items/{number}/conversation",
        "/admin/api/replays/{replay_id}/items/{number}/calls/{turn_seq}/{attempt}",
        "/admin/api/replays/{replay_id}/items/{number}/calls/{turn_seq}/{attempt}/request",
        "/admin/api/replays/{replay_id}/items/{number}/calls/{turn_seq}/{attempt}/response",
    }  # fmt: skip
    ids = [operation["operationId"] for _, _, operation in found]
    assert len(set(ids)) == len(ids)
    for path, method, operation in found:
        assert operation["summary"], (path, method)
        assert operation["description"], (path, method)
        assert operation["tags"], (path, method)
        named = {p["name"] for p in operation.get("parameters", ()) if p["in"] == "path"}
        assert named == set(re.findall(r"{(\w+)}", path))


def test_every_error_response_is_a_problem_with_an_example(document: dict[str, Any]) -> None:
    for path, method, operation in operations(document):
        assert "500" in operation["responses"], (path, method)
        for status, answer in operation["responses"].items():
            assert answer["description"]
            if int(status) < 400:
                continue
            content = answer["content"]["application/problem+json"]
            assert content["schema"] == {"$ref": "#/components/schemas/Problem"}
            for code, example in content["examples"].items():
                assert set(example) <= {"summary", "description", "value"}
                assert (example["value"]["code"], example["value"]["status"]) == (code, int(status))


def test_exactly_the_guarded_routes_declare_security(document: dict[str, Any]) -> None:
    for path, _, operation in operations(document):
        if path.startswith(("/v1", "/admin")):
            assert operation["security"] == [{"bearer": []}]
            assert "401" in operation["responses"]
            assert ("403" in operation["responses"]) == (path != "/v1/key")
            assert ("429" in operation["responses"]) == path.startswith("/v1")
        else:
            assert "security" not in operation


def test_every_reference_has_a_target_and_every_schema_is_valid(document: dict[str, Any]) -> None:
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert set(references(document)) <= known
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


async def test_answers_match_their_documentation(site: Site, document: dict[str, Any]) -> None:
    def check(name: str, body: object) -> None:
        validate(document, {"$ref": f"#/components/schemas/{name}"}, body)

    check("HealthView", (await site.get("/healthz")).json())
    check("ReadyView", (await site.get("/readyz")).json())
    check("KeyView", (await site.get("/v1/key", key=site.client_key)).json())
    check("KeyPage", (await site.get("/admin/api/keys", key=site.admin_key)).json())
    for path in ("/v1/key", "/nowhere", "/test/crash", "/test/pages"):
        check("Problem", (await site.get(path)).json())


def test_every_example_matches_its_schema(document: dict[str, Any]) -> None:
    tried = 0
    for name, schema in document["components"]["schemas"].items():
        for example in schema.get("examples", ()):
            validate(document, {"$ref": f"#/components/schemas/{name}"}, example)
            tried += 1
        for field, described in schema.get("properties", {}).items():
            for example in described.get("examples", ()):
                validate(document, schema["properties"][field], example)
                tried += 1
    assert tried > 100


def test_every_body_has_an_example_and_allows_nothing_unknown(document: dict[str, Any]) -> None:
    for path, method, operation in operations(document):
        for content in operation.get("requestBody", {}).get("content", {}).values():
            names = [target.rsplit("/", 1)[1] for target in references(content["schema"])]
            assert names or path.endswith("/context"), (path, method)
            for name in names:
                assert document["components"]["schemas"][name]["examples"], name
                assert document["components"]["schemas"][name]["additionalProperties"] is False, name


def test_the_events_are_described_in_their_order(document: dict[str, Any]) -> None:
    turns = document["paths"]["/v1/conversations/{conversation_id}/turns"]["post"]["responses"]["200"]["content"]
    assert set(turns) == {"application/json", "text/event-stream"}
    events = document["paths"]["/v1/conversations/{conversation_id}/turns/{seq}/events"]["get"]["responses"]["200"]
    assert set(events["content"]) == {"text/event-stream"}
    for content in (turns, events["content"]):
        documented = re.findall(
            r"^\| `([a-z_.]+)` \|", content["text/event-stream"]["schema"]["description"], re.MULTILINE
        )
        assert documented == list(EVENTS)


def test_an_image_has_one_of_the_supported_types(document: dict[str, Any]) -> None:
    answer = document["paths"]["/v1/conversations/{conversation_id}/images/{sha256}"]["get"]["responses"]["200"]
    assert set(answer["content"]) == {"image/png", "image/jpeg", "image/gif", "image/webp"}


def test_a_parameter_is_never_null(document: dict[str, Any]) -> None:
    for path, method, operation in operations(document):
        for parameter in operation.get("parameters", ()):
            assert "null" not in str(parameter["schema"]), (path, method, parameter["name"])


def test_nothing_is_loaded_from_another_host(document: dict[str, Any]) -> None:
    assert "http://" not in str(document)
    assert "https://" not in str(document)


async def test_the_document_is_not_an_html_page(site: Site) -> None:
    answer = await site.get("/schema", headers={"accept": "text/html"})
    assert answer.headers["content-type"] == "application/json"
