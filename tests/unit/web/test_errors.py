import json
from http import HTTPStatus

import pytest

from server.conversation.errors import (
    Internal,
    ProviderFailed,
    ScopeMissing,
    StrataError,
    ValidationFailed,
    every_error,
)
from server.web.errors import ANSWERS, answer_headers, build_problem, encode_problem, source_of
from tests.support.fakes.site import Site


def test_exactly_the_error_codes_have_a_status() -> None:
    assert set(ANSWERS) == set(every_error())


async def test_every_error_is_answered_as_a_problem(site: Site) -> None:
    for kind in every_error():
        answer = await site.get(f"/test/errors/{kind.code}")
        status = ANSWERS[kind].status
        assert answer.status_code == status
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json() == {
            "type": f"urn:strata:error:{kind.code}",
            "title": HTTPStatus(status).phrase,
            "status": status,
            "code": kind.code,
            "detail": kind().message,
            **({"hint": kind.hint} if kind.hint else {}),
            "request_id": answer.headers["x-request-id"],
            **({"source": source_of(kind)} if status == 429 or issubclass(kind, ProviderFailed) else {}),
        }
        assert site.events("http.request_finished")[-1]["code"] == kind.code


@pytest.mark.parametrize("kind", list(every_error()), ids=lambda kind: kind.code)
def test_clients_are_informed_whether_to_retry(kind: type[StrataError]) -> None:
    status, headers = ANSWERS[kind].status, answer_headers(kind())
    if status in {409, 503} or kind.code == "rate_limited":
        assert ("retry-after" in headers) != (headers.get("x-should-retry") == "false")
    else:
        assert not {"retry-after", "x-should-retry"} & headers.keys()
    hopeless = {
        "turn_interrupted",
        "turn_stalled",
        "answer_unstorable",
        "answer_unreadable",
        "provider_not_configured",
    }
    assert ("retry-after" in headers) == (
        kind.code in {"conversation_busy", "queue_full", "rate_limited"}
        or (status == 503 and kind.code not in hopeless)
    )


def test_an_error_with_a_delay_sets_retry_after() -> None:
    busy = next(kind for kind in every_error() if kind.code == "conversation_busy")
    assert answer_headers(busy(retry_after_seconds=2.3))["retry-after"] == "3"


def test_details_are_members_and_never_replace_those_of_the_format() -> None:
    problem = build_problem(ScopeMissing(scope="admin", status=200, code="x", request_id="y"), "req_1").model_dump()
    assert problem["scope"] == "admin"
    assert (problem["status"], problem["code"], problem["request_id"]) == (403, "scope_missing", "req_1")


def test_a_problem_is_valid_json_for_any_name_in_it() -> None:
    fault = {"path": "half \ud83d", "source": "body", "message": "Extra inputs are not permitted"}
    encoded = encode_problem(ValidationFailed(errors=[fault]), "req_1")
    assert json.loads(encoded.decode())["errors"] == [fault]


def test_an_internal_error_reveals_nothing() -> None:
    problem = build_problem(Internal("connection to 10.0.0.7 lost", host="10.0.0.7"), "req_1")
    assert "10.0.0.7" not in problem.model_dump_json()


async def test_an_unknown_route_is_a_problem(site: Site) -> None:
    answer = await site.get("/nowhere")
    assert (answer.status_code, answer.json()["code"]) == (404, "route_not_found")
    assert (await site.get("/schema/nowhere")).json()["code"] == "route_not_found"
    assert (await site.get("/schema/nowhere.json")).json()["code"] == "route_not_found"


@pytest.mark.parametrize("method", ["PUT", "PROPFIND", "TRACE"])
async def test_a_wrong_method_is_a_problem_that_lists_the_allowed_ones(site: Site, method: str) -> None:
    answer = await site.client.request(method, "/healthz")
    assert (answer.status_code, answer.json()["code"]) == (405, "method_not_allowed")
    assert {name.strip() for name in answer.headers["allow"].split(",")} == {"GET", "HEAD", "OPTIONS"}


async def test_an_unexpected_exception_is_internal_and_logged(site: Site) -> None:
    answer = await site.get("/test/crash")
    assert (answer.status_code, answer.json()["code"]) == (500, "internal")
    assert answer.json()["detail"] == Internal().message
    (event,) = site.events("http.request_failed")
    assert event["request_id"] == answer.headers["x-request-id"]
    assert (event["route"], event["status"]) == ("/test/crash", 500)
    assert event["exception"].endswith("ValueError")
    assert "in crash" in event["exception"]


async def test_a_malformed_host_is_a_problem(site: Site) -> None:
    answer = await site.get("/healthz", headers={"host": 'a"b'})
    assert (answer.status_code, answer.json()["code"]) == (422, "validation_failed")
    assert 'a"b' not in answer.json()["detail"]
