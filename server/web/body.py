"""What bodies have in common: that they are strict, and limits as marks on their fields.

pydantic's own limit on strings refuses halves of surrogate pairs. These let them through: what a user typed is kept.
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
DEEPEST: Final = 50
LARGEST_BIGINT: Final = 2**63 - 1
LARGEST_INTEGER: Final = 2**31 - 1


class Body(BaseModel):
    """Something that is sent. Unknown members are refused: a misspelt one would silently have no effect."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


@dataclass(frozen=True, slots=True)
class TextLimit:
    """A text of so many characters at most."""

    longest: int
    blank: bool = True
    """Whether it may be empty, or nothing but white space."""

    def check(self, text: str) -> str:
        """Raises `ValueError`."""
        if len(text) > self.longest:
            message = f"String should have at most {self.longest} characters"
            raise ValueError(message)
        if not self.blank and not text.strip():
            message = "String should not be blank"
            raise ValueError(message)
        return text

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return AfterValidator(self.check).__get_pydantic_core_schema__(source, handler)

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        limits = {"maxLength": self.longest} if self.blank else {"maxLength": self.longest, "pattern": r"\S"}
        return {**handler(schema), **limits}


@dataclass(frozen=True, slots=True)
class JsonLimit:
    """A JSON value of so many bytes at most, written without white space, and no deeper than `DEEPEST`."""

    largest_bytes: int

    def check(self, value: Any) -> Any:
        """Raises `ValueError`."""
        if is_deeper(value, DEEPEST):
            message = f"Value should be nested at most {DEEPEST} levels deep"
            raise ValueError(message)
        if len(encode_json(value)) > self.largest_bytes:
            message = f"Value should have at most {self.largest_bytes} bytes of JSON"
            raise ValueError(message)
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return AfterValidator(self.check).__get_pydantic_core_schema__(source, handler)


def one_of(kind: type[StrEnum]) -> BeforeValidator:
    """The mark of a member that is one of these words. Strictness alone would refuse them all: JSON has only texts."""

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
"""A time as JSON writes it."""
JsonObject: TypeAlias = Annotated[dict[str, Any], JsonLimit(256 * KIBIBYTE)]
"""Variables, arguments, metadata, settings, the schema of a tool's parameters."""
CONTEXT_LIMIT: Final = JsonLimit(4096 * KIBIBYTE)
ContextObject: TypeAlias = Annotated[dict[str, Any], CONTEXT_LIMIT]
ToolOutput: TypeAlias = Annotated[Any, JsonLimit(4096 * KIBIBYTE)]


def is_deeper(value: object, levels: int) -> bool:
    """Whether objects and arrays are nested more than so many levels deep. Does not recurse."""
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
