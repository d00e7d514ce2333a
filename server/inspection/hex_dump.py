"""Bytes for reading: their numbers, and beside them the letters that they are."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

LINE_BYTES: Final = 16
_SPACE: Final = 0x20
_DELETE: Final = 0x7F


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpLine:
    """Sixteen bytes, or what is left of them."""

    offset: int
    numbers: str
    """Hexadecimal, two groups of eight."""
    letters: str
    """ASCII; a dot for everything else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """The beginning of some bytes and, where they are many, their end."""

    size_bytes: int
    head: tuple[DumpLine, ...]
    tail: tuple[DumpLine, ...] = ()
    left_out_bytes: int = 0
    """Between the two."""


def dump_bytes(data: bytes, *, head_bytes: int, tail_bytes: int) -> Dump:
    """At most so many bytes of either end. Both are numbers of whole lines."""
    if len(data) <= head_bytes + tail_bytes:
        return Dump(size_bytes=len(data), head=tuple(_lines(data, 0, len(data))))
    tail_start = len(data) - tail_bytes
    tail_start += -tail_start % LINE_BYTES
    return Dump(
        size_bytes=len(data),
        head=tuple(_lines(data, 0, head_bytes)),
        tail=tuple(_lines(data, tail_start, len(data))),
        left_out_bytes=tail_start - head_bytes,
    )


def _lines(data: bytes, start: int, end: int) -> Iterator[DumpLine]:
    for offset in range(start, end, LINE_BYTES):
        piece = data[offset : min(offset + LINE_BYTES, end)]
        half = LINE_BYTES // 2
        numbers = "  ".join(part.hex(" ") for part in (piece[:half], piece[half:]) if part)
        yield DumpLine(
            offset=offset,
            numbers=numbers,
            letters="".join(chr(byte) if _SPACE <= byte < _DELETE else "." for byte in piece),
        )
