"""The static text in pieces, as providers cache it.

Providers cache by blocks, so a text that grows at its end and is one block is a new block each time, and everything
that was cached of it is lost. In pieces all but the last stay what they are: the pieces of a text are the first pieces
of every text that begins with it, apart from the last one.
"""

from typing import Final

PIECE_CHARACTERS: Final = 16_384
"""A piece is at least so long and ends with its line. Never changed: past requests are rebuilt with it."""
_STATIC_MARKS: Final = 2


def split_static(text: str) -> tuple[str, ...]:
    """The pieces, which together are the text. None for an empty one."""
    pieces: list[str] = []
    start = 0
    while (cut := text.find("\n", start + PIECE_CHARACTERS - 1) + 1) and cut < len(text):
        pieces.append(text[start:cut])
        start = cut
    return (*pieces, text[start:]) if text else ()


def count_static_marks(piece_count: int, limit: int) -> int:
    """How many markers the static text has: behind its last piece, and behind the one before it, the last that is still
    there when the text has grown.
    """
    return min(piece_count, _STATIC_MARKS, limit)
