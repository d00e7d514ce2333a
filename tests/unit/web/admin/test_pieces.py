"""A page stays small, whatever was said."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from server.web.admin.pieces import PAGE_LETTERS, PIECE_LETTERS, Allowance, write_whole

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=20,
)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_a_long_text_is_cut_and_says_how_long_it_is() -> None:
    piece = Allowance().take("x" * 1_000_000)
    assert (len(piece.text), piece.length, piece.is_cut) == (PIECE_LETTERS, 1_000_000, True)
    assert not Allowance().take("short").is_cut


def test_all_texts_together_keep_to_the_allowance() -> None:
    allowance = Allowance()
    pieces = [allowance.take("x" * 1_000_000) for _ in range(1000)]
    least = len(pieces[-1].text)
    assert 0 < least < PIECE_LETTERS
    assert sum(len(piece.text) for piece in pieces) <= PAGE_LETTERS + 1000 * least


@given(VALUES)
def test_json_that_fits_is_whole_and_reads_as_the_value(value: Any) -> None:
    piece = Allowance().take_json([value])
    assert not piece.is_cut
    assert json.loads(piece.text) == [value]
    assert json.loads(write_whole([value])) == [value]


def test_deep_json_costs_no_more_than_its_piece() -> None:
    piece = Allowance().take_json(nested(190))
    assert piece.is_cut
    assert len(piece.text) == PIECE_LETTERS
    assert json.loads(write_whole(nested(190))) == nested(190)


def test_a_text_among_values_stands_as_it_is() -> None:
    assert Allowance().take_json('say "hi"').text == 'say "hi"'
    assert write_whole('say "hi"') == 'say "hi"'
