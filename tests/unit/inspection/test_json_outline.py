"""JSON for reading."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from server.inspection.json_outline import STRING_CHARACTERS, outline_document, outline_json, read_json

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@given(value=values)
def test_what_is_not_shortened_says_the_same(value: Any) -> None:
    shown = outline_json(value, limit=100_000)

    assert not shown.is_cut
    assert json.loads(shown.text) == value


@given(value=values, limit=st.integers(0, 200))
def test_it_is_never_longer_than_it_may_be(value: Any, limit: int) -> None:
    shown = outline_json(value, limit=limit)
    whole = outline_json(value, limit=100_000)

    assert len(shown.text) <= limit
    assert whole.text.startswith(shown.text)
    assert shown.is_cut is (len(whole.text) > limit)


def test_numbers_stay_as_they_are_written() -> None:
    assert outline_json(read_json(b'{"a":1.0,"b":1e400,"c":[]}'), limit=99).text == (
        '{\n  "a": 1.0,\n  "b": 1e400,\n  "c": []\n}'
    )


def test_a_long_string_says_how_much_of_it_is_missing() -> None:
    shown = outline_json({"image": "A" * (STRING_CHARACTERS * 10)}, limit=100_000)

    assert len(shown.text) < STRING_CHARACTERS
    assert "… 11,200 characters more" in shown.text


def test_what_is_no_json_is_shown_as_the_text_that_it_is() -> None:
    assert outline_document(b"upstream \xff failed", limit=99).text == "upstream \ufffd failed"
    cut = outline_document(b"x" * 1000, limit=10)
    assert (cut.text, cut.is_cut) == ("x" * 10, True)
    assert outline_document(b"[" * 100_000, limit=10).text == "[" * 10
