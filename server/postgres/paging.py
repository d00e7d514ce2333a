"""Pages by cursor: the cursor names the last item shown, so a page costs the same wherever it is in the list."""

from collections.abc import Callable, Sequence
from typing import Final, TypeVar
from uuid import UUID

from server.errors import CursorInvalid
from server.identifiers import decode_id
from server.page import PAGE_LIMIT, Page
from server.postgres.codec import decode_cursor, encode_cursor
from server.postgres.rows import Row

Item = TypeVar("Item")

_ABOVE_ALL_IDS: Final = UUID(int=(1 << 128) - 1)


def bounded(limit: int) -> int:
    """The number of items that a page may have."""
    return max(1, min(limit, PAGE_LIMIT))


def before_id(cursor: str | None, prefix: str) -> UUID:
    """Where a list that runs from the newest id to the oldest goes on. Raises `CursorInvalid`."""
    if cursor is None:
        return _ABOVE_ALL_IDS
    found = decode_id(prefix, decode_cursor(cursor, str))
    if found is None:
        raise CursorInvalid
    return found


def page_of(
    rows: Sequence[Row], limit: int, item_from: Callable[[Row], Item], place_of: Callable[[Item], str | int]
) -> Page[Item]:
    """A page from rows of which one more was asked for than is shown: it only tells that there are more."""
    shown = bounded(limit)
    items = [item_from(row) for row in rows[:shown]]
    return Page(items=items, next_cursor=encode_cursor(place_of(items[-1])) if len(rows) > shown else None)
