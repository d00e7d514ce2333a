"""Two versions of a text, line by line with their numbers, and within changed lines word by word.

The time it takes is bounded, whatever the texts are: lines that both begin and end with are put aside first, and where
what is left could take too long to align, it is told as one piece that went and one that came.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from enum import StrEnum
from itertools import chain, islice
from typing import Final

_CONTEXT_LINES: Final = 3
_MAX_LINES: Final = 2000
"""Of both texts together, that are aligned."""
_MAX_PAIRS: Final = 30_000
"""Of equal lines: what aligning costs. Texts of one repeated line have the most."""
_MAX_WORD_CHARS: Final = 2000
"""Of a line whose words are aligned. Of a longer one it is told what stands between what both begin and end with."""
_MAX_WORD_PAIRS: Final = 200_000
"""Of equal words, in all lines together: beyond it no words are marked."""
_MAX_ROWS: Final = 1500
_ALIKE: Final = 0.35
"""Lines that share less are two lines, and not one that was changed."""
_WORDS: Final = re.compile(r"\w+|\s+|[^\w\s]")


class LineChange(StrEnum):
    """What became of a line."""

    SAME = "same"
    ADDED = "added"
    REMOVED = "removed"
    LEFT_OUT = "left_out"
    """Stands for lines that are the same, far from any change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a line."""

    text: str
    is_changed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferenceRow:
    """A line of either text; of both where it is the same."""

    change: LineChange
    old_number: int | None = None
    new_number: int | None = None
    pieces: tuple[Piece, ...] = ()
    left_out_count: int = 0

    @property
    def text(self) -> str:
        """The line."""
        return "".join(piece.text for piece in self.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class LineDifference:
    """Both texts as one list of rows. Empty where they are the same."""

    rows: tuple[DifferenceRow, ...]
    added_count: int
    removed_count: int
    is_coarse: bool = False
    """The changed part was too large to be aligned: what is the same within it is told as changed."""
    is_cut: bool = False
    """There are more rows than are told."""


def compare_lines(
    old: str, new: str, *, context_lines: int = _CONTEXT_LINES, max_rows: int = _MAX_ROWS
) -> LineDifference:
    """The difference, with some of the lines around each change."""
    if old == new:
        return LineDifference(rows=(), added_count=0, removed_count=0)
    before, after = split_lines(old), split_lines(new)
    opcodes, is_coarse = _align(before, after)
    marker = _WordMarker(0 if is_coarse else _MAX_WORD_PAIRS)
    telling = _tell(before, after, opcodes, context_lines, marker)
    rows = tuple(islice(telling, max_rows))
    changed = [opcode for opcode in opcodes if opcode[0] != "equal"]
    return LineDifference(
        rows=rows,
        added_count=sum(end - start for _, _, _, start, end in changed),
        removed_count=sum(last - first for _, first, last, _, _ in changed),
        is_coarse=is_coarse,
        is_cut=next(telling, None) is not None,
    )


def split_lines(text: str) -> list[str]:
    """The lines of a text as templates count them: Python would also split at characters that are no line ends. A text
    that ends in a line end has an empty line behind it, so that one that does not is another text.
    """
    return text.split("\n") if text else []


def shorten_pieces(row: DifferenceRow, limit: int) -> tuple[Piece, ...]:
    """The pieces of a row, each of so many characters at most: of those that stayed what stands next to a change."""
    leads_to_change = len(row.pieces) > 1 and not row.pieces[0].is_changed
    return tuple(
        replace(piece, text=_shorten(piece.text, limit, keeps_end=place == 0 and leads_to_change))
        for place, piece in enumerate(row.pieces)
    )


def _shorten(text: str, limit: int, *, keeps_end: bool) -> str:
    if len(text) <= limit:
        return text
    return f"…{text[-limit:]}" if keeps_end else f"{text[:limit]}…"


_Opcode = tuple[str, int, int, int, int]
"""As `difflib` has them: what became of which lines of the one, and of which of the other."""


def _align(before: Sequence[str], after: Sequence[str]) -> tuple[list[_Opcode], bool]:
    head = _count_shared(before, after)
    tail = _count_shared(before[head:][::-1], after[head:][::-1])
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


def _count_shared(one: Sequence[str], other: Sequence[str]) -> int:
    """How many items both begin with."""
    count = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        count += 1
    return count


def _count_pairs(one: Sequence[str], other: Sequence[str]) -> int:
    counted = Counter(other)
    return sum(count * counted[item] for item, count in Counter(one).items())


def _tell(
    before: Sequence[str], after: Sequence[str], opcodes: Sequence[_Opcode], context_lines: int, marker: "_WordMarker"
) -> Iterator[DifferenceRow]:
    for place, (kind, first, last, start, end) in enumerate(opcodes):
        if kind == "equal":
            yield from _tell_same(
                before[first:last],
                first,
                start,
                lead=context_lines if place else 0,
                trail=context_lines if place < len(opcodes) - 1 else 0,
            )
        else:
            yield from _tell_changed(before[first:last], after[start:end], first, start, marker)


def _tell_same(lines: Sequence[str], first: int, start: int, *, lead: int, trail: int) -> Iterator[DifferenceRow]:
    left_out = range(lead, len(lines) - trail)
    for index, line in enumerate(lines):
        if index in left_out:
            if index == left_out.start:
                yield DifferenceRow(change=LineChange.LEFT_OUT, left_out_count=len(left_out))
            continue
        yield DifferenceRow(
            change=LineChange.SAME,
            old_number=first + index + 1,
            new_number=start + index + 1,
            pieces=(Piece(text=line),),
        )


def _tell_changed(
    went: Sequence[str], came: Sequence[str], first: int, start: int, marker: "_WordMarker"
) -> Iterator[DifferenceRow]:
    """All that went, then all that came; the first line of each is compared with the first of the other, and so on."""
    pairs = [marker.mark(old, new) for old, new in zip(went[:_MAX_LINES], came[:_MAX_LINES], strict=False)]
    for index, pieces in enumerate(chain((pair[0] for pair in pairs), map(_whole, went[len(pairs) :]))):
        yield DifferenceRow(change=LineChange.REMOVED, old_number=first + index + 1, pieces=pieces)
    for index, pieces in enumerate(chain((pair[1] for pair in pairs), map(_whole, came[len(pairs) :]))):
        yield DifferenceRow(change=LineChange.ADDED, new_number=start + index + 1, pieces=pieces)


class _WordMarker:
    """Marks what is different in two lines, as long as its allowance lasts."""

    def __init__(self, allowance: int) -> None:
        self._allowance = allowance

    def mark(self, old: str, new: str) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
        """Both lines. Nothing is marked where they have too little in common, or too much is to be looked at."""
        if self._allowance <= 0:
            return _whole(old), _whole(new)
        one, other = _WORDS.findall(old), _WORDS.findall(new)
        if max(len(old), len(new)) > _MAX_WORD_CHARS:
            return _cut_middle(one, other)
        self._allowance -= _count_pairs(one, other) + len(one) + len(other)
        if self._allowance <= 0:
            return _whole(old), _whole(new)
        matcher = SequenceMatcher(None, one, other, autojunk=False)
        return _cut(matcher, one, other) if _are_alike(matcher, one, other) else (_whole(old), _whole(new))


def _are_alike(matcher: SequenceMatcher[str], one: Sequence[str], other: Sequence[str]) -> bool:
    """By the letters of the words that they share: all lines have spaces."""
    shared = sum(_letters(one[block.a : block.a + block.size]) for block in matcher.get_matching_blocks())
    return 2 * shared >= _ALIKE * (_letters(one) + _letters(other))


def _letters(words: Sequence[str]) -> int:
    return sum(len(word) for word in words if not word.isspace())


def _cut(
    matcher: SequenceMatcher[str], one: Sequence[str], other: Sequence[str]
) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
    went: list[Piece] = []
    came: list[Piece] = []
    for kind, first, last, start, end in matcher.get_opcodes():
        is_changed = kind != "equal"
        went += [Piece(text="".join(one[first:last]), is_changed=is_changed)] if last > first else []
        came += [Piece(text="".join(other[start:end]), is_changed=is_changed)] if end > start else []
    return tuple(went), tuple(came)


def _cut_middle(one: Sequence[str], other: Sequence[str]) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
    head = _count_shared(one, other)
    tail = _count_shared(one[head:][::-1], other[head:][::-1])
    return _cut_between(one, head, len(one) - tail), _cut_between(other, head, len(other) - tail)


def _cut_between(words: Sequence[str], head: int, end: int) -> tuple[Piece, ...]:
    texts = ("".join(words[:head]), "".join(words[head:end]), "".join(words[end:]))
    return tuple(Piece(text=text, is_changed=place == 1) for place, text in enumerate(texts) if text)


def _whole(line: str) -> tuple[Piece, ...]:
    return (Piece(text=line),)
