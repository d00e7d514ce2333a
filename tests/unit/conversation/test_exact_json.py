"""JSON is read and written without any change."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.conversation.exact_json import dumps_exact, dumps_sendable, loads_exact, make_sendable, to_plain
from tests.support.strategies import json_values


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
def test_values_survive_and_are_utf_8(value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False)
    assert to_plain(loads_exact(text)) == value
    assert json.loads(dumps_exact(loads_exact(text)).decode()) == json.loads(json.dumps(value))


def test_sendable_text_has_no_lone_surrogate() -> None:
    assert dumps_sendable(["\ud83d", "\ud83d\udc00", "\\ud83d"]) == '["\ufffd","\U0001f400","\\\\ud83d"]'.encode()
    value = {"\udc00": ["\ud83d", 1.5]}
    assert make_sendable(value) == {"\ufffd": ["\ufffd", 1.5]}
    good = {"a": "\\ud83d 😀"}
    assert make_sendable(good) is good


def test_surrogate_halves_are_joined_and_a_lone_one_is_escaped() -> None:
    assert dumps_exact("\ud83d" + "\ude00") == '"😀"'.encode()
    assert dumps_exact("a\ud83db") == b'"a\\ud83db"'
    assert loads_exact(dumps_exact("a\ud83db")) == "a\ud83db"


def test_a_number_that_python_cannot_represent_is_read_as_text() -> None:
    assert to_plain(loads_exact("[1e400, 1, 2.5]")) == ["1e400", 1, 2.5]
    long = "9" * 5000
    assert to_plain(loads_exact(long)) == long
    assert dumps_exact(loads_exact(f"[1E400,{long}]")) == f"[1E400,{long}]".encode()


@pytest.mark.parametrize("depth", [200, 201, 5000, 200_000])
def test_too_deep_nesting_is_refused(depth: int) -> None:
    text = "[" * depth + "]" * depth
    if depth <= 200:
        assert to_plain(loads_exact(text)) == json.loads(text)
    else:
        with pytest.raises(ValueError, match="deeply"):
            loads_exact(text)


@given(json_values)
def test_writing_is_stable(value: Any) -> None:
    once = dumps_exact(loads_exact(json.dumps(value)))
    assert dumps_exact(loads_exact(once)) == once


@pytest.mark.parametrize("text", ["", "{", "NaN", "[Infinity]", "-Infinity", "{'a': 1}", "[1,]", "1 2"])
def test_what_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  reason: the json module chooses the type
        loads_exact(text)


@given(st.binary(max_size=30))
def test_bytes_that_are_not_text_are_refused_or_read(data: bytes) -> None:
    try:
        value = loads_exact(data)
    except ValueError:
        value = None
    assert dumps_exact(value)
