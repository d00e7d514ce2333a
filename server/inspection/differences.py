"""Differences between two JSON values, byte strings or texts.

For values and bytes: the first difference, with its path and a short form of both sides. For texts: all lines with
their numbers, and the words that changed within a line.

The running time of comparing texts is bounded for any input. The common first and last lines are skipped. If the rest
would take too long to align, it is reported as one removed and one added part.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from enum import StrEnum
from itertools import chain, islice, zip_longest
from typing import Final

from server.conversation.block import JsonValue

_MAX_SHOWN_CHARS: Final = 60
_CONTEXT_CHARS: Final = 12
"""Characters shown before the difference."""
_MISSING: Final = object()
_CONTEXT_LINES: Final = 3
_MAX_LINES: Final = 2000
"""Lines of both texts together that are aligned."""
_MAX_PAIRS: Final = 30_000
"""Pairs of equal lines, which determine the cost of aligning. Texts that repeat one line have the most."""
_MAX_WORD_CHARS: Final = 2000
"""Longest line whose words are aligned. Of a longer line, everything between the common ends is marked as changed."""
_MAX_WORD_PAIRS: Final = 200_000
"""Pairs of equal words in all lines together. After that, no words are marked."""
_MAX_ROWS: Final = 1500
_MIN_SIMILARITY: Final = 0.35
"""Less similar lines are treated as unrelated, and their words are not marked."""
_WORDS: Final = re.compile(r"\w+|\s+|[^\w\s]")


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

    Numbers are compared by value, regardless of their type. A boolean never equals a number.
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


class LineChange(StrEnum):
    """How a line changed."""

    SAME = "same"
    ADDED = "added"
    REMOVED = "removed"
    LEFT_OUT = "left_out"
    """A placeholder for equal lines that are far from any change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinePart:
    """A part of a line that changed or stayed as a whole."""

    text: str
    is_changed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferenceLine:
    """A line of one of the texts, or of both if it is the same."""

    change: LineChange
    old_number: int | None = None
    new_number: int | None = None
    parts: tuple[LinePart, ...] = ()
    left_out_count: int = 0

    @property
    def text(self) -> str:
        """The whole line."""
        return "".join(part.text for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDifference:
    """The lines of both texts. Empty if the texts are the same."""

    rows: tuple[DifferenceLine, ...]
    added_count: int
    removed_count: int
    is_coarse: bool = False
    """The changed part was too large to align: equal lines within it are reported as changed."""
    is_cut: bool = False
    """The list of rows was truncated."""


def compare_lines(
    old: str, new: str, *, context_lines: int = _CONTEXT_LINES, max_rows: int = _MAX_ROWS
) -> TextDifference:
    """Compare two texts. Each change is reported with the lines around it."""
    if old == new:
        return TextDifference(rows=(), added_count=0, removed_count=0)
    before, after = split_lines(old), split_lines(new)
    opcodes, is_coarse = _align(before, after)
    marker = _WordMarker(0 if is_coarse else _MAX_WORD_PAIRS)
    lines = _list_lines(before, after, opcodes, context_lines, marker)
    rows = tuple(islice(lines, max_rows))
    changed = [opcode for opcode in opcodes if opcode[0] != "equal"]
    return TextDifference(
        rows=rows,
        added_count=sum(end - start for _, _, _, start, end in changed),
        removed_count=sum(last - first for _, first, last, _, _ in changed),
        is_coarse=is_coarse,
        is_cut=next(lines, None) is not None,
    )


def split_lines(text: str) -> list[str]:
    """Split a text at line feeds only, as templates count lines; `str.splitlines` splits at more characters.

    A text that ends with a line end has an empty last line, so that it differs from one that does not.
    """
    return text.split("\n") if text else []


def shorten_line(line: DifferenceLine, max_chars: int) -> tuple[LinePart, ...]:
    """Truncate each part of a line to `max_chars`. The part before the first change keeps its end."""
    leads_to_change = len(line.parts) > 1 and not line.parts[0].is_changed
    return tuple(
        replace(part, text=_shorten(part.text, max_chars, keeps_end=index == 0 and leads_to_change))
        for index, part in enumerate(line.parts)
    )


def _shorten(text: str, max_chars: int, *, keeps_end: bool) -> str:
    if len(text) <= max_chars:
        return text
    return f"…{text[-max_chars:]}" if keeps_end else f"{text[:max_chars]}…"


_Opcode = tuple[str, int, int, int, int]
"""As `difflib` returns them: a kind, a range of lines of the old text, and a range of lines of the new one."""


def _align(before: Sequence[str], after: Sequence[str]) -> tuple[list[_Opcode], bool]:
    head = count_common_prefix(before, after)
    tail = count_common_prefix(before[head:][::-1], after[head:][::-1])
    one, other = before[head : len(before) - tail], after[head : len(after) - tail]
    is_coarse = len(one) + len(other) > _MAX_LINES or _count_pairs(one, other) > _MAX_PAIRS
    inner: list[_Opcode] = (
        [("replace", 0, len(one), 0, len(other))]
        if is_coarse
        else [*SequenceMatcher(None, one, other, autojunk=False).get_opcodes()]
    )
    opcodes: list[_Opcode] = [("equal", 0, head, 0, head)] if head else []
    opcodes += [(kind, a + head, b + head, c + head, d + head) for kind, a, b, c, d in inner]
    if tail:
        opcodes.append(("equal", len(before) - tail, len(before), len(after) - tail, len(after)))
    return opcodes, is_coarse and bool(one) and bool(other)


def _count_pairs(one: Sequence[str], other: Sequence[str]) -> int:
    counted = Counter(other)
    return sum(count * counted[item] for item, count in Counter(one).items())


def _list_lines(
    before: Sequence[str], after: Sequence[str], opcodes: Sequence[_Opcode], context_lines: int, marker: "_WordMarker"
) -> Iterator[DifferenceLine]:
    for index, (kind, first, last, start, end) in enumerate(opcodes):
        if kind == "equal":
            yield from _list_same(
                before[first:last],
                first,
                start,
                lead=context_lines if index else 0,
                trail=context_lines if index < len(opcodes) - 1 else 0,
            )
        else:
            yield from _list_changed(before[first:last], after[start:end], first, start, marker)


def _list_same(lines: Sequence[str], first: int, start: int, *, lead: int, trail: int) -> Iterator[DifferenceLine]:
    left_out = range(lead, len(lines) - trail)
    for index, line in enumerate(lines):
        if index in left_out:
            if index == left_out.start:
                yield DifferenceLine(change=LineChange.LEFT_OUT, left_out_count=len(left_out))
            continue
        yield DifferenceLine(
            change=LineChange.SAME,
            old_number=first + index + 1,
            new_number=start + index + 1,
            parts=(LinePart(text=line),),
        )


def _list_changed(
    removed: Sequence[str], added: Sequence[str], first: int, start: int, marker: "_WordMarker"
) -> Iterator[DifferenceLine]:
    """All removed lines, then all added ones. Lines with the same index are compared word by word."""
    pairs = [marker.mark(old, new) for old, new in zip(removed[:_MAX_LINES], added[:_MAX_LINES], strict=False)]
    for index, parts in enumerate(chain((pair[0] for pair in pairs), map(_whole, removed[len(pairs) :]))):
        yield DifferenceLine(change=LineChange.REMOVED, old_number=first + index + 1, parts=parts)
    for index, parts in enumerate(chain((pair[1] for pair in pairs), map(_whole, added[len(pairs) :]))):
        yield DifferenceLine(change=LineChange.ADDED, new_number=start + index + 1, parts=parts)


class _WordMarker:
    """Marks the words that differ between two lines, until its budget of word pairs is spent."""

    def __init__(self, max_pairs: int) -> None:
        self._pairs_left = max_pairs

    def mark(self, old: str, new: str) -> tuple[tuple[LinePart, ...], tuple[LinePart, ...]]:
        """Return the parts of both lines. Nothing is marked if they have little in common or the budget is spent."""
        if self._pairs_left <= 0:
            return _whole(old), _whole(new)
        one, other = _WORDS.findall(old), _WORDS.findall(new)
        if max(len(old), len(new)) > _MAX_WORD_CHARS:
            return _cut_middle(one, other)
        self._pairs_left -= _count_pairs(one, other) + len(one) + len(other)
        if self._pairs_left <= 0:
            return _whole(old), _whole(new)
        matcher = SequenceMatcher(None, one, other, autojunk=False)
        return _cut(matcher, one, other) if _are_alike(matcher, one, other) else (_whole(old), _whole(new))


def _are_alike(matcher: SequenceMatcher[str], one: Sequence[str], other: Sequence[str]) -> bool:
    """Compare the letters of the common words; spaces do not count."""
    shared = sum(_letters(one[block.a : block.a + block.size]) for block in matcher.get_matching_blocks())
    return 2 * shared >= _MIN_SIMILARITY * (_letters(one) + _letters(other))


def _letters(words: Sequence[str]) -> int:
    return sum(len(word) for word in words if not word.isspace())


def _cut(
    matcher: SequenceMatcher[str], one: Sequence[str], other: Sequence[str]
) -> tuple[tuple[LinePart, ...], tuple[LinePart, ...]]:
    removed: list[LinePart] = []
    added: list[LinePart] = []
    for kind, first, last, start, end in matcher.get_opcodes():
        is_changed = kind != "equal"
        removed += [LinePart(text="".join(one[first:last]), is_changed=is_changed)] if last > first else []
        added += [LinePart(text="".join(other[start:end]), is_changed=is_changed)] if end > start else []
    return tuple(removed), tuple(added)


def _cut_middle(one: Sequence[str], other: Sequence[str]) -> tuple[tuple[LinePart, ...], tuple[LinePart, ...]]:
    head = count_common_prefix(one, other)
    tail = count_common_prefix(one[head:][::-1], other[head:][::-1])
    return _cut_between(one, head, len(one) - tail), _cut_between(other, head, len(other) - tail)


def _cut_between(words: Sequence[str], head: int, end: int) -> tuple[LinePart, ...]:
    texts = ("".join(words[:head]), "".join(words[head:end]), "".join(words[end:]))
    return tuple(LinePart(text=text, is_changed=index == 1) for index, text in enumerate(texts) if text)


def _whole(line: str) -> tuple[LinePart, ...]:
    return (LinePart(text=line),)
