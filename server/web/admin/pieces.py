"""Texts on a page that stays small: each is cut where it is long, and all of them together have an allowance.

What is cut says how long it is; the whole of it is a download.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from server.conversation.block import JsonValue

PAGE_LETTERS: Final = 160_000
"""So many letters of what people and models wrote stand on one page. Escaped, a letter takes up to eight bytes."""
PIECE_LETTERS: Final = 6_000
_MIN_LETTERS: Final = 160
"""A piece has so many also where the allowance is spent."""
_LINE_LETTERS: Final = 72
"""A value that is not longer than this stands on one line."""
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, indent=2)
_COMPACT: Final = json.JSONEncoder(ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A text, or how it begins."""

    text: str
    length: int | None
    """Letters in all; None where they were not counted."""
    is_cut: bool


class Allowance:
    """What is left for the texts of one page."""

    def __init__(self, letters: int = PAGE_LETTERS) -> None:
        self._left = letters

    def take(self, text: str, limit: int = PIECE_LETTERS) -> Piece:
        """As much of the text as there is room for."""
        budget = self._budget(limit)
        shown = text[:budget]
        self._left -= len(shown)
        return Piece(text=shown, length=len(text), is_cut=len(text) > budget)

    def take_json(self, value: JsonValue, limit: int = PIECE_LETTERS) -> Piece:
        """The same of a value as indented JSON. A text that is no JSON stands as it is."""
        if isinstance(value, str):
            return self.take(value, limit)
        budget = self._budget(limit)
        shown, is_cut = _write_until(_COMPACT.iterencode(value), _LINE_LETTERS)
        if is_cut:
            shown, is_cut = _write_until(_ENCODER.iterencode(value), budget)
        self._left -= len(shown)
        return Piece(text=shown, length=None if is_cut else len(shown), is_cut=is_cut)

    def _budget(self, limit: int) -> int:
        return max(_MIN_LETTERS, min(limit, self._left))


def write_whole(value: JsonValue) -> str:
    """A value as text: itself, or as JSON. What is nested deeply is not indented, which would take the square of it."""
    if isinstance(value, str):
        return value
    whole, is_cut = _write_until(_ENCODER.iterencode(value), 8 * 1024 * 1024)
    return _COMPACT.encode(value) if is_cut else whole


def _write_until(parts: Iterable[str], budget: int) -> tuple[str, bool]:
    """The parts joined up to a length, and whether there was more."""
    taken: list[str] = []
    left = budget
    try:
        for part in parts:
            taken.append(part[:left])
            if len(part) > left:
                return "".join(taken), True
            left -= len(part)
    except RecursionError:
        # Nothing that came over HTTP is so deep; an import may be.
        return "".join(taken), True
    return "".join(taken), False
