"""JSON comes out as it went in."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.exact_json import dumps_exact, loads_exact, to_plain
from tests.strategies import json_values


@pytest.mark.parametrize(
    "text",
    [
        "1.0",
        "1e400",
        "-0.0",
        "1E+2",
        "12345678901234567890123",
        '{"b":1.50,"a":[1,2.0,{"":null}]}',
        '"é 😀"',
        "[]",
        "{}",
    ],
)
def test_number_formats_and_the_order_of_keys_survive(text: str) -> None:
    assert dumps_exact(loads_exact(text)) == text.encode()


@given(json_values)
def test_values_survive(value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False)
    assert to_plain(loads_exact(text)) == value
    assert json.loads(dumps_exact(loads_exact(text)).decode("utf-8", "surrogatepass")) == value


@given(json_values)
def test_writing_is_stable(value: Any) -> None:
    once = dumps_exact(loads_exact(json.dumps(value)))
    assert dumps_exact(loads_exact(once)) == once


@pytest.mark.parametrize("text", ["", "{", "NaN", "[Infinity]", "-Infinity", "{'a': 1}", "[1,]", "1 2"])
def test_what_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  reason: which one is json's business
        loads_exact(text)


@given(st.binary(max_size=30))
def test_bytes_that_are_no_text_are_refused_or_read(data: bytes) -> None:
    try:
        value = loads_exact(data)
    except ValueError:
        value = None
    assert dumps_exact(value)
