"""The size limit of a page: texts that users and models wrote are shown in part, and long lists by their ends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Final, Generic, TypeVar

from server.inspection.excerpts import Excerpt
from server.web.admin.rendering import show_text

PAGE_BYTES: Final = 500_000
"""Maximum size of all quoted texts of a page as sent: escaped and in UTF-8."""

Item = TypeVar("Item")
Shown = TypeVar("Shown")


@dataclass(frozen=True, slots=True, kw_only=True)
class Window(Generic[Item]):
    """The first and last items of a long list, each with its index."""

    head: tuple[tuple[int, Item], ...]
    tail: tuple[tuple[int, Item], ...] = ()
    left_out: int = 0
    """Number of items between `head` and `tail`."""
    total: int

    def map(self, show: Callable[[Item], Shown]) -> "Window[Shown]":
        """Return a window with each item replaced."""
        return Window(
            head=tuple((index, show(item)) for index, item in self.head),
            tail=tuple((index, show(item)) for index, item in self.tail),
            left_out=self.left_out,
            total=self.total,
        )


def open_window(items: Sequence[Item], *, head: int, tail: int) -> Window[Item]:
    """Return at most the first `head` and the last `tail` items."""
    numbered = list(enumerate(items))
    if len(numbered) <= head + tail:
        return Window(head=tuple(numbered), total=len(numbered))
    return Window(
        head=tuple(numbered[:head]),
        tail=tuple(numbered[len(numbered) - tail :]),
        left_out=len(numbered) - head - tail,
        total=len(numbered),
    )


class PageBudget:
    """The bytes that are left on a page. The most important texts should be fitted first."""

    __slots__ = ("_left", "_min_bytes")

    def __init__(self, size_bytes: int = PAGE_BYTES, *, min_bytes: int = 0) -> None:
        """Every text gets at least `min_bytes`, also after the budget is spent."""
        self._left = size_bytes
        self._min_bytes = min_bytes

    def fit(self, excerpt: Excerpt, limit: int) -> Excerpt:
        """Cut an excerpt to the bytes that are left, and to at most `limit` bytes."""
        size = min(limit, max(self._left, self._min_bytes))
        shown = excerpt.text[:size]
        while (weight := _weigh(shown)) > size:
            shown = shown[: len(shown) * size // weight]
        self._left -= weight
        return replace(excerpt, text=shown, is_cut=excerpt.is_cut or len(shown) < len(excerpt.text))

    def fit_line(self, text: str, limit: int) -> str:
        """Cut a short text; an ellipsis marks the cut."""
        shown = self.fit(Excerpt(text=text), limit)
        return f"{shown.text}…" if shown.is_cut else shown.text


def _weigh(text: str) -> int:
    """An upper bound of the size on the page: templates escape quotes with one byte less."""
    return len(escape(show_text(text)).encode())
