"""What clients see of blocks.

Signatures are not among it: a block says what was said, and what the provider signed stays here. Of blocks that this
release does not know everything is shown but the members in which providers carry signatures and sealed data.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self, TypeAlias, assert_never

from pydantic import BaseModel, ConfigDict, Field

from server.conversation.block import (
    Block,
    ImageBlock,
    JsonValue,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    ToolResultBlock,
    UnknownBlock,
)

_SEALED: Final = frozenset({"signature", "thoughtsignature", "data", "encryptedcontent"})
"""Members of unknown blocks that are not shown, in lower case and without underscores."""


class View(BaseModel):
    """Something that is answered."""

    model_config = ConfigDict(frozen=True)


class TextBlockView(View):
    """Text of the user or the model."""

    type: Literal["text"] = "text"
    text: str = Field(examples=["It rains in Oslo."])


class ImageBlockView(View):
    """An image. Its bytes are at `/v1/conversations/{conversation_id}/images/{sha256}`."""

    type: Literal["image"] = "image"
    media_type: str = Field(examples=["image/png"])
    sha256: str = Field(examples=["9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"])
    size_bytes: int = Field(examples=[10240])


class ThinkingBlockView(View):
    """The model's reasoning, as far as the provider shows it."""

    type: Literal["thinking"] = "thinking"
    text: str = Field(examples=["The user asks about the weather."])
    redacted: bool = Field(default=False, description="It came encrypted; the text is empty.")


class ToolCallView(View):
    """The model asks for a tool. Run it and send its result under the id."""

    id: str = Field(examples=["call_1f0c"])
    name: str = Field(examples=["get_weather"])
    arguments: dict[str, Any] = Field(examples=[{"city": "Oslo"}])

    @classmethod
    def of(cls, block: ToolCallBlock) -> Self:
        """The view of a call."""
        return cls(id=block.id, name=block.name, arguments=dict(block.arguments))


class ToolCallBlockView(ToolCallView):
    """The model asks for a tool. Run it and send its result under the id."""

    type: Literal["tool_call"] = "tool_call"


class ToolResultBlockView(View):
    """What a tool gave for one call."""

    type: Literal["tool_result"] = "tool_result"
    tool_call_id: str = Field(examples=["call_1f0c"])
    output: Any = Field(examples=[{"celsius": 4}])
    is_error: bool = False


class UnknownBlockView(View):
    """A block of a kind that this release does not know, without signatures and sealed data."""

    type: Literal["unknown"] = "unknown"
    data: dict[str, Any] = Field(examples=[{"type": "server_tool_use", "name": "web_search"}])


BlockView: TypeAlias = Annotated[
    TextBlockView | ImageBlockView | ThinkingBlockView | ToolCallBlockView | ToolResultBlockView | UnknownBlockView,
    Field(discriminator="type"),
]


def view_blocks(blocks: tuple[Block, ...]) -> list[BlockView]:
    """The views of blocks, in their order. An empty text that is only there for its signature has nothing to show."""
    return [_view_block(block) for block in blocks if not _only_signed(block)]


def _only_signed(block: Block) -> bool:
    return isinstance(block, TextBlock) and not block.text and block.signature is not None


def _view_block(block: Block) -> BlockView:
    match block:
        case TextBlock():
            return TextBlockView(text=block.text)
        case ImageBlock():
            return ImageBlockView(media_type=block.media_type, sha256=block.sha256, size_bytes=block.size_bytes)
        case ThinkingBlock():
            return ThinkingBlockView(text=block.text, redacted=block.redacted)
        case ToolCallBlock():
            return ToolCallBlockView(id=block.id, name=block.name, arguments=dict(block.arguments))
        case ToolResultBlock():
            return ToolResultBlockView(tool_call_id=block.tool_call_id, output=block.output, is_error=block.is_error)
        case UnknownBlock():
            return UnknownBlockView(data=_unsealed(block.data))
        case _:
            assert_never(block)


def _unsealed(value: JsonValue) -> JsonValue:
    match value:
        case Mapping():
            return {
                name: _unsealed(inner) for name, inner in value.items() if name.lower().replace("_", "") not in _SEALED
            }
        case list() | tuple():
            return [_unsealed(inner) for inner in value]
        case _:
            return value
