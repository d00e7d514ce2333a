import re
from typing import Any

import jsonschema
import pytest

from tests.fakes.site import VERSION, Site

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


def test_it_says_what_it_is(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1.")
    assert (document["info"]["title"], document["info"]["version"]) == ("Strata", VERSION)
    assert document["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    assert document["components"]["securitySchemes"]["bearer"]["type"] == "http"


def test_every_operation_is_described(document: dict[str, Any]) -> None:
    found = operations(document)
    assert {path for path, _, _ in found} == {
        "/healthz", "/readyz", "/metrics", "/v1/key", "/admin/api/keys", "/admin/api/keys/{key_id}",
    }  # fmt: skip
    ids = [operation["operationId"] for _, _, operation in found]
    assert len(set(ids)) == len(ids)
    for path, method, operation in found:
        assert operation["summary"], (path, method)
        assert operation["description"], (path, method)
        assert operation["tags"], (path, method)
        named = {p["name"] for p in operation.get("parameters", ()) if p["in"] == "path"}
        assert named == set(re.findall(r"{(\w+)}", path))


def test_every_error_answer_is_a_problem_with_an_example(document: dict[str, Any]) -> None:
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


def test_guarded_routes_say_so_and_only_these(document: dict[str, Any]) -> None:
    for path, _, operation in operations(document):
        if path.startswith(("/v1", "/admin")):
            assert operation["security"] == [{"bearer": []}]
            assert "401" in operation["responses"]
            assert ("403" in operation["responses"]) == path.startswith("/admin")
        else:
            assert "security" not in operation


def test_every_reference_leads_somewhere_and_every_schema_is_one(document: dict[str, Any]) -> None:
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert set(references(document)) <= known
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


async def test_answers_are_as_documented(site: Site, document: dict[str, Any]) -> None:
    def check(name: str, body: object) -> None:
        jsonschema.Draft202012Validator(
            {"$ref": f"#/components/schemas/{name}", "components": document["components"]},
            format_checker=jsonschema.FormatChecker(),
        ).validate(body)

    check("HealthView", (await site.get("/healthz")).json())
    check("ReadyView", (await site.get("/readyz")).json())
    check("KeyView", (await site.get("/v1/key", key=site.client_key)).json())
    check("KeyPage", (await site.get("/admin/api/keys", key=site.admin_key)).json())
    for path in ("/v1/key", "/nowhere", "/test/crash", "/test/pages"):
        check("Problem", (await site.get(path)).json())


def test_nothing_in_it_comes_from_another_host(document: dict[str, Any]) -> None:
    assert "http://" not in str(document)
    assert "https://" not in str(document)


async def test_it_is_no_page(site: Site) -> None:
    answer = await site.get("/schema", headers={"accept": "text/html"})
    assert answer.headers["content-type"] == "application/json"
