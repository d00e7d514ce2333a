"""JSON that comes out as it went in.

What a provider sent goes back to it, and caches and signatures may hang on it: `1.0` must not become `1`, nor `1e400`
infinity, and keys keep their order. So numbers are kept as the text they came as.
"""

import json
from json.encoder import encode_basestring
from typing import Any, assert_never


class Number(str):
    """The text of a JSON number."""

    __slots__ = ()


def loads_exact(text: str | bytes) -> Any:
    """A JSON document with its numbers as `Number`. Raises `ValueError`."""
    return _decoder.decode(text if isinstance(text, str) else text.decode("utf-8", "surrogatepass"))


def dumps_exact(value: Any) -> bytes:
    """A document as `loads_exact` gives it, in UTF-8 without white space. Plain numbers are written as Python does."""
    return "".join(_write(value)).encode("utf-8", "surrogatepass")


def to_plain(value: Any) -> Any:
    """The same with ordinary numbers, for reading."""
    match value:
        case Number():
            return json.loads(value)
        case dict():
            return {key: to_plain(inner) for key, inner in value.items()}
        case list():
            return [to_plain(inner) for inner in value]
        case _:
            return value


def _refuse_constant(name: str) -> Any:
    message = f"{name} is not JSON"
    raise ValueError(message)


_decoder = json.JSONDecoder(parse_float=Number, parse_int=Number, parse_constant=_refuse_constant, strict=False)


def _write(value: Any) -> list[str]:
    match value:
        case Number():
            return [value]
        case str():
            return [encode_basestring(value)]
        case None | bool() | int() | float():
            return [json.dumps(value, allow_nan=False)]
        case list() | tuple():
            inner = [piece for item in value for piece in (",", *_write(item))]
            return ["[", *inner[1:], "]"]
        case dict():
            inner = [
                piece for key, item in value.items() for piece in (",", encode_basestring(key), ":", *_write(item))
            ]
            return ["{", *inner[1:], "}"]
        case _:
            assert_never(value)
