"""Values are encoded so that Postgres can store them, and decoded without loss."""

import json
import math
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zstandard import ZstdError

from server.conversation.errors import CursorInvalid, ValidationFailed
from server.postgres.codec import (
    decode_cursor,
    decode_json,
    decode_raw,
    decode_text,
    encode_cursor,
    encode_json,
    encode_raw,
    encode_text,
)
from tests.support.strategies import any_text, json_values


@given(any_text)
def test_any_text_comes_back(text: str) -> None:
    stored = encode_text(text)
    assert decode_text(stored) == text
    assert "\x00" not in stored
    stored.encode()


@given(any_text)
def test_text_is_made_storable_once(text: str) -> None:
    """Encoding is not idempotent: an escape of an escape is another text. The type `Storable` prevents a second
    encoding.
    """
    assert decode_text(decode_text(encode_text(encode_text(text)))) == text


def test_ordinary_text_is_stored_as_it_is() -> None:
    for text in ("", "Hello", "Grüße 😀", "\\u0000", "\x1b\x7f\u202e\ufffe"):
        assert encode_text(text) == text


@given(json_values)
def test_any_json_comes_back(value: Any) -> None:
    stored = encode_json(value)
    assert decode_json(stored) == value
    assert "\\u0000" not in stored.replace("\\\\", "")
    stored.encode()


def test_large_floats_stay_floats_although_postgres_would_make_them_integers() -> None:
    for value in (1e16, 1e22, 1e23, -1e300, 1.7976931348623157e308):
        stored = encode_json([value])
        assert "e" not in stored
        assert json.loads(stored) == [value]
        assert isinstance(json.loads(stored)[0], float)


@pytest.mark.parametrize("value", [math.nan, math.inf, {"x": object()}, {1, 2}])
def test_what_is_not_json_is_refused(value: object) -> None:
    with pytest.raises(ValidationFailed):
        encode_json(value)


def test_a_value_that_is_nested_too_deeply_is_refused() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(ValidationFailed):
        encode_json(value)


@given(st.binary(max_size=2000))
def test_raw_bytes_come_back(data: bytes) -> None:
    assert decode_raw(encode_raw(data)) == data


@pytest.mark.parametrize("length", [96, 3_000, 100_000])
def test_raw_bytes_with_a_flipped_bit_are_detected(length: int) -> None:
    data = (b'data: {"text": "so"}\n\n' * length)[:length]
    stored = encode_raw(data)
    for place in range(len(stored) * 8):
        flipped = bytearray(stored)
        flipped[place // 8] ^= 1 << place % 8
        with suppress(ZstdError):
            # A flipped bit that is not detected must not change anything, or leave nothing.
            assert decode_raw(bytes(flipped)) in {data, b""}


def test_event_streams_shrink() -> None:
    frame = b'data: {"candidates":[{"content":{"parts":[{"text":"word"}],"role":"model"}}]}\n\n'
    assert len(encode_raw(frame * 200)) < len(frame * 200) / 20


@given(st.text(), st.integers())
def test_a_cursor_encodes_its_position(text: str, number: int) -> None:
    assert decode_cursor(encode_cursor(text), str) == text
    assert decode_cursor(encode_cursor(number), int) == number
    assert encode_cursor(text).replace("-", "").replace("_", "").isalnum()


@given(st.text(max_size=40))
def test_a_forged_cursor_is_refused_or_decoded_and_never_raises_another_error(cursor: str) -> None:
    try:
        place = decode_cursor(cursor, int)
    except CursorInvalid:
        place = 0
    assert type(place) is int
