"""What a page says first when somebody comes to it from something that they have done.

The address names the notice and the text stands here: no link can put words into our mouth.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlencode

PARAMETER: Final = "notice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A sentence at the head of a page."""

    text: str
    is_good: bool = True
    """False: nothing was done, or not yet."""


NOTICES: Final[Mapping[str, Notice]] = {
    "forked": Notice(text="This is the fork. The original was not touched."),
    "cancelled": Notice(text="The turn was cancelled. What had arrived of it is kept."),
    "ended": Notice(text="The turn had come to its end before it could be cancelled.", is_good=False),
    "cancelling": Notice(text="The turn was asked to stop and still runs. Load the page again.", is_good=False),
    "compacted": Notice(text="Compacted: the oldest exchanges are history of the static layer now."),
    "summarised": Notice(text="Compacted: the oldest history was summed up."),
    "oldest_left_out": Notice(
        text="Compacted: no summary was to be had, and the oldest history is left out of requests from now on."
    ),
    "signed": Notice(text="Compacted: a summary that the provider has signed stands for the oldest exchanges now."),
    "unchanged": Notice(text="Nothing was compacted; below is why.", is_good=False),
    "undone": Notice(text="The compaction was undone. Its turns are messages again."),
    "view-saved": Notice(text="The view is saved. It stands above the list from now on."),
    "view-renamed": Notice(text="The view has its new name."),
    "view-deleted": Notice(text="The view is deleted. The conversations that it showed are not."),
    "erased": Notice(text="The conversation was deleted, with all that belonged to it."),
}


def find_notice(query: Mapping[str, str]) -> Notice | None:
    """The notice that an address asks for. One that is not known is none."""
    return NOTICES.get(query.get(PARAMETER, ""))


def with_notice(path: str, name: str) -> str:
    """The address of a page that begins with a notice."""
    return f"{path}{'&' if '?' in path else '?'}{urlencode({PARAMETER: name})}"
