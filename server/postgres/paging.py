"""Pages by cursor: the cursor names the last item shown, so a page costs the same wherever it is in the list."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, TypeVar
from uuid import UUID

from server.conversation.errors import CursorInvalid
from server.conversation.identifiers import decode_id
from server.conversation.page import PAGE_LIMIT, Page
from server.postgres.codec import decode_cursor, encode_cursor
from server.postgres.rows import Row

Item = TypeVar("Item")

ABOVE_ALL_SEQS: Final = 2**63 - 1
_ABOVE_ALL_IDS: Final = UUID(int=(1 << 128) - 1)
_BELOW_ALL_IDS: Final = UUID(int=0)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


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


def in_range(seq: int) -> int:
    """A number from outside that Postgres can compare; one beyond its range is beyond any turn."""
    return max(0, min(seq, ABOVE_ALL_SEQS))


def in_call_range(turn_seq: int) -> int:
    """The same for the turn of a call. Calls of no turn have numbers below zero."""
    return max(-ABOVE_ALL_SEQS, min(turn_seq, ABOVE_ALL_SEQS))


def ids_within(after: datetime | None, before: datetime | None) -> tuple[UUID, UUID]:
    """The ids that were made from `after` on and before `before`: the first, and the one that is too many.

    An id begins with the millisecond in which it was made, so time is a range of ids, and no index is needed for it.
    """
    return (
        _BELOW_ALL_IDS if after is None else _first_id_at(after),
        _ABOVE_ALL_IDS if before is None else _first_id_at(before),
    )


def _first_id_at(moment: datetime) -> UUID:
    milliseconds = (moment - _EPOCH) // timedelta(milliseconds=1)
    return UUID(int=max(0, milliseconds) << 80)


def page_of(
    rows: Sequence[Row], limit: int, item_from: Callable[[Row], Item], place_of: Callable[[Item], str | int]
) -> Page[Item]:
    """A page from rows of which one more was asked for than is shown: it only tells that there are more."""
    shown = bounded(limit)
    items = [item_from(row) for row in rows[:shown]]
    return Page(items=items, next_cursor=encode_cursor(place_of(items[-1])) if len(rows) > shown else None)
