"""Where two values differ first, in few words: the path to it, and what stands there on either side."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

from server.conversation.block import JsonValue

_SHOWN: Final = 60
"""So many characters of a value are enough to see what it is."""
_BEFORE: Final = 12
"""So many of them stand before the difference, where there are as many."""
_MISSING: Final = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDifference:
    """The first difference."""

    path: str
    """As one would write it: `blocks[0].text`, with the character or byte where a text or bytes differ."""
    stored: str | None
    """Short, as JSON; None where there is nothing."""
    found: str | None


def find_value_difference(stored: JsonValue, found: JsonValue, path: str = "") -> ValueDifference | None:
    """The first difference of two JSON values, members in the order of the stored one. None where they are equal.

    Numbers are equal by value, whatever their type; true is no number.
    """
    if isinstance(stored, dict) and isinstance(found, dict):
        return _differ_in_members(stored, found, path)
    if isinstance(stored, list | tuple) and isinstance(found, list | tuple):
        pairs = zip_longest(stored, found, fillvalue=_MISSING)
        return _first(_differ_at(one, other, f"{path}[{place}]") for place, (one, other) in enumerate(pairs))
    if isinstance(stored, bool) is isinstance(found, bool) and stored == found:
        return None
    if isinstance(stored, str) and isinstance(found, str):
        place = _split_at(stored, found)
        return ValueDifference(
            path=f"{path} at character {place}", stored=_around(stored, place), found=_around(found, place)
        )
    return ValueDifference(path=path, stored=show_value(stored), found=show_value(found))


def find_byte_difference(stored: bytes, found: bytes, path: str) -> ValueDifference | None:
    """The first byte that differs, with those around it."""
    if stored == found:
        return None
    place = _split_at(stored, found)
    start = max(0, place - _BEFORE)
    shown = [data[start : start + _SHOWN].decode("utf-8", "backslashreplace") for data in (stored, found)]
    return ValueDifference(path=f"{path} at byte {place}", stored=show_value(shown[0]), found=show_value(shown[1]))


def show_value(value: JsonValue) -> str:
    """A value as JSON, cut where it is long."""
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


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


def _split_at(one: Sequence[object], other: Sequence[object]) -> int:
    """The first place where they differ; the end of the shorter one where it begins the other."""
    shorter = min(len(one), len(other))
    low, high = 0, shorter
    # What is compared may be megabytes: halves are compared at once, not item by item.
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _around(text: str, place: int) -> str:
    start = max(0, place - _BEFORE)
    return show_value(("…" if start else "") + text[start : start + _SHOWN // 2])
