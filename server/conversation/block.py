"""Blocks: the pieces that a turn is made of.

Blocks are for reading: the API, the search and the inspector show them. What goes back to a provider is the turn's
`native` bytes, in which every unknown field and every signature is still in its place. A signature is therefore not
repeated here; a block only says that there was one, and which.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, assert_never

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


def encode_blocks(blocks: Iterable[Block]) -> bytes:
    """One JSON array in UTF-8, lone surrogates passed through."""
    array = [block_to_json(block) for block in blocks]
    text = json.dumps(array, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass")


def decode_blocks(data: bytes) -> tuple[Block, ...]:
    """The inverse of `encode_blocks`."""
    return tuple(block_from_json(item) for item in json.loads(data.decode("utf-8", "surrogatepass")))


def block_to_json(block: Block) -> dict[str, JsonValue]:
    """A block with its `type`; what has its default value is left out."""
    match block:
        case TextBlock():
            fields: dict[str, JsonValue] = {"type": "text", "text": block.text}
        case ImageBlock():
            return {
                "type": "image",
                "media_type": block.media_type,
                "sha256": block.sha256,
                "size_bytes": block.size_bytes,
            }
        case ThinkingBlock():
            fields = {"type": "thinking", "text": block.text}
            if block.redacted:
                fields["redacted"] = True
        case ToolCallBlock():
            fields = {"type": "tool_call", "id": block.id, "name": block.name, "arguments": block.arguments}
            fields |= {"is_id_ours": True} if block.is_id_ours else {}
            fields |= {} if block.toolset_name is None else {"toolset_name": block.toolset_name}
        case ToolResultBlock():
            fields = {"type": "tool_result", "tool_call_id": block.tool_call_id, "output": block.output}
            if block.is_error:
                fields["is_error"] = True
            return fields
        case UnknownBlock():
            return {"type": "unknown", "data": block.data}
        case _:
            assert_never(block)
    if block.signature is not None:
        fields["signature"] = {"length": block.signature.length, "fingerprint": block.signature.fingerprint}
    return fields


def block_from_json(item: Mapping[str, Any]) -> Block:
    """The inverse of `block_to_json`. A type that is not known becomes an `UnknownBlock` with all of its fields."""
    match item.get("type"):
        case "text":
            return TextBlock(text=item["text"], signature=_mark(item))
        case "image":
            return ImageBlock(media_type=item["media_type"], sha256=item["sha256"], size_bytes=item["size_bytes"])
        case "thinking":
            return ThinkingBlock(text=item["text"], redacted=item.get("redacted", False), signature=_mark(item))
        case "tool_call":
            return ToolCallBlock(
                id=item["id"],
                name=item["name"],
                arguments=item["arguments"],
                signature=_mark(item),
                is_id_ours=item.get("is_id_ours", False),
                toolset_name=item.get("toolset_name"),
            )
        case "tool_result":
            return ToolResultBlock(
                tool_call_id=item["tool_call_id"], output=item["output"], is_error=item.get("is_error", False)
            )
        case "unknown":
            return UnknownBlock(data=item["data"])
        case _:
            return UnknownBlock(data=dict(item))


def _mark(item: Mapping[str, Any]) -> SignatureMark | None:
    mark = item.get("signature")
    return None if mark is None else SignatureMark(length=mark["length"], fingerprint=mark["fingerprint"])
