"""JSON as it goes over the wire, in both directions.

Any text that a model or a user can write is answered as valid JSON in valid UTF-8: half of a surrogate pair has no
place in UTF-8 and is written as an escape. Such halves are also read: JavaScript cuts emoji in two and sends them.

An object that has a key twice is refused: programs differ in which of the two they take, so that a proxy, a log and the
server could each see another request.
"""

import json
import math
import re
from datetime import UTC, datetime
from typing import Any, Final

from litestar import MediaType, Response
from pydantic import BaseModel

_TOO_LARGE: Final = "the number is too large"
_SPACED_KEY_END: Final = re.compile(rb'"[ \t\r\n]+:')
_NAMED_CHARS: Final = 64


class DuplicateKey(ValueError):
    """A JSON object has a key twice."""

    def __init__(self, key: str) -> None:
        self.key = key[:_NAMED_CHARS]
        super().__init__(f"the key {json.dumps(self.key)} appears twice in one object")


def encode_json(value: Any) -> bytes:
    """One line of JSON without white space. Times are written in UTC."""
    try:
        return _readable.encode(value).encode()
    except UnicodeEncodeError:
        return _escaped.encode(value).encode()


def decode_json(body: bytes) -> Any:
    """The value of a JSON text in UTF-8.

    Raises `ValueError`, also for numbers that could not be written again, and `DuplicateKey`.
    """
    return _decoder.decode(body.decode())


def refuse_duplicate_keys(body: bytes, decoded: Any) -> None:
    """Raises `DuplicateKey` for a text that was decoded by a decoder which takes one of two keys.

    Every key ends with a quote and a colon. If the text has as many of these as the value has keys, no key was lost.
    Otherwise some of them may be inside of strings, or a space may precede the colon, and the text is read once more.
    Counting allocates nothing, so that a large body costs no memory here.
    """
    # A quote after a single backslash is inside of a string, such as JSON that is sent as text.
    ends = body.count(b'":') - body.count(b'\\":') + body.count(b'\\\\":')
    if _SPACED_KEY_END.search(body) or (ends > 1 and ends != _count_keys(decoded)):
        decode_json(body)


def _count_keys(value: Any) -> int:
    count, layer = 0, [value]
    while layer:
        count += sum(len(item) for item in layer if type(item) is dict)
        layer = [
            inner
            for item in layer
            for inner in (item.values() if type(item) is dict else item)
            if type(inner) is dict or type(inner) is list
        ]
    return count


def answer_json(view: BaseModel, status: int = 200, headers: dict[str, str] | None = None) -> Response[Any]:
    """A view as an answer."""
    return Response(
        content=encode_json(view.model_dump()), status_code=status, media_type=MediaType.JSON, headers=headers
    )


def _encode_other(value: object) -> object:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, set | frozenset):
        return sorted(value)
    message = f"{type(value).__name__} has no place in JSON"
    raise TypeError(message)


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(_TOO_LARGE)
    return number


def _refuse_constant(name: str) -> Any:
    message = f"{name} is not JSON"
    raise ValueError(message)


_readable: Final = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_encode_other, check_circular=False
)
_escaped: Final = json.JSONEncoder(
    ensure_ascii=True, allow_nan=False, separators=(",", ":"), default=_encode_other, check_circular=False
)


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = dict(pairs)
    if len(made) != len(pairs):
        made.clear()
        for key, value in pairs:
            if key in made:
                raise DuplicateKey(key)
            made[key] = value
    return made


_decoder: Final = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse_constant, object_pairs_hook=_make_object)
