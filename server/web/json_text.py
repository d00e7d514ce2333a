"""Encoding and decoding of JSON.

Any text of a model or a user is encoded as valid JSON in UTF-8: an unpaired surrogate, which UTF-8 cannot represent,
becomes an escape. Unpaired surrogates are also decoded: JavaScript programs send them when they cut an emoji in two.

An object with a duplicate key is refused: programs differ in which of the two values they use, so a proxy, a log and
the server could each see a different request.
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
    """Encode one line of JSON without white space. Times are converted to UTC."""
    try:
        return _readable.encode(value).encode()
    except UnicodeEncodeError:
        return _escaped.encode(value).encode()


def decode_json(body: bytes) -> Any:
    """Decode JSON in UTF-8. Raises `ValueError`, also for infinite numbers and NaN, and `DuplicateKey`."""
    return _decoder.decode(body.decode())


def refuse_duplicate_keys(body: bytes, decoded: Any) -> None:
    """Raise `DuplicateKey` if a body that a lenient decoder has decoded contains a key twice.

    Every key ends with a quote and a colon. If the text has as many of these as the value has keys, no key was lost.
    Otherwise some of them may be inside strings, or a space may precede the colon, and the text is decoded again.
    Counting allocates nothing, so that a large body costs no memory here.
    """
    # A quote after a single backslash is inside a string, such as JSON that is sent as text.
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
    """Answer with a view as JSON."""
    return Response(
        content=encode_json(view.model_dump()), status_code=status, media_type=MediaType.JSON, headers=headers
    )


def _encode_other(value: object) -> object:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, set | frozenset):
        return sorted(value)
    message = f"{type(value).__name__} cannot be encoded as JSON"
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
