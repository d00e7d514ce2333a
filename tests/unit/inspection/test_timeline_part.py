"""Which turns are shown at a place."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.inspection.timeline_part import Place, choose_part

SIZES = [(seq, 10) for seq in range(1, 11)]


@pytest.mark.parametrize(
    ("place", "begins_behind"),
    [
        (Place(), 7),
        (Place(after_seq=4), 4),
        (Place(before_seq=6), 2),
        (Place(before_seq=2), 0),
        (Place(before_seq=2**70), 7),
        (Place(around_seq=5), 3),
        (Place(around_seq=2**70), 8),
        (Place(after_seq=-5), 0),
    ],
)
def test_a_place_says_where_to_begin(place: Place, begins_behind: int) -> None:
    assert place.begin_behind(10, 3) == begins_behind


@pytest.mark.parametrize(
    ("place", "part"),
    [
        (Place(), (8, 10)),
        (Place(after_seq=0), (1, 3)),
        (Place(before_seq=8), (5, 7)),
        (Place(around_seq=5), (4, 6)),
        (Place(around_seq=1), (1, 3)),
    ],
)
def test_a_part_that_would_be_too_large_keeps_the_turn_that_was_looked_for(place: Place, part: tuple[int, int]) -> None:
    assert choose_part(SIZES, place, limit_bytes=30) == part


def test_one_turn_is_shown_however_large_it_is() -> None:
    assert choose_part([(1, 5), (2, 1000), (3, 5)], Place(around_seq=2), limit_bytes=30) == (2, 2)
    assert choose_part([], Place(), limit_bytes=30) is None


@given(
    st.lists(st.integers(0, 100), min_size=1, max_size=30),
    st.sampled_from(["after_seq", "before_seq", "around_seq", ""]),
    st.integers(0, 40),
    st.integers(0, 500),
)
def test_a_part_is_within_its_limit_and_cannot_be_grown(sizes: list[int], kind: str, seq: int, limit: int) -> None:
    known = list(enumerate(sizes, 1))
    place = Place(**{kind: seq}) if kind else Place()
    part = choose_part(known, place, limit_bytes=limit)
    if part is None:
        assert kind == "before_seq"
        assert seq <= 1
        return
    first, last = part
    total = sum(sizes[first - 1 : last])
    assert first == last or total <= limit
    end = len(sizes) if kind != "before_seq" else min(len(sizes), max(seq, 1) - 1)
    left = limit - total
    assert first == 1 or sizes[first - 2] > left
    assert last == end or sizes[last] > left
