"""The first difference between two JSON values or byte strings: its path, and a short form of both sides."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

from server.conversation.block import JsonValue

_MAX_SHOWN_CHARS: Final = 60
_CONTEXT_CHARS: Final = 12
"""Characters shown before the difference."""
_MISSING: Final = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDifference:
    """The first difference."""

    path: str
    """For example `blocks[0].text`. Texts and bytes also name the character or byte that differs."""
    stored: str | None
    """A short form of the value, as JSON. None if it is missing."""
    found: str | None


def find_value_difference(stored: JsonValue, found: JsonValue, path: str = "") -> ValueDifference | None:
    """Return the first difference of two JSON values, in the order of the stored members, or None if they are equal.

    Numbers are compared by value, whatever their type. A boolean never equals a number.
    """
    if isinstance(stored, dict) and isinstance(found, dict):
        return _differ_in_members(stored, found, path)
    if isinstance(stored, list | tuple) and isinstance(found, list | tuple):
        pairs = zip_longest(stored, found, fillvalue=_MISSING)
        return _first(_differ_at(one, other, f"{path}[{index}]") for index, (one, other) in enumerate(pairs))
    if isinstance(stored, bool) is isinstance(found, bool) and stored == found:
        return None
    if isinstance(stored, str) and isinstance(found, str):
        index = count_common_prefix(stored, found)
        return ValueDifference(
            path=f"{path} at character {index}", stored=_around(stored, index), found=_around(found, index)
        )
    return ValueDifference(path=path, stored=show_value(stored), found=show_value(found))


def find_byte_difference(stored: bytes, found: bytes, path: str) -> ValueDifference | None:
    """Return the first byte that differs with the bytes around it, or None if both are equal."""
    if stored == found:
        return None
    index = count_common_prefix(stored, found)
    start = max(0, index - _CONTEXT_CHARS)
    shown = [data[start : start + _MAX_SHOWN_CHARS].decode("utf-8", "backslashreplace") for data in (stored, found)]
    return ValueDifference(path=f"{path} at byte {index}", stored=show_value(shown[0]), found=show_value(shown[1]))


def show_value(value: JsonValue) -> str:
    """Render a value as JSON, truncated if it is long."""
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= _MAX_SHOWN_CHARS else text[: _MAX_SHOWN_CHARS - 1] + "…"


def count_common_prefix(one: Sequence[object], other: Sequence[object]) -> int:
    """Return how many leading items are equal."""
    low, high = 0, min(len(one), len(other))
    # The inputs may be megabytes: a binary search over slices is much faster than a loop over items.
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _differ_in_members(stored: dict[str, JsonValue], found: dict[str, JsonValue], path: str) -> ValueDifference | None:
    names = [*stored, *(name for name in found if name not in stored)]
    return _first(
        _differ_at(stored.get(name, _MISSING), found.get(name, _MISSING), f"{path}.{name}" if path else name)
        for name in names
    )


def _differ_at(stored: JsonValue, found: JsonValue, path: str) -> ValueDifference | None:
    if stored is not _MISSING and found is not _MISSING:
        return find_value_difference(stored, found, path)
    shown = [None if value is _MISSING else show_value(value) for value in (stored, found)]
    return ValueDifference(path=path, stored=shown[0], found=shown[1])


def _first(differences: Iterator[ValueDifference | None]) -> ValueDifference | None:
    return next((difference for difference in differences if difference is not None), None)


def _around(text: str, index: int) -> str:
    start = max(0, index - _CONTEXT_CHARS)
    return show_value(("…" if start else "") + text[start : start + _MAX_SHOWN_CHARS // 2])
