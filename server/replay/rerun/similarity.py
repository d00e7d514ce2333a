"""How alike two texts are, by their words."""

import re
from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from typing import Final

LONGEST_WORDS: Final = 20_000
"""Of longer texts the order of the words is not looked at: it would cost time, and says little by then."""
_WORD: Final = re.compile(r"\w+|[^\w\s]")


def split_words(text: str) -> list[str]:
    """The words and marks of a text. White space counts for nothing."""
    return _WORD.findall(text)


def measure_similarity(one: str, other: str) -> float:
    """From 0, nothing in common, to 1, the same words in the same order.

    Twice the words of their longest common subsequence, of the words of both. Bounded in time whatever the texts are.
    """
    return measure_words(split_words(one), split_words(other))


def measure_words(one: Sequence[str], other: Sequence[str]) -> float:
    """The same for words."""
    if not one and not other:
        return 1.0
    total = len(one) + len(other)
    opening = _count_common(one, other)
    ending = min(_count_common(one[::-1], other[::-1]), min(len(one), len(other)) - opening)
    left = one[opening : len(one) - ending]
    right = other[opening : len(other) - ending]
    if max(len(left), len(right)) > LONGEST_WORDS:
        common = (Counter(left) & Counter(right)).total()
    else:
        common = _count_subsequence(left, right)
    return 2 * (opening + ending + common) / total


def _count_common(one: Sequence[str], other: Sequence[str]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _count_subsequence(one: Sequence[str], other: Sequence[str]) -> int:
    """The length of the longest common subsequence, a bit for each word of the other: Hyyrö's algorithm.

    A zero in `row` stands where the subsequence grows. One addition moves all of them at once.
    """
    full = (1 << len(other)) - 1
    places: dict[str, int] = {}
    for position, word in enumerate(other):
        places[word] = places.get(word, 0) | 1 << position
    row = full
    for word in one:
        matches = row & places.get(word, 0)
        row = (row + matches | row - matches) & full
    return len(other) - row.bit_count()
