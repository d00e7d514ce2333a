"""JSON as it goes over the wire, in both directions.

Any text that a model or a user can write is answered as valid JSON in valid UTF-8: half of a surrogate pair has no
place in UTF-8 and is written as an escape. Such halves are also read: JavaScript cuts emoji in two and sends them.
"""

import json
import math
from datetime import UTC, datetime
from typing import Any, Final

from litestar import MediaType, Response
from pydantic import BaseModel

_TOO_LARGE: Final = "the number is too large"


def encode_json(value: Any) -> bytes:
    """One line of JSON without white space. Times are written in UTC."""
    try:
        return _readable.encode(value).encode()
    except UnicodeEncodeError:
        return _escaped.encode(value).encode()


def decode_json(body: bytes) -> Any:
    """The value of a JSON text in UTF-8. Raises `ValueError`, also for numbers that could not be written again."""
    return _decoder.decode(body.decode())


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
_decoder: Final = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse_constant)
