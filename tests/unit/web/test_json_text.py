import json
import tracemalloc
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.web.json_text import DuplicateKey, decode_json, encode_json, refuse_duplicate_keys
from tests.support.strategies import json_values


@given(json_values)
def test_any_value_is_one_line_of_json_in_utf_8(value: object) -> None:
    encoded = encode_json(value)
    assert b"\n" not in encoded
    assert b"\r" not in encoded
    assert json.loads(encoded.decode()) == json.loads(json.dumps(value))


@given(json_values)
def test_written_json_is_read_back(value: object) -> None:
    assert decode_json(json.dumps(value).encode()) == json.loads(json.dumps(value))


def test_only_what_utf_8_cannot_encode_is_escaped() -> None:
    assert encode_json("å😀") == '"å😀"'.encode()
    assert encode_json("å\ud83d") == b'"\\u00e5\\ud83d"'
    assert encode_json("\x00") == b'"\\u0000"'


def test_times_are_written_in_utc() -> None:
    moment = datetime(2026, 1, 31, 11, 30, tzinfo=timezone(timedelta(hours=2)))
    assert encode_json([moment, moment.astimezone(UTC)]) == b'["2026-01-31T09:30:00Z","2026-01-31T09:30:00Z"]'


@pytest.mark.parametrize("body", [b"NaN", b"-Infinity", b"1e400", b"{", b'"\xff"', b"", b"9" * 5000, b"[1,]", b"'x'"])
def test_invalid_or_unwritable_json_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        decode_json(body)


TRICKY = st.text(st.sampled_from('a": \\{}[],')) | st.text()
ambiguous_values = st.recursive(
    st.none() | st.integers() | TRICKY,
    lambda inner: st.lists(inner, max_size=4) | st.lists(st.tuples(TRICKY, inner), max_size=4).map(tuple),
    max_leaves=20,
)
"""Values in which a tuple of pairs represents an object, whose keys may repeat."""


def write(value: object, colon: str) -> str:
    if isinstance(value, tuple):
        return "{" + ", ".join(f"{json.dumps(key)}{colon}{write(inner, colon)}" for key, inner in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(write(inner, colon) for inner in value) + "]"
    return json.dumps(value)


def has_duplicate(value: object) -> bool:
    if isinstance(value, tuple):
        return len({key for key, _ in value}) < len(value) or any(has_duplicate(inner) for _, inner in value)
    return isinstance(value, list) and any(map(has_duplicate, value))


@given(ambiguous_values, st.sampled_from([":", ": ", " : ", "\n:"]))
def test_only_a_duplicate_key_is_found(value: object, colon: str) -> None:
    body = write(value, colon).encode()
    if has_duplicate(value):
        with pytest.raises(DuplicateKey):
            refuse_duplicate_keys(body, json.loads(body))
        with pytest.raises(DuplicateKey):
            decode_json(body)
    else:
        refuse_duplicate_keys(body, json.loads(body))
        assert decode_json(body) == json.loads(body)


def test_json_that_is_sent_as_text_is_not_read_twice_and_costs_no_memory() -> None:
    text = json.dumps({f"key {number}": number for number in range(50_000)})
    body = json.dumps({"tool_results": [{"output": text}]}).encode()
    decoded = json.loads(body)
    tracemalloc.start()
    try:
        refuse_duplicate_keys(body, decoded)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < len(body) / 10
