from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from litestar.exceptions import ValidationException

from server.web.validation import read_faults, trace_path
from tests.support.fakes.site import Site

MARKER = "purple-elephant-content"


async def faults(site: Site, body: Any) -> dict[str, str]:
    answer = await site.client.post("/test/turns", json=body)
    assert answer.status_code == 422
    problem = answer.json()
    assert problem["code"] == "validation_failed"
    assert MARKER not in answer.text
    assert {fault["source"] for fault in problem["errors"]} == {"body"}
    return {fault["path"]: fault["message"] for fault in problem["errors"]}


async def test_the_path_contains_only_what_the_client_wrote(site: Site) -> None:
    found = await faults(site, {"input": [{"type": "text", "text": "ok"}, {"type": "text", "text": MARKER}]})
    assert found["input.1.text"] == "String should have at most 5 characters"


async def test_all_faults_are_listed(site: Site) -> None:
    found = await faults(site, {"input": "hi", "count": MARKER, "mode": MARKER, "more": 1})
    assert found == {
        "count": "Input should be a valid integer",
        "mode": "Input should be 'a' or 'b'",
        "more": "Extra inputs are not permitted",
    }


async def test_a_missing_field_is_named(site: Site) -> None:
    assert await faults(site, {}) == {"input": "Field required"}
    assert (await faults(site, {"input": [{"type": "image"}]}))["input.0.width"] == "Field required"


async def test_an_unknown_tag_is_not_repeated(site: Site) -> None:
    found = await faults(site, {"input": [{"type": MARKER}]})
    assert found["input.0"] == "The type has to be one of 'text', 'image'"


async def test_a_body_of_the_wrong_kind_has_an_empty_path(site: Site) -> None:
    assert list(await faults(site, [MARKER])) == [""]


@pytest.mark.parametrize(
    ("query", "path", "message"),
    [
        ("", "limit", "Field required"),
        (f"limit={MARKER}", "limit", "Expected `int`, got `str`"),
        (f"limit=1&order={MARKER}", "order", "The value is not allowed"),
    ],
    ids=["missing", "type", "choice"],
)
async def test_query_parameters_are_named_too(site: Site, query: str, path: str, message: str) -> None:
    answer = await site.get(f"/test/pages?{query}")
    assert answer.status_code == 422
    assert answer.json()["errors"] == [{"path": path, "source": "query", "message": message}]
    assert MARKER not in answer.text


def test_a_text_from_a_decoder_is_not_repeated() -> None:
    error = ValidationException(detail="x", extra=[{"key": "id", "source": "path", "message": f"bad id {MARKER}"}])
    assert [fault.message for fault in read_faults(error, None)] == ["The value is not allowed"]


def test_the_list_has_a_maximum_length() -> None:
    extra: list[Any] = [{"key": f"f{number}", "message": "Field required"} for number in range(1000)]
    assert len(read_faults(ValidationException(detail="x", extra=extra), None)) == 50


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(body=JSON, location=st.lists(st.text(max_size=5) | st.integers(min_value=0, max_value=5), max_size=6))
def test_a_path_never_has_more_steps_than_its_location(body: object, location: list[str | int]) -> None:
    kept = trace_path(location, body)
    assert len(kept) <= sum(len(str(step)) + 1 for step in location)


@given(body=JSON, data=st.data())
def test_a_path_into_the_body_is_complete(body: object, data: st.DataObject) -> None:
    location: list[str | int] = []
    value = body
    while isinstance(value, dict | list) and value:
        step = data.draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
        location.append(step)
        value = value[step]
    assert trace_path(location, body) == ".".join(map(str, location))
