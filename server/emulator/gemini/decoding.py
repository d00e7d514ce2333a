"""Decodes JSON into messages: keys in snake_case, values of the right types, and the API's error texts.

Both spellings of a key are accepted, a single value stands for a list of one, and null counts as absent. Free-form
values (arguments, responses, JSON schemas) stay as they are.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from server.emulator.gemini.errors import ApiError, unreadable
from server.emulator.gemini.fields import MESSAGES, ONE_OF
from server.emulator.signing import decode_base64

_UNDERSCORE: Final = re.compile(r"_([a-z0-9])")
_NUMBER: Final = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?")
_PACKAGE: Final = "type.googleapis.com/google.ai.generativelanguage.v1beta."


def decode(body: bytes, message: str) -> dict[str, Any]:
    """Decode the body as the named message. Raises `ApiError`."""
    try:
        value = json.loads(body or b"{}")
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"Invalid JSON payload received. {error}") from error
    decoder = _Decoder()
    decoded = decoder.read_message(value, message, "")
    if decoder.violations:
        raise unreadable(decoder.violations)
    return decoded


class _Decoder:
    """Continues after an error, because the API lists all of them."""

    def __init__(self) -> None:
        self.violations: list[tuple[str, str]] = []

    def read_message(self, value: Any, message: str, path: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            self._refuse_value(path, f"{_PACKAGE}{message}", value)
            return {}
        known = _spellings(message)
        decoded: dict[str, Any] = {}
        for key, item in value.items():
            if key not in known:
                place = f" at '{path}'" if path else ""
                text = f'Invalid JSON payload received. Unknown name "{key}"{place}: Cannot find field.'
                self.violations.append((path, text))
            elif item is not None:
                name = known[key]
                self._refuse_second(message, name, decoded, path)
                below = f"{path}.{name}" if path else name
                decoded[name] = self._read_field(item, MESSAGES[message][name], below)
        return decoded

    def _refuse_second(self, message: str, name: str, decoded: Mapping[str, Any], path: str) -> None:
        for group, members in ONE_OF.get(message, {}).items():
            if name in members and any(other in decoded for other in members):
                text = f"oneof field '{group}' is already set. Cannot set '{camel_case(name)}'"
                place = f" at '{path}'" if path else ""
                self.violations.append((path, f"Invalid value{place} (oneof), {text}"))

    def _read_field(self, value: Any, kind: str, path: str) -> Any:
        if kind.endswith("[]"):
            items = value if isinstance(value, list) else [value]
            return [self._read_field(item, kind[:-2], f"{path}[{index}]") for index, item in enumerate(items)]
        if kind.endswith("{}"):
            if not isinstance(value, Mapping):
                self._refuse_value(path, "MAP", value)
                return {}
            return {name: self._read_field(item, kind[:-2], f"{path}[{name!r}]") for name, item in value.items()}
        if kind in MESSAGES:
            return self.read_message(value, kind, path)
        return self._read_scalar(value, kind, path)

    def _read_scalar(self, value: Any, kind: str, path: str) -> Any:
        if kind == "bytes" and isinstance(value, str) and decode_base64(value) is None:
            text = f"Invalid value at '{path}' (TYPE_BYTES), Base64 decoding failed for \"{value}\""
            self.violations.append((path, text))
        elif not _SCALARS[kind](value):
            self._refuse_value(path, _TYPE_NAMES[kind], value)
        elif kind in {"int32", "number"} and isinstance(value, str):
            return float(value)
        return value

    def _refuse_value(self, path: str, kind: str, value: Any) -> None:
        text = f"Invalid value at '{path}' ({kind}), {json.dumps(value, ensure_ascii=False)}"
        self.violations.append((path, text))


def camel_case(name: str) -> str:
    """`thought_signature` as `thoughtSignature`."""
    return _UNDERSCORE.sub(lambda match: match[1].upper(), name)


def _spellings(message: str) -> dict[str, str]:
    return {spelling: name for name in MESSAGES[message] for spelling in (name, camel_case(name))}


def _is_number(value: Any) -> bool:
    if isinstance(value, str):
        return _NUMBER.fullmatch(value) is not None
    return isinstance(value, int | float) and not isinstance(value, bool)


_SCALARS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "string": lambda value: isinstance(value, str),
    "bytes": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "int32": lambda value: _is_number(value) and float(value).is_integer(),
    "number": _is_number,
    "enum": lambda value: isinstance(value, str | int) and not isinstance(value, bool),
    "struct": lambda value: isinstance(value, Mapping),
    "any": lambda _: True,
}
_TYPE_NAMES: Final[Mapping[str, str]] = {
    "string": "TYPE_STRING",
    "bytes": "TYPE_BYTES",
    "bool": "TYPE_BOOL",
    "int32": "TYPE_INT32",
    "number": "TYPE_FLOAT",
    "enum": "TYPE_ENUM",
    "struct": "type.googleapis.com/google.protobuf.Struct",
}
