"""Encoding of Python values for columns.

Postgres `text`, `json` and `jsonb` accept neither NUL bytes nor lone surrogates, yet both occur: models stream half of
a surrogate pair, tools return binary data. Such a character is written as an escape: U+10FFFF, a noncharacter, followed
by four hex digits; U+10FFFF itself is escaped too. The mapping is reversible, text without these characters is stored
unchanged, and the check costs one scan.

Raw provider bytes are compressed with zstd. They have a checksum, so that a change by a disk or a backup is detected.
"""

import base64
import json
import re
from decimal import Decimal
from typing import Any, Final, TypeVar

import zstandard

from server.conversation.errors import CursorInvalid, ValidationFailed

_ESCAPE: Final = "\U0010ffff"
_UNSTORABLE: Final = re.compile("[\x00\ud800-\udfff\U0010ffff]")
_ESCAPED: Final = re.compile(_ESCAPE + "([0-9a-f]{4})")
_JSON_NUL: Final = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")
_SELF: Final = "ffff"
_EXPONENT: Final = re.compile(r"\de\+\d")
_STRING_OR_HUGE: Final = re.compile(r'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?e\+\d+')

Position = TypeVar("Position", str, int)


def encode_text(text: str) -> str:
    """Escape text for Postgres."""
    if isinstance(text, Storable):
        return text
    return _UNSTORABLE.sub(_escape, text) if _UNSTORABLE.search(text) else text


def decode_text(text: str) -> str:
    """The inverse of `encode_text`."""
    return _ESCAPED.sub(_unescape, text) if _ESCAPE in text else text


class Storable(str):
    """Text that is already escaped. Escaping it again would not be reversed by one decoding."""

    __slots__ = ()


def encode_json(value: object) -> Storable:
    """Encode a JSON document, keeping the order of its keys. Raises `ValidationFailed`."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValidationFailed("A value cannot be written as JSON.") from error
    if _EXPONENT.search(text):
        text = _STRING_OR_HUGE.sub(_write_out, text)
    text = encode_text(text)
    # `json.dumps` writes NUL as `\u0000`, which Postgres rejects too.
    return Storable(_JSON_NUL.sub(rf"\g<1>{_ESCAPE}0000", text) if "\\u0000" in text else text)


def decode_json(text: str) -> Any:
    """The inverse of `encode_json`. Decoded text may contain raw control characters."""
    return json.loads(decode_text(text), strict=False)


def encode_raw(data: bytes) -> bytes:
    """Compress raw provider bytes."""
    return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(data)


def decode_raw(data: bytes) -> bytes:
    """The inverse of `encode_raw`. Raises `zstandard.ZstdError` if the data is damaged."""
    try:
        return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except MemoryError as error:
        # The frame begins with its size, and one changed bit can make it larger than any memory.
        raise zstandard.ZstdError("the frame names a size that does not fit into memory") from error


def encode_cursor(position: str | int) -> str:
    """Encode a position in a list, opaque to clients."""
    return base64.urlsafe_b64encode(json.dumps(position).encode()).decode().rstrip("=")


def decode_cursor(cursor: str, kind: type[Position]) -> Position:
    """The inverse of `encode_cursor`. Raises `CursorInvalid`."""
    try:
        position = json.loads(base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True))
    except (ValueError, RecursionError) as error:
        raise CursorInvalid from error
    if type(position) is not kind:
        raise CursorInvalid
    return position


def _write_out(match: re.Match[str]) -> str:
    """Write a float as digits with a fraction. `jsonb` would store `1e+300` as an integer, which is read as int."""
    found = match.group()
    return found if found.startswith('"') else f"{Decimal(float(found)):f}.0"


def _escape(match: re.Match[str]) -> str:
    character = match.group()
    return _ESCAPE + (_SELF if character == _ESCAPE else f"{ord(character):04x}")


def _unescape(match: re.Match[str]) -> str:
    digits = match.group(1)
    return _ESCAPE if digits == _SELF else chr(int(digits, 16))
