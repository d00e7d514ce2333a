"""Blocks: the pieces that a turn is made of.

Blocks are for reading: the API, the search and the inspector show them. What goes back to a provider is the turn's
`native` bytes, in which every unknown field and every signature is still in its place. A signature is therefore not
repeated here; a block only says that there was one, and which.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

JsonValue: TypeAlias = Any
"""What `json.loads` can give. Deeper than a type can usefully say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignatureMark:
    """That a part was signed, without the signature itself."""

    length: int
    fingerprint: str
    """The first 16 hex digits of the SHA-256 of the signature's bytes: enough to tell two apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextBlock:
    """Text of the user or the model. May be empty where a signature hangs on it."""

    text: str
    signature: SignatureMark | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageBlock:
    """An image, by the hash of its bytes; the bytes are a blob."""

    media_type: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingBlock:
    """The model's reasoning as far as the provider shows it. `redacted`: it came encrypted, the text is empty."""

    text: str
    redacted: bool = False
    signature: SignatureMark | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallBlock:
    """The model asks for a tool. The id is the provider's own or, where it gave none, one made here."""

    id: str
    name: str
    arguments: Mapping[str, JsonValue]
    signature: SignatureMark | None = None
    is_id_ours: bool = False
    """The provider gave no id: neither the call nor its result goes back with one."""
    toolset_name: str | None = None
    """The provider's toolset that the tool belongs to; the result goes back with the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResultBlock:
    """What a tool gave for one call."""

    tool_call_id: str
    output: JsonValue
    is_error: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownBlock:
    """A block of a kind that this release does not know, kept as it came."""

    data: Mapping[str, JsonValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """Bytes that a block refers to by hash."""

    sha256: bytes
    media_type: str
    data: bytes


Block: TypeAlias = TextBlock | ImageBlock | ThinkingBlock | ToolCallBlock | ToolResultBlock | UnknownBlock
