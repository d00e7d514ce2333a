"""JSON that is encoded exactly as it was decoded.

A provider's message is sent back to it, and caches and signatures depend on its bytes: `1.0` must not become `1`, nor
`1e400` infinity, and keys keep their order. So numbers are kept as text.
"""

import json
import math
import re
from json.encoder import encode_basestring
from typing import Any, Final, assert_never

MAX_DEPTH: Final = 200
"""The maximum nesting. No legitimate arguments are nested deeper."""
_TOO_DEEP: Final = "nested too deeply"
_PLAIN_DIGITS: Final = 18
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


class Number(str):
    """The text of a JSON number."""

    __slots__ = ()


def loads_exact(text: str | bytes) -> Any:
    """Decode a document, with numbers as `Number`. Raises `ValueError`, also for too deep nesting."""
    text = text if isinstance(text, str) else text.decode("utf-8", "surrogatepass")
    try:
        value = _decoder.decode(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    # Counting is fast, and a document with few brackets cannot be deep.
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_deep(value):
        raise ValueError(_TOO_DEEP)
    return value


def dumps_exact(value: Any) -> bytes:
    """Encode a document in UTF-8 without white space. Plain numbers are written as Python does.

    Two halves of a surrogate pair that have become adjacent are written as one character. A lone half is written as an
    escape, because UTF-8 cannot represent it.
    """
    text = _dump(value)
    if not text.isascii() and _SURROGATE.search(text):
        joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        text = _SURROGATE.sub(lambda match: f"\\u{ord(match.group()):04x}", joined)
    return text.encode()


def dumps_sendable(value: Any) -> bytes:
    """As `dumps_exact`, but with U+FFFD for lone surrogates, which providers reject."""
    return _mend(_dump(value)).encode()


def make_sendable(value: Any) -> Any:
    """Replace lone surrogates. Returns the same object if there are none, which is the usual case."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if text.isascii() or not _SURROGATE.search(text):
        # The static text is checked with every call, and may be very long.
        return value
    return json.loads(_mend(json.dumps(value, ensure_ascii=False)))


def to_plain(value: Any) -> Any:
    """Convert to ordinary numbers, for reading. A number that Python cannot represent stays a text."""
    kind = type(value)
    if kind is Number:
        return _to_number(value)
    if kind is dict:
        return {key: to_plain(inner) for key, inner in value.items()}
    if kind is list:
        return [to_plain(inner) for inner in value]
    return value


def _mend(text: str) -> str:
    if text.isascii() or not _SURROGATE.search(text):
        return text
    joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    return _SURROGATE.sub("\ufffd", joined)


def _to_number(text: Number) -> int | float | str:
    if text.isdecimal() and len(text) <= _PLAIN_DIGITS:
        return int(text)
    try:
        number: int | float = json.loads(text)
    except ValueError:
        return str(text)
    return str(text) if isinstance(number, float) and math.isinf(number) else number


def _is_deep(value: Any) -> bool:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for item in level
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
    return any(isinstance(item, dict | list) for item in level)


def _refuse_constant(name: str) -> Any:
    message = f"{name} is not JSON"
    raise ValueError(message)


_decoder = json.JSONDecoder(parse_float=Number, parse_int=Number, parse_constant=_refuse_constant, strict=False)


def _dump(value: Any) -> str:
    pieces: list[str] = []
    _write(value, pieces)
    return "".join(pieces)


def _write(value: Any, pieces: list[str]) -> None:
    match value:
        case Number():
            pieces.append(value)
        case str():
            pieces.append(encode_basestring(value))
        case dict():
            opening = "{"
            for key, item in value.items():
                pieces.append(f"{opening}{encode_basestring(key)}:")
                _write(item, pieces)
                opening = ","
            pieces.append("}" if value else "{}")
        case list() | tuple():
            opening = "["
            for item in value:
                pieces.append(opening)
                _write(item, pieces)
                opening = ","
            pieces.append("]" if value else "[]")
        case None | bool() | int() | float():
            pieces.append(json.dumps(value, allow_nan=False))
        case _:
            assert_never(value)
