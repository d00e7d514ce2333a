"""A text in pieces keeps its pieces when it grows."""

from hypothesis import given
from hypothesis import strategies as st

from server.conversation.payload import PIECE_CHARACTERS, split_static

lines = st.lists(
    st.tuples(st.sampled_from("ab\ud83d"), st.integers(0, 3 * PIECE_CHARACTERS)).map(
        lambda line: line[0] * line[1] + "\n"
    ),
    max_size=6,
).map("".join)
texts = st.tuples(lines, st.text(max_size=5)).map("".join)


@given(text=texts)
def test_the_joined_pieces_are_the_text(text: str) -> None:
    pieces = split_static(text)
    assert "".join(pieces) == text
    assert all(len(piece) >= PIECE_CHARACTERS and piece.endswith("\n") for piece in pieces[:-1])
    assert all(pieces)


@given(text=texts, more=texts)
def test_appending_changes_only_the_last_piece(text: str, more: str) -> None:
    before, after = split_static(text), split_static(text + more)
    assert after[: len(before[:-1])] == before[:-1]


def test_a_short_text_is_one_piece() -> None:
    assert split_static("") == ()
    assert split_static("You help.\n") == ("You help.\n",)
    line = "x" * (PIECE_CHARACTERS - 1) + "\n"
    assert split_static(line + "y") == (line, "y")
    assert split_static(line) == (line,)
    assert split_static("x" * 3 * PIECE_CHARACTERS) == ("x" * 3 * PIECE_CHARACTERS,)
