"""The first difference of two values."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.inspection.differences import find_byte_difference, find_value_difference

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)


@given(value=values)
def test_a_value_does_not_differ_from_its_copy(value: Any) -> None:
    assert find_value_difference(value, copy.deepcopy(value)) is None
    assert find_value_difference(value, json.loads(json.dumps(value))) is None


@given(one=values, other=values)
def test_there_is_a_difference_if_the_values_are_not_the_same_json(one: Any, other: Any) -> None:
    are_same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (find_value_difference(one, other) is None) == are_same


@given(one=st.binary(max_size=40), other=st.binary(max_size=40))
def test_the_first_byte_that_differs_is_reported(one: bytes, other: bytes) -> None:
    difference = find_byte_difference(one, other, "native")
    if one == other:
        assert difference is None
        return
    assert difference is not None
    place = int(difference.path.removeprefix("native at byte "))
    assert one[:place] == other[:place]
    assert one[place : place + 1] != other[place : place + 1]


@pytest.mark.parametrize(
    ("stored", "found", "path", "shown"),
    [
        ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}, "a[1].b", ("2", "3")),
        ({"a": 1}, {}, "a", ("1", None)),
        ([1], [1, 2], "[1]", (None, "2")),
        ({"a": "cat"}, {"a": "car"}, "a at character 2", ('"cat"', '"car"')),
        (True, 1, "", ("true", "1")),
        ("", "x" * 200, " at character 0", ('""', f'"{"x" * 30}"')),
    ],
)
def test_the_path_and_both_values_are_reported(stored: Any, found: Any, path: str, shown: tuple[Any, Any]) -> None:
    difference = find_value_difference(stored, found)
    assert difference is not None
    assert (difference.path, (difference.stored, difference.found)) == (path, shown)
    assert find_value_difference(1, 1.0) is None
