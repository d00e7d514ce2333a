"""Blocks: the pieces of a turn, and their JSON encoding.

Blocks are for reading: the API, the search and the inspector use them. A turn is sent back to its provider as its
`native` bytes, which contain every unknown field and every signature. So a block only records that a signature exists,
and its fingerprint.

Turns are stored, exported and imported with their blocks as JSON. `decode_blocks(encode_blocks(blocks)) == blocks`
holds for every block whose values are JSON, including NUL bytes and lone surrogates in texts.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, assert_never

JsonValue: TypeAlias = Any
"""Any result of `json.loads`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignatureMark:
    """The presence of a signature, without the signature itself."""

    length: int
    fingerprint: str
    """The first 16 hex digits of the SHA-256 of the signature's bytes, enough to distinguish two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextBlock:
    """Text of the user or the model. May be empty if it carries a signature."""

    text: str
    signature: SignatureMark | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageBlock:
    """An image, referenced by the hash of its bytes; the bytes are a blob."""

    media_type: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingBlock:
    """The model's reasoning as the provider returns it. `redacted`: it was encrypted, and the text is empty."""

    text: str
    redacted: bool = False
    signature: SignatureMark | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallBlock:
    """A tool call of the model. The id is the provider's, or one created by Strata if the provider gave none."""

    id: str
    name: str
    arguments: Mapping[str, JsonValue]
    signature: SignatureMark | None = None
    is_id_ours: bool = False
    """The provider gave no id: the call and its result are sent back without one."""
    toolset_name: str | None = None
    """The provider's toolset of the tool; the result is sent back with the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResultBlock:
    """The result of one tool call."""

    tool_call_id: str
    output: JsonValue
    is_error: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownBlock:
    """A block of a kind that this release does not support, unchanged."""

    data: Mapping[str, JsonValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """Bytes that a block references by hash."""

    sha256: bytes
    media_type: str
    data: bytes


Block: TypeAlias = TextBlock | ImageBlock | ThinkingBlock | ToolCallBlock | ToolResultBlock | UnknownBlock


def encode_blocks(blocks: Iterable[Block]) -> bytes:
    """Encode blocks as one JSON array in UTF-8. Lone surrogates are passed through."""
    array = [block_to_json(block) for block in blocks]
    text = json.dumps(array, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass")


def decode_blocks(data: bytes) -> tuple[Block, ...]:
    """The inverse of `encode_blocks`."""
    return tuple(block_from_json(item) for item in json.loads(data.decode("utf-8", "surrogatepass")))


def block_to_json(block: Block) -> dict[str, JsonValue]:
    """Convert a block to JSON with its `type`. Members with default values are omitted."""
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
    """The inverse of `block_to_json`. An unknown type becomes an `UnknownBlock` with all of its members."""
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
