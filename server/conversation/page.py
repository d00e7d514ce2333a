"""Pages of a list."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

Item = TypeVar("Item")

PAGE_LIMIT: Final = 100
"""The maximum size of a page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page(Generic[Item]):
    """Some items, and the cursor of the next page."""

    items: Sequence[Item]
    next_cursor: str | None
    """Opaque; None on the last page."""
