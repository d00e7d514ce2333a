"""Excerpts of JSON, text and bytes."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from server.inspection.excerpts import (
    LINE_BYTES,
    STRING_CHARACTERS,
    dump_bytes,
    excerpt_document,
    excerpt_json,
    read_json,
)

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@given(value=values)
def test_an_excerpt_that_is_not_shortened_is_the_value(value: Any) -> None:
    shown = excerpt_json(value, limit=100_000)

    assert not shown.is_cut
    assert json.loads(shown.text) == value


@given(value=values, limit=st.integers(0, 200))
def test_an_excerpt_is_never_longer_than_its_limit(value: Any, limit: int) -> None:
    shown = excerpt_json(value, limit=limit)
    whole = excerpt_json(value, limit=100_000)

    assert len(shown.text) <= limit
    assert whole.text.startswith(shown.text)
    assert shown.is_cut is (len(whole.text) > limit)


def test_numbers_stay_as_they_are_written() -> None:
    assert excerpt_json(read_json(b'{"a":1.0,"b":1e400,"c":[]}'), limit=99).text == (
        '{\n  "a": 1.0,\n  "b": 1e400,\n  "c": []\n}'
    )


def test_a_shortened_string_states_the_missing_length() -> None:
    shown = excerpt_json({"image": "A" * (STRING_CHARACTERS * 10)}, limit=100_000)

    assert len(shown.text) < STRING_CHARACTERS
    assert "… 11,200 more characters" in shown.text


def test_invalid_json_is_shown_as_text() -> None:
    assert excerpt_document(b"upstream \xff failed", limit=99).text == "upstream \ufffd failed"
    cut = excerpt_document(b"x" * 1000, limit=10)
    assert (cut.text, cut.is_cut) == ("x" * 10, True)
    assert excerpt_document(b"[" * 100_000, limit=10).text == "[" * 10


@given(data=st.binary(max_size=400), head=st.integers(1, 6), tail=st.integers(1, 4))
def test_every_byte_is_shown_or_counted(data: bytes, head: int, tail: int) -> None:
    dump = dump_bytes(data, head_bytes=head * LINE_BYTES, tail_bytes=tail * LINE_BYTES)

    lines = (*dump.head, *dump.tail)
    shown = b"".join(bytes.fromhex(line.numbers) for line in lines)
    assert len(shown) + dump.left_out_bytes == len(data) == dump.size_bytes
    assert len(lines) <= head + tail
    for line in lines:
        piece = data[line.offset : line.offset + LINE_BYTES]
        assert bytes.fromhex(line.numbers) == piece
        assert len(line.letters) == len(piece)
        assert all(" " <= letter <= "~" for letter in line.letters)


def test_a_hex_dump_shows_characters_next_to_their_bytes() -> None:
    [line] = dump_bytes(b'data: {"a":1}\r\n\x1b[', head_bytes=32, tail_bytes=16).head[:1]

    assert line.numbers == "64 61 74 61 3a 20 7b 22  61 22 3a 31 7d 0d 0a 1b"
    assert line.letters == 'data: {"a":1}...'
