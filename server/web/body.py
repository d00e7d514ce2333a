"""The base class of request bodies, and limits for their fields.

The limits accept unpaired surrogates, which pydantic's own limits of strings refuse: text is kept as the user typed it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Final, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
)

from server.web.json_text import encode_json

KIBIBYTE: Final = 1024
MAX_DEPTH: Final = 50
MAX_BIGINT: Final = 2**63 - 1
MAX_INTEGER: Final = 2**31 - 1


class Body(BaseModel):
    """A request body. Unknown members are refused: a misspelt one would silently have no effect."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


@dataclass(frozen=True, slots=True)
class TextLimit:
    """A maximal number of characters."""

    max_chars: int
    blank: bool = True
    """Whether the text may be empty or only white space."""

    def check(self, text: str) -> str:
        """Raises `ValueError`."""
        if len(text) > self.max_chars:
            message = f"String should have at most {self.max_chars} characters"
            raise ValueError(message)
        if not self.blank and not text.strip():
            message = "String should not be blank"
            raise ValueError(message)
        return text

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return AfterValidator(self.check).__get_pydantic_core_schema__(source, handler)

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        limits = {"maxLength": self.max_chars} if self.blank else {"maxLength": self.max_chars, "pattern": r"\S"}
        return {**handler(schema), **limits}


@dataclass(frozen=True, slots=True)
class JsonLimit:
    """A maximal size of a JSON value, encoded without white space, and a maximal depth of `MAX_DEPTH`."""

    max_bytes: int

    def check(self, value: Any) -> Any:
        """Raises `ValueError`."""
        if is_deeper(value, MAX_DEPTH):
            message = f"Value should be nested at most {MAX_DEPTH} levels deep"
            raise ValueError(message)
        if len(encode_json(value)) > self.max_bytes:
            message = f"Value should have at most {self.max_bytes} bytes of JSON"
            raise ValueError(message)
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return AfterValidator(self.check).__get_pydantic_core_schema__(source, handler)


def one_of(kind: type[StrEnum]) -> BeforeValidator:
    """Validate a member of an enum. pydantic's strict mode would refuse the strings that JSON has for them."""

    def read(value: object) -> object:
        if not isinstance(value, str) or value in set(kind):
            return kind(value) if isinstance(value, str) else value
        message = f"Input should be one of: {', '.join(kind)}"
        raise ValueError(message)

    return BeforeValidator(read)


def _read_moment(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return datetime.fromisoformat(value)
    except ValueError:
        message = "Input should be a time such as 2026-01-31T09:30:00Z"
        raise ValueError(message) from None


Moment: TypeAlias = Annotated[datetime, BeforeValidator(_read_moment)]
"""A time in ISO 8601."""
JsonObject: TypeAlias = Annotated[dict[str, Any], JsonLimit(256 * KIBIBYTE)]
"""Variables, arguments, metadata, settings, the schema of a tool's parameters."""
CONTEXT_LIMIT: Final = JsonLimit(4096 * KIBIBYTE)
ContextObject: TypeAlias = Annotated[dict[str, Any], CONTEXT_LIMIT]
ToolOutput: TypeAlias = Annotated[Any, JsonLimit(4096 * KIBIBYTE)]


def is_deeper(value: object, levels: int) -> bool:
    """Return whether objects and arrays are nested deeper than `levels`. Does not recurse."""
    layer = [value]
    for _ in range(levels):
        layer = [
            inner
            for item in layer
            if isinstance(item, Mapping | list)
            for inner in (item.values() if isinstance(item, Mapping) else item)
        ]
        if not layer:
            return False
    return any(isinstance(item, Mapping | list) for item in layer)
