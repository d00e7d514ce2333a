"""The words that a text must contain."""

import pytest

from server.postgres.inspection.conversation_list import list_required


@pytest.mark.parametrize(
    ("words", "phrase", "required"),
    [
        ("refund -invoice", "", ["refund"]),
        ("cat or dog", "", []),
        ("cat OR dog", "in the house", ["house", "the", "in"]),
        ("", "It's \u05e9\u05dc\u05d5\u05dd", ["\u05e9\u05dc\u05d5\u05dd", "It", "s"]),
        ("--", "!?", []),
    ],
)
def test_the_longest_words_come_first_and_alternatives_are_left_out(
    words: str, phrase: str, required: list[str]
) -> None:
    assert list(list_required(words, phrase)) == required
