"""Python values to columns and back.

Postgres text, and with it `json` and `jsonb`, takes neither NUL bytes nor lone surrogates, yet both arrive: models
stream half of a surrogate pair, tools return binary rubbish. Such a character is written as an escape: U+10FFFF, which
is no character of any language, followed by its four hex digits; U+10FFFF itself becomes an escape too. The mapping is
reversible, text without these characters is stored as it is, and the check costs one scan.

Raw provider bytes are compressed with zstd: event streams repeat themselves and shrink to a fraction. They have a
checksum, so that bytes which a disk or a backup has changed are not taken for what the provider said.
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

Place = TypeVar("Place", str, int)


def encode_text(text: str) -> str:
    """Text as Postgres takes it."""
    if isinstance(text, Storable):
        return text
    return _UNSTORABLE.sub(_escape, text) if _UNSTORABLE.search(text) else text


def decode_text(text: str) -> str:
    """The inverse of `encode_text`."""
    return _ESCAPED.sub(_unescape, text) if _ESCAPE in text else text


class Storable(str):
    """Text that has been made storable already: doing it twice would not be undone by undoing it once."""

    __slots__ = ()


def encode_json(value: object) -> Storable:
    """A JSON document as Postgres takes it, its keys in their order."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValidationFailed("A value cannot be written as JSON.") from error
    if _EXPONENT.search(text):
        text = _STRING_OR_HUGE.sub(_write_out, text)
    text = encode_text(text)
    # `json` has written NUL as an escape of its own, which Postgres refuses just as much.
    return Storable(_JSON_NUL.sub(rf"\g<1>{_ESCAPE}0000", text) if "\\u0000" in text else text)


def decode_json(text: str) -> Any:
    """The inverse of `encode_json`. Control characters may stand raw where an escape was undone."""
    return json.loads(decode_text(text), strict=False)


def encode_raw(data: bytes) -> bytes:
    """Raw provider bytes, compressed."""
    return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(data)


def decode_raw(data: bytes) -> bytes:
    """The inverse of `encode_raw`. Raises `zstandard.ZstdError` for what is damaged."""
    try:
        return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except MemoryError as error:
        # How much there is stands at the beginning, and a single bit makes it more than there can be.
        raise zstandard.ZstdError("the frame says that it holds more than there is room for") from error


def encode_cursor(place: str | int) -> str:
    """A place in a list, opaque to clients."""
    return base64.urlsafe_b64encode(json.dumps(place).encode()).decode().rstrip("=")


def decode_cursor(cursor: str, kind: type[Place]) -> Place:
    """The place that a cursor stands for. Raises `CursorInvalid`."""
    try:
        place = json.loads(base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True))
    except (ValueError, RecursionError) as error:
        raise CursorInvalid from error
    if type(place) is not kind:
        raise CursorInvalid
    return place


def _write_out(match: re.Match[str]) -> str:
    """A float in digits with a fraction. `jsonb` would keep `1e+300` as an integer, which is another number."""
    found = match.group()
    return found if found.startswith('"') else f"{Decimal(float(found)):f}.0"


def _escape(match: re.Match[str]) -> str:
    character = match.group()
    return _ESCAPE + (_SELF if character == _ESCAPE else f"{ord(character):04x}")


def _unescape(match: re.Match[str]) -> str:
    digits = match.group(1)
    return _ESCAPE if digits == _SELF else chr(int(digits, 16))
