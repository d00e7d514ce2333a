"""Two answers side by side: their texts by words, their tool calls in pairs."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from enum import StrEnum
from itertools import takewhile
from typing import Final

from server.conversation.block import ToolCallBlock
from server.replay.rerun.comparison import Said
from server.replay.rerun.recorded_results import canonical_arguments

_WORD: Final = re.compile(r"\s+|\w+|[^\w\s]")
_MAX_PAIRS: Final = 1_000_000
"""Words of one text times those of the other. Beyond it the middle is shown whole, as replaced."""


class PieceKind(StrEnum):
    """What became of a piece of text."""

    SAME = "same"
    REMOVED = "removed"
    """Recorded, and not said by the candidate."""
    ADDED = "added"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Words that share their fate."""

    kind: PieceKind
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPair:
    """A recorded call and the candidate's in its place; one of them may be missing."""

    recorded: ToolCallBlock | None
    candidate: ToolCallBlock | None

    @property
    def is_same(self) -> bool:
        """Whether both ask for the same."""
        if self.recorded is None or self.candidate is None:
            return False
        return _signature(self.recorded) == _signature(self.candidate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """What both said."""

    pieces: Sequence[Piece]
    """Without the added ones they are the recorded text, without the removed ones the candidate's."""
    calls: Sequence[CallPair]


def lay_side_by_side(recorded: Said, candidate: Said) -> Sides:
    """Pure and bounded in time."""
    return Sides(
        pieces=diff_words(recorded.text, candidate.text), calls=tuple(pair_calls(recorded.calls, candidate.calls))
    )


def diff_words(recorded: str, candidate: str) -> tuple[Piece, ...]:
    """Both texts as pieces. White space belongs to the text, but a word is never cut."""
    one, other = _WORD.findall(recorded), _WORD.findall(candidate)
    opening = _count_common(one, other)
    ending = min(_count_common(one[::-1], other[::-1]), min(len(one), len(other)) - opening)
    left, right = one[opening : len(one) - ending], other[opening : len(other) - ending]
    pieces = [
        (PieceKind.SAME, one[:opening]),
        *_diff_middle(left, right),
        (PieceKind.SAME, one[len(one) - ending :]),
    ]
    return tuple(_join(pieces))


def pair_calls(recorded: Sequence[ToolCallBlock], candidate: Sequence[ToolCallBlock]) -> Iterator[CallPair]:
    """Equal ones first, then those of the same tool, each recorded one once; the rest has nobody beside it."""
    left = list(candidate)
    partners: dict[int, ToolCallBlock] = {}
    for same in (lambda a, b: _signature(a) == _signature(b), lambda a, b: a.name == b.name):
        for place, call in enumerate(recorded):
            found = next((other for other in left if same(call, other)), None)
            if place not in partners and found is not None:
                partners[place] = found
                left.remove(found)
    for place, call in enumerate(recorded):
        yield CallPair(recorded=call, candidate=partners.get(place))
    for call in left:
        yield CallPair(recorded=None, candidate=call)


def _diff_middle(one: list[str], other: list[str]) -> Iterator[tuple[PieceKind, list[str]]]:
    """White space alone holds nothing together: between two changes it is a part of them."""
    if len(one) * len(other) > _MAX_PAIRS:
        yield PieceKind.REMOVED, one
        yield PieceKind.ADDED, other
        return
    removed, added = list[str](), list[str]()
    for tag, first, last, other_first, other_last in SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        if tag == "equal" and any(not word.isspace() for word in one[first:last]):
            yield PieceKind.REMOVED, removed
            yield PieceKind.ADDED, added
            yield PieceKind.SAME, one[first:last]
            removed, added = [], []
        else:
            removed += one[first:last]
            added += other[other_first:other_last]
    yield PieceKind.REMOVED, removed
    yield PieceKind.ADDED, added


def _join(pieces: Sequence[tuple[PieceKind, list[str]]]) -> Iterator[Piece]:
    """Neighbours of a kind become one, empty ones none."""
    kind, words = PieceKind.SAME, list[str]()
    for next_kind, more in pieces:
        if not more:
            continue
        if next_kind is not kind and words:
            yield Piece(kind=kind, text="".join(words))
            words = []
        kind = next_kind
        words.extend(more)
    if words:
        yield Piece(kind=kind, text="".join(words))


def _count_common(one: Sequence[str], other: Sequence[str]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _signature(call: ToolCallBlock) -> tuple[str, str]:
    return call.name, canonical_arguments(call.arguments)
