"""JSON for reading: indented, its long strings shortened, and never longer than it may be.

What is shown is for people. Whoever wants every byte has the document itself.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from server.conversation.block import JsonValue
from server.conversation.exact_json import Number, loads_exact

STRING_CHARACTERS: Final = 1200
"""Longer strings, an image or a long prompt, are shortened."""
_INDENT: Final = "  "


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadableText:
    """A text that somebody can read."""

    text: str
    is_cut: bool = False
    """There would be more behind it."""


def read_json(data: bytes) -> JsonValue | None:
    """The value of a JSON document with its numbers as they are written; None where it is none, and for `null`."""
    try:
        return loads_exact(data)
    except ValueError:
        return None


def outline_json(value: JsonValue, *, limit: int, string_limit: int = STRING_CHARACTERS) -> ReadableText:
    """The value over several lines, at most so many characters of it, and of each string."""
    pieces: list[str] = []
    length = 0
    for piece in _write(value, 0, string_limit):
        if length + len(piece) > limit:
            return ReadableText(text="".join(pieces) + piece[: limit - length], is_cut=True)
        pieces.append(piece)
        length += len(piece)
    return ReadableText(text="".join(pieces))


def outline_text(text: str, *, limit: int) -> ReadableText:
    """At most so many characters of a text, from its beginning."""
    return ReadableText(text=text[:limit], is_cut=len(text) > limit)


def outline_document(data: bytes, *, limit: int, string_limit: int = STRING_CHARACTERS) -> ReadableText:
    """A document as JSON where it is some, else as the text that it is."""
    value = read_json(data)
    if isinstance(value, dict | list):
        return outline_json(value, limit=limit, string_limit=string_limit)
    # A character has four bytes at most.
    shown = data[: 4 * limit].decode("utf-8", "replace")
    return ReadableText(text=shown[:limit], is_cut=len(shown) > limit or len(data) > 4 * limit)


def _write(value: JsonValue, depth: int, string_limit: int) -> Iterator[str]:
    match value:
        case Number():
            yield str(value)
        case str():
            yield _quote(value, string_limit)
        case dict() if value:
            yield "{"
            for place, (name, item) in enumerate(value.items()):
                yield f"{',' if place else ''}\n{_INDENT * (depth + 1)}{_quote(name, string_limit)}: "
                yield from _write(item, depth + 1, string_limit)
            yield f"\n{_INDENT * depth}}}"
        case list() | tuple() if value:
            yield "["
            for place, item in enumerate(value):
                yield f"{',' if place else ''}\n{_INDENT * (depth + 1)}"
                yield from _write(item, depth + 1, string_limit)
            yield f"\n{_INDENT * depth}]"
        case _:
            yield json.dumps(value, ensure_ascii=False, default=str)


def _quote(text: str, limit: int) -> str:
    if len(text) <= limit:
        return json.dumps(text, ensure_ascii=False)
    kept = limit * 2 // 3
    return json.dumps(text[:kept], ensure_ascii=False)[:-1] + f'… {len(text) - kept:,} characters more"'
