"""The difference between two texts."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from server.inspection.differences import DifferenceLine, LineChange, compare_lines, shorten_line, split_lines

lines = st.lists(st.sampled_from(["", "a", "b", "a b c", "a b d", "{{ x }}"]), max_size=12).map("\n".join)


def shown(old: str, new: str) -> list[str]:
    signs = {LineChange.SAME: " ", LineChange.ADDED: "+", LineChange.REMOVED: "-", LineChange.LEFT_OUT: "…"}
    return [f"{signs[row.change]}{row.text or row.left_out_count or ''}" for row in compare_lines(old, new).rows]


def marked(row: DifferenceLine) -> list[str]:
    return [part.text for part in row.parts if part.is_changed]


@given(old=lines, new=lines)
@example(old="", new="\n")
@example(old="a", new="a\n")
def test_both_texts_can_be_read_from_the_difference(old: str, new: str) -> None:
    difference = compare_lines(old, new, context_lines=1000)
    if old == new:
        assert difference.rows == ()
        return
    before = [row.text for row in difference.rows if row.change is not LineChange.ADDED]
    after = [row.text for row in difference.rows if row.change is not LineChange.REMOVED]
    assert (before, after) == (split_lines(old), split_lines(new))
    numbers = [row.new_number for row in difference.rows if row.new_number]
    assert numbers == list(range(1, len(after) + 1))
    assert difference.added_count == sum(row.change is LineChange.ADDED for row in difference.rows)
    assert difference.removed_count == sum(row.change is LineChange.REMOVED for row in difference.rows)


def test_lines_far_from_a_change_are_left_out() -> None:
    old = "\n".join(str(number) for number in range(20))
    assert shown(old, old.replace("10", "ten")) == [
        "…7", " 7", " 8", " 9", "-10", "+ten", " 11", " 12", " 13", "…6",
    ]  # fmt: skip


def test_changed_words_are_marked_and_lines_with_little_in_common_are_not() -> None:
    removed, added = compare_lines("You speak with guests.", "You speak with all guests.").rows
    assert (marked(removed), marked(added)) == ([], ["all "])
    rows = compare_lines("You speak with all guests of the hotel.", "Today is a good day.").rows
    assert [marked(row) for row in rows] == [[], []]


def test_only_a_line_end_ends_a_line() -> None:
    """Templates count lines in this way; `splitlines` of Python would count more."""
    assert shown("a\u2028b\x0cc\nd", "a\u2028b\x0cc\ne") == [" a\u2028b\x0cc", "-d", "+e"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x\n" * 100_000 + "a", "y\n" * 100_000 + "b"),
        ("a" + "\nx" * 900, "b" + "\nx" * 800 + "\ny"),
        ("ab\n" * 900, "ba\nab\n" * 450),
    ],
    ids=["many lines", "one line over and over", "two lines in turn"],
)
def test_a_too_expensive_difference_is_reported_as_one_piece(old: str, new: str) -> None:
    """Aligning these texts would take minutes, and the test would time out."""
    difference = compare_lines(old, new, max_rows=50)
    assert difference.is_coarse
    assert difference.is_cut
    assert len(difference.rows) == 50


def test_the_words_of_many_long_lines_are_not_all_compared() -> None:
    old = "\n".join(f"{number} " + "a b " * 200 for number in range(900))
    new = "\n".join(f"{number}{number} " + "b a " * 200 for number in range(900))
    difference = compare_lines(old, new, max_rows=2000)
    assert not difference.is_coarse
    assert difference.added_count == difference.removed_count == 900


def test_a_common_beginning_and_end_cost_nothing() -> None:
    old = "x\n" * 5000 + "old\n" + "y\n" * 5000
    difference = compare_lines(old, old.replace("old", "new"))
    assert not difference.is_coarse
    assert [row.text for row in difference.rows if row.change is not LineChange.SAME] == ["", "old", "new", ""]


def test_a_change_in_a_very_long_line_is_shown_with_its_surroundings() -> None:
    words = "word " * 3000
    found = compare_lines(f"{words}old{words}", f"{words}new{words}")

    removed, added = found.rows
    assert [part.text for part in removed.parts if part.is_changed] == ["oldword"]
    assert [part.text for part in added.parts if part.is_changed] == ["newword"]
    assert removed.text == f"{words}old{words}"
    assert [part.text for part in shorten_line(added, 10)] == ["…word word ", "newword", " word word…"]


def test_a_line_without_a_change_is_shortened_at_its_end() -> None:
    (row,) = compare_lines("", "x" * 20).rows
    assert [part.text for part in shorten_line(row, 5)] == ["xxxxx…"]
