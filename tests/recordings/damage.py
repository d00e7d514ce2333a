"""Damaged recorded streams: hostile values at any position, and the documents of a stream split and recombined."""

import json
from typing import Any, Final

from server.providers.wire.frames import FrameReader

_DEEP: Final = json.loads("[" * 150 + "]" * 150)
_DEEP_OBJECT: Final = json.loads('{"a":' * 150 + "1" + "}" * 150)


class Raw(str):
    """JSON text that Python's own encoder would not write."""

    __slots__ = ()


HOSTILE: Final[tuple[Any, ...]] = (
    None,
    True,
    False,
    0,
    -1,
    2**31,
    2**63,
    Raw("9" * 5000),
    Raw("-" + "9" * 5000),
    Raw("1e400"),
    Raw("-0"),
    Raw("1." + "0" * 5000 + "1"),
    Raw("1E5"),
    1.5,
    "",
    " ",
    "\x00",
    "\ud800",
    "\udc00 \ud83d",
    "\U0010ffff0000",
    "x" * 5000,
    [],
    {},
    [[]],
    [None],
    ["text"],
    {"type": ["text"]},
    {"type": {}},
    {"text": 5},
    {"\x00": "\ud800"},
    {"functionCall": 5},
    {"functionCall": {"name": ["f"], "args": {}}},
    {"functionCall": {"name": "f", "args": "x"}},
    {"text": "x", "thoughtSignature": 5},
    {"text": "x", "thought": "yes"},
    {"type": "tool_use"},
    {"type": "tool_use", "id": 5, "name": None, "input": {}},
    {"type": "tool_use", "id": "", "name": "f", "input": []},
    {"type": "text"},
    {"type": "text", "text": {"a": 1}},
    {"type": "thinking", "thinking": 5, "signature": []},
    {"type": "redacted_thinking", "data": {}},
    _DEEP,
    _DEEP_OBJECT,
)


def dump(value: Any) -> str:
    """Encode JSON unchanged, `Raw` included."""
    match value:
        case Raw():
            return str(value)
        case dict():
            return "{" + ",".join(f"{json.dumps(key)}:{dump(inner)}" for key, inner in value.items()) + "}"
        case list():
            return "[" + ",".join(dump(inner) for inner in value) + "]"
        case _:
            return json.dumps(value)


def documents_of(body: bytes) -> list[Any]:
    documents = []
    for frame in FrameReader().feed(body):
        try:
            documents.append(json.loads(frame.data))
        except ValueError:
            documents.append(Raw(frame.data.decode(errors="replace")))
    return documents


def encode(documents: list[Any]) -> bytes:
    return b"".join(b"data: " + dump(document).encode() + b"\r\n\r\n" for document in documents)


def places_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places_in(item, (*path, key)))]


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    key, *rest = path
    copied = dict(value) if isinstance(value, dict) else list(value)
    copied[key] = put(value[key], tuple(rest), new)
    return copied
