"""Readable excerpts of JSON, text and bytes, of bounded size. The originals can be downloaded."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from server.conversation.block import JsonValue
from server.conversation.exact_json import Number, loads_exact

STRING_CHARACTERS: Final = 1200
"""Longer strings, such as an image or a long prompt, are shortened."""
LINE_BYTES: Final = 16
_MAX_LINE_CHARACTERS: Final = 72
"""Shorter values are rendered on one line."""
_COMPACT: Final = json.JSONEncoder(ensure_ascii=False)
_INDENT: Final = "  "
_SPACE: Final = 0x20
_DELETE: Final = 0x7F


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """A readable text, or its beginning."""

    text: str
    is_cut: bool = False
    length: int | None = None
    """Characters of the whole text. None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HexLine:
    """Up to sixteen bytes of a hex dump."""

    offset: int
    numbers: str
    """Hexadecimal, in two groups of eight."""
    letters: str
    """ASCII; a dot for every other byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HexDump:
    """The first and, if there are many, the last lines of some bytes."""

    size_bytes: int
    head: tuple[HexLine, ...]
    tail: tuple[HexLine, ...] = ()
    left_out_bytes: int = 0
    """Bytes between `head` and `tail`."""


def read_json(data: bytes) -> JsonValue | None:
    """Parse JSON with its numbers exactly as written. Returns None for anything else, and for `null`."""
    try:
        return loads_exact(data)
    except ValueError:
        return None


def excerpt_json(value: JsonValue, *, limit: int, string_limit: int = STRING_CHARACTERS) -> Excerpt:
    """Render indented JSON, at most `limit` characters, and at most `string_limit` of each string."""
    return _join(_write(value, 0, string_limit), limit)


def excerpt_value(value: JsonValue, *, limit: int) -> Excerpt:
    """Render a text as it is, a short value as one line of JSON, and any other value as indented JSON."""
    if isinstance(value, str):
        return excerpt_text(value, limit=limit)
    line = _join(_COMPACT.iterencode(value), _MAX_LINE_CHARACTERS)
    return excerpt_json(value, limit=limit) if line.is_cut else line


def excerpt_text(text: str, *, limit: int) -> Excerpt:
    """Return the first `limit` characters of a text."""
    return Excerpt(text=text[:limit], is_cut=len(text) > limit, length=len(text))


def excerpt_document(data: bytes, *, limit: int, string_limit: int = STRING_CHARACTERS) -> Excerpt:
    """Render a document as indented JSON, or as text if it is not JSON."""
    value = read_json(data)
    if isinstance(value, dict | list):
        return excerpt_json(value, limit=limit, string_limit=string_limit)
    # A character has at most four bytes.
    shown = data[: 4 * limit].decode("utf-8", "replace")
    return Excerpt(text=shown[:limit], is_cut=len(shown) > limit or len(data) > 4 * limit)


def dump_bytes(data: bytes, *, head_bytes: int, tail_bytes: int) -> HexDump:
    """Dump the first `head_bytes` and the last `tail_bytes`. Both must be multiples of `LINE_BYTES`."""
    if len(data) <= head_bytes + tail_bytes:
        return HexDump(size_bytes=len(data), head=tuple(_dump_lines(data, 0, len(data))))
    tail_start = len(data) - tail_bytes
    tail_start += -tail_start % LINE_BYTES
    return HexDump(
        size_bytes=len(data),
        head=tuple(_dump_lines(data, 0, head_bytes)),
        tail=tuple(_dump_lines(data, tail_start, len(data))),
        left_out_bytes=tail_start - head_bytes,
    )


def _join(parts: Iterator[str], limit: int) -> Excerpt:
    taken: list[str] = []
    length = 0
    try:
        for part in parts:
            if length + len(part) > limit:
                return Excerpt(text="".join(taken) + part[: limit - length], is_cut=True)
            taken.append(part)
            length += len(part)
    except RecursionError:
        # Values from HTTP requests are not nested so deeply, but those of an import may be.
        return Excerpt(text="".join(taken), is_cut=True)
    return Excerpt(text="".join(taken))


def _write(value: JsonValue, depth: int, string_limit: int) -> Iterator[str]:
    match value:
        case Number():
            yield str(value)
        case str():
            yield _quote(value, string_limit)
        case dict() if value:
            yield "{"
            for index, (name, item) in enumerate(value.items()):
                yield f"{',' if index else ''}\n{_INDENT * (depth + 1)}{_quote(name, string_limit)}: "
                yield from _write(item, depth + 1, string_limit)
            yield f"\n{_INDENT * depth}}}"
        case list() | tuple() if value:
            yield "["
            for index, item in enumerate(value):
                yield f"{',' if index else ''}\n{_INDENT * (depth + 1)}"
                yield from _write(item, depth + 1, string_limit)
            yield f"\n{_INDENT * depth}]"
        case _:
            yield json.dumps(value, ensure_ascii=False, default=str)


def _quote(text: str, limit: int) -> str:
    if len(text) <= limit:
        return json.dumps(text, ensure_ascii=False)
    kept = limit * 2 // 3
    return json.dumps(text[:kept], ensure_ascii=False)[:-1] + f'… {len(text) - kept:,} more characters"'


def _dump_lines(data: bytes, start: int, end: int) -> Iterator[HexLine]:
    for offset in range(start, end, LINE_BYTES):
        piece = data[offset : min(offset + LINE_BYTES, end)]
        half = LINE_BYTES // 2
        yield HexLine(
            offset=offset,
            numbers="  ".join(part.hex(" ") for part in (piece[:half], piece[half:]) if part),
            letters="".join(chr(byte) if _SPACE <= byte < _DELETE else "." for byte in piece),
        )
