"""The values of records: how each kind of column is written in a line and read back exactly."""

import base64
import binascii
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from typing import Any, Final
from uuid import UUID

from server.conversation.identifiers import decode_id, encode_id

_VERBATIM: Final = "$text"
_UNSTORABLE: Final = re.compile("[\x00\ud800-\udfff]")
_JSON_NUL: Final = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


class FieldKind(StrEnum):
    """The format of a column in a line."""

    INTEGER = "integer"
    TEXT = "text"
    TEXTS = "texts"
    BYTES = "bytes"
    UUID = "uuid"
    INSTANT = "instant"
    MONEY = "money"
    JSON = "json"
    JSONB = "jsonb"


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A column of a record."""

    name: str
    kind: FieldKind
    nullable: bool = False
    optional: bool = False
    """May be missing, because the file may be older than the column."""
    bits: int = 64
    """The size of an integer."""
    prefix: str | None = None
    """The prefix of a UUID that is an identifier."""


def encode_value(each: Field, value: Any) -> Any:
    """Encode the value of a column for a line."""
    if value is None:
        return None
    match each.kind:
        case FieldKind.BYTES:
            return base64.b64encode(value).decode()
        case FieldKind.UUID:
            return str(value) if each.prefix is None else encode_id(each.prefix, value)
        case FieldKind.INSTANT:
            return value.astimezone(UTC).isoformat()
        case FieldKind.MONEY:
            return f"{value:f}"
        case FieldKind.JSON | FieldKind.JSONB:
            return _encode_document(value, spaced=each.kind is FieldKind.JSONB)
        case FieldKind.INTEGER | FieldKind.TEXT | FieldKind.TEXTS:
            return value


def decode_value(each: Field, value: Any) -> Any:
    """The inverse of `encode_value`. Raises `ValueError` or `TypeError` for values that it does not produce."""
    if value is None:
        if not each.nullable:
            raise ValueError(each.name)
        return None
    return _READERS[each.kind](each, value)


def _encode_document(text: str, *, spaced: bool) -> Any:
    """Return the document itself if decoding and encoding it gives the same text, else its text."""
    try:
        value = json.loads(text)
        # A column with the document `null` differs from a column that is NULL.
        if value is not None and not _looks_verbatim(value) and _dump(value, spaced=spaced) == text:
            return value
    except (ValueError, RecursionError):
        # Too deep or too long for Python: written as text.
        pass
    return {_VERBATIM: text}


def _decode_document(_each: Field, value: Any) -> str:
    text = value[_VERBATIM] if _looks_verbatim(value) else _dump(value, spaced=False)
    if _JSON_NUL.search(_storable(text)):
        raise ValueError("NUL")
    return str(text)


def _looks_verbatim(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {_VERBATIM}


def _dump(value: Any, *, spaced: bool) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(", ", ": ") if spaced else (",", ":"))


def _decode_integer(each: Field, value: Any) -> int:
    if type(value) is not int or not -(1 << each.bits - 1) <= value < 1 << each.bits - 1:
        raise ValueError(each.name)
    return value


def _decode_uuid(each: Field, value: Any) -> UUID:
    found = UUID(_a(str, value)) if each.prefix is None else decode_id(each.prefix, _a(str, value))
    if found is None:
        raise ValueError(each.name)
    return found


def _decode_bytes(_each: Field, value: Any) -> bytes:
    try:
        return base64.b64decode(_a(str, value), validate=True)
    except binascii.Error as error:
        raise ValueError("base64") from error


def _decode_instant(_each: Field, value: Any) -> datetime:
    moment = datetime.fromisoformat(_a(str, value))
    if moment.tzinfo is None:
        raise ValueError("a time without an offset")
    return moment


def _decode_money(_each: Field, value: Any) -> Decimal:
    try:
        amount = Decimal(_a(str, value))
    except InvalidOperation as error:
        raise ValueError("money") from error
    if not amount.is_finite():
        raise ValueError("money")
    return amount


def _decode_text(_each: Field, value: Any) -> str:
    return _storable(value)


def _decode_texts(_each: Field, value: Any) -> list[str]:
    return [_storable(item) for item in _a(list, value)]


def _storable(value: Any) -> str:
    text: str = _a(str, value)
    if _UNSTORABLE.search(text):
        raise ValueError("text that Postgres cannot store")
    return text


def _a(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(kind.__name__)
    return value


_READERS: Final[Mapping[FieldKind, Callable[[Field, Any], Any]]] = {
    FieldKind.INTEGER: _decode_integer,
    FieldKind.TEXT: _decode_text,
    FieldKind.TEXTS: _decode_texts,
    FieldKind.BYTES: _decode_bytes,
    FieldKind.UUID: _decode_uuid,
    FieldKind.INSTANT: _decode_instant,
    FieldKind.MONEY: _decode_money,
    FieldKind.JSON: _decode_document,
    FieldKind.JSONB: _decode_document,
}
