"""How much fits on a page. Whatever people and models wrote is shown in parts: a page has so much room and no more."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final, Generic, TypeVar

from server.inspection.json_outline import ReadableText
from server.web.admin.rendering import show_text

PAGE_BYTES: Final = 500_000
"""For all that is quoted on one page, as it is sent: escaped and in UTF-8."""

Item = TypeVar("Item")
Shown = TypeVar("Shown")


@dataclass(frozen=True, slots=True, kw_only=True)
class Window(Generic[Item]):
    """The beginning and the end of a long list, each item with its number."""

    head: tuple[tuple[int, Item], ...]
    tail: tuple[tuple[int, Item], ...] = ()
    left_out: int = 0
    """Between the two."""
    total: int

    def map(self, show: Callable[[Item], Shown]) -> "Window[Shown]":
        """The same window on what the items are shown as."""
        return Window(
            head=tuple((number, show(item)) for number, item in self.head),
            tail=tuple((number, show(item)) for number, item in self.tail),
            left_out=self.left_out,
            total=self.total,
        )


def open_window(items: Sequence[Item], *, head: int, tail: int) -> Window[Item]:
    """At most so many items of either end."""
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
    """What is left of a page. Who comes first is shown first, so ask in the order of importance."""

    __slots__ = ("_left",)

    def __init__(self, size_bytes: int = PAGE_BYTES) -> None:
        self._left = size_bytes

    def fit(self, readable: ReadableText, limit: int) -> ReadableText:
        """As much of a text as there is room for, and never more than `limit` bytes."""
        size = min(limit, self._left)
        shown = readable.text[:size]
        while (weight := _weigh(shown)) > size:
            shown = shown[: len(shown) * size // weight]
        self._left -= weight
        return ReadableText(text=shown, is_cut=readable.is_cut or len(shown) < len(readable.text))

    def fit_line(self, text: str, limit: int) -> str:
        """The same for a short text; an ellipsis says that it was longer."""
        shown = self.fit(ReadableText(text=text), limit)
        return f"{shown.text}…" if shown.is_cut else shown.text


def _weigh(text: str) -> int:
    """At least what it weighs on the page: templates write quotes a byte shorter."""
    return len(escape(show_text(text)).encode())
