"""Words of two texts: how similar they are, and which of them differ. The running time is bounded for any texts."""

import re
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Final, TypeAlias

from server.inspection.differences import LinePart, count_common_prefix

MAX_ORDERED_WORDS: Final = 20_000
"""In longer texts words are only counted. Their order would take time and add little."""
_MAX_PAIRS: Final = 1_000_000
"""Words of one text times words of the other. Above it, everything between the common ends is marked as changed."""
_WORDS: Final = re.compile(r"\w+|[^\w\s]")
_WORDS_AND_SPACES: Final = re.compile(r"\s+|\w+|[^\w\s]")

Parts: TypeAlias = tuple[LinePart, ...]


def split_words(text: str) -> list[str]:
    """Return the words and punctuation marks of a text, without white space."""
    return _WORDS.findall(text)


def measure_similarity(one: str, other: str) -> float:
    """Return the similarity of two texts from 0, no common word, to 1, the same words in the same order.

    It is twice the length of their longest common subsequence of words, divided by the number of words of both.
    """
    return measure_words(split_words(one), split_words(other))


def measure_words(one: Sequence[str], other: Sequence[str]) -> float:
    """Return the similarity of two lists of words."""
    if not one and not other:
        return 1.0
    head, tail = _count_common_ends(one, other)
    left, right = one[head : len(one) - tail], other[head : len(other) - tail]
    if max(len(left), len(right)) > MAX_ORDERED_WORDS:
        common = (Counter(left) & Counter(right)).total()
    else:
        common = _count_subsequence(left, right)
    return 2 * (head + tail + common) / (len(one) + len(other))


def diff_words(recorded: str, candidate: str) -> tuple[Parts, Parts]:
    """Return both texts, divided into common and changed parts. No word is divided."""
    one, other = _WORDS_AND_SPACES.findall(recorded), _WORDS_AND_SPACES.findall(candidate)
    head, tail = _count_common_ends(one, other)
    ends = len(one) - tail, len(other) - tail
    recorded_parts, candidate_parts = _Parts(one), _Parts(other)
    recorded_parts.add(0, head)
    candidate_parts.add(0, head)
    if (ends[0] - head) * (ends[1] - head) > _MAX_PAIRS:
        opcodes = [("replace", 0, ends[0] - head, 0, ends[1] - head)]
    else:
        matcher = SequenceMatcher(None, one[head : ends[0]], other[head : ends[1]], autojunk=False)
        opcodes = [*matcher.get_opcodes()]
    for kind, first, last, start, end in opcodes:
        # White space between two changes belongs to them.
        is_changed = kind != "equal" or all(word.isspace() for word in one[head + first : head + last])
        recorded_parts.add(head + first, head + last, is_changed=is_changed)
        candidate_parts.add(head + start, head + end, is_changed=is_changed)
    recorded_parts.add(ends[0], len(one))
    candidate_parts.add(ends[1], len(other))
    return tuple(recorded_parts.parts), tuple(candidate_parts.parts)


class _Parts:
    """The parts of one text. Neighbours of the same kind are joined."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words
        self.parts: list[LinePart] = []

    def add(self, first: int, last: int, *, is_changed: bool = False) -> None:
        text = "".join(self._words[first:last])
        if not text:
            return
        if self.parts and self.parts[-1].is_changed is is_changed:
            text = self.parts.pop().text + text
        self.parts.append(LinePart(text=text, is_changed=is_changed))


def _count_common_ends(one: Sequence[str], other: Sequence[str]) -> tuple[int, int]:
    """Return how many words at the start and at the end are equal. The two never overlap."""
    head = count_common_prefix(one, other)
    return head, count_common_prefix(one[head:][::-1], other[head:][::-1])


def _count_subsequence(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the length of the longest common subsequence, by Hyyrö's bit-parallel algorithm.

    `row` has one bit per word of `other`; a zero marks a position at which the subsequence grows. One addition moves
    all of them at once.
    """
    full = (1 << len(other)) - 1
    positions: dict[str, int] = {}
    for index, word in enumerate(other):
        positions[word] = positions.get(word, 0) | 1 << index
    row = full
    for word in one:
        matches = row & positions.get(word, 0)
        row = (row + matches | row - matches) & full
    return len(other) - row.bit_count()
