"""Pages of lists by cursor. A cursor names the last item of a page, so all pages of a list cost the same."""

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
    """Clamp the number of items of a page."""
    return max(1, min(limit, PAGE_LIMIT))


def before_id(cursor: str | None, prefix: str) -> UUID:
    """Decode the cursor of a list from the newest id to the oldest. Raises `CursorInvalid`."""
    if cursor is None:
        return _ABOVE_ALL_IDS
    found = decode_id(prefix, decode_cursor(cursor, str))
    if found is None:
        raise CursorInvalid
    return found


def in_range(seq: int) -> int:
    """Clamp a turn number of a client to the range of `bigint`, which is beyond any turn."""
    return max(0, min(seq, ABOVE_ALL_SEQS))


def in_call_range(turn_seq: int) -> int:
    """The same for the turn number of a call, which is negative for calls without a turn."""
    return max(-ABOVE_ALL_SEQS, min(turn_seq, ABOVE_ALL_SEQS))


def ids_within(after: datetime | None, before: datetime | None) -> tuple[UUID, UUID]:
    """Return the range of ids created from `after` on and before `before`; the second bound is exclusive.

    An id begins with the millisecond of its creation, so a range of time is a range of ids and needs no index.
    """
    return (
        _BELOW_ALL_IDS if after is None else _first_id_at(after),
        _ABOVE_ALL_IDS if before is None else _first_id_at(before),
    )


def _first_id_at(moment: datetime) -> UUID:
    milliseconds = (moment - _EPOCH) // timedelta(milliseconds=1)
    return UUID(int=max(0, milliseconds) << 80)


def page_of(
    rows: Sequence[Row], limit: int, item_from: Callable[[Row], Item], position_of: Callable[[Item], str | int]
) -> Page[Item]:
    """Build a page from rows. The statement reads one row more than a page has, which shows that there are more."""
    shown = bounded(limit)
    items = [item_from(row) for row in rows[:shown]]
    return Page(items=items, next_cursor=encode_cursor(position_of(items[-1])) if len(rows) > shown else None)
