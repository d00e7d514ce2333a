"""Turns on the page of a conversation, within the size limit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, assert_never

from server.conversation.block import (
    Block,
    ImageBlock,
    JsonValue,
    SignatureMark,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    ToolResultBlock,
    UnknownBlock,
)
from server.conversation.image import IMAGE_TYPES
from server.inspection.excerpts import Excerpt, excerpt_value
from server.inspection.signatures import find_missing
from server.inspection.timeline import TimelineTurn
from server.web.admin.page_budget import PageBudget

PAGE_BYTES: Final = 240_000
"""Maximum size of all texts of a conversation's page."""
MIN_BYTES: Final = 160
"""Every text gets at least this, also after the budget is spent."""
EXCERPT_BYTES: Final = 6_000
MAX_BLOCKS: Final = 60
"""Blocks shown of one turn. The JSON has all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownBlock:
    """One block."""

    index: int
    kind: str
    """The part of the template that renders it."""
    excerpt: Excerpt | None = None
    name: str = ""
    """The name of a tool, the type of an image, or the type of an unknown block."""
    call_id: str = ""
    is_error: bool = False
    is_redacted: bool = False
    is_answered: bool = False
    """For a tool call: the next turn has its result."""
    is_drawable: bool = False
    """For an image: a browser can show it."""
    sha256: str = ""
    size_bytes: int = 0
    signature: SignatureMark | None = None
    is_signature_missing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTurn:
    """One turn with excerpts of its contents."""

    item: TimelineTurn
    blocks: Sequence[ShownBlock]
    hidden_count: int
    """Blocks that are not shown."""
    args: Excerpt | None
    conversation_args: Excerpt | None
    """Set if a static text was rendered with them for this turn."""
    context: Excerpt | None
    """Set if it changed."""


def show_turn(item: TimelineTurn, budget: PageBudget) -> ShownTurn:
    """Fit a turn into the budget."""
    missing = find_missing(item.answer) if item.answer else frozenset()
    blocks = item.turn.blocks
    return ShownTurn(
        item=item,
        blocks=[
            _show_block(index, block, item, budget, is_signature_missing=index in missing)
            for index, block in enumerate(blocks[:MAX_BLOCKS])
            if not _is_empty(block)
        ],
        hidden_count=max(0, len(blocks) - MAX_BLOCKS),
        args=_fit(item.args, budget) if item.args else None,
        conversation_args=None if item.conversation_args is None else _fit(dict(item.conversation_args), budget),
        context=_fit(item.context, budget) if item.is_context_changed else None,
    )


def content_of(block: Block) -> JsonValue:
    """Return the content of a block: a text or a value."""
    match block:
        case TextBlock() | ThinkingBlock():
            return block.text
        case ToolCallBlock():
            return block.arguments
        case ToolResultBlock():
            return block.output
        case UnknownBlock():
            return block.data
        case ImageBlock():
            return {"media_type": block.media_type, "sha256": block.sha256, "size_bytes": block.size_bytes}
        case _:
            assert_never(block)


def _fit(value: JsonValue, budget: PageBudget) -> Excerpt:
    return budget.fit(excerpt_value(value, limit=EXCERPT_BYTES), EXCERPT_BYTES)


def _is_empty(block: Block) -> bool:
    """An empty text is left out, unless it has a signature."""
    return isinstance(block, TextBlock) and not block.text and block.signature is None


def _show_block(
    index: int, block: Block, item: TimelineTurn, budget: PageBudget, *, is_signature_missing: bool
) -> ShownBlock:
    excerpt = None if isinstance(block, ImageBlock) else _fit(content_of(block), budget)
    match block:
        case TextBlock():
            return ShownBlock(index=index, kind="text", excerpt=excerpt, signature=block.signature)
        case ThinkingBlock():
            return ShownBlock(
                index=index,
                kind="thinking",
                excerpt=excerpt,
                is_redacted=block.redacted,
                signature=block.signature,
            )
        case ToolCallBlock():
            return ShownBlock(
                index=index,
                kind="tool_call",
                excerpt=excerpt,
                name=block.name,
                call_id=block.id,
                is_answered=block.id in item.answered_call_ids,
                signature=block.signature,
                is_signature_missing=is_signature_missing,
            )
        case ToolResultBlock():
            return ShownBlock(
                index=index,
                kind="tool_result",
                excerpt=excerpt,
                name=item.tool_names.get(block.tool_call_id, ""),
                call_id=block.tool_call_id,
                is_error=block.is_error,
            )
        case ImageBlock():
            return ShownBlock(
                index=index,
                kind="image",
                name=block.media_type,
                is_drawable=block.media_type in IMAGE_TYPES,
                sha256=block.sha256,
                size_bytes=block.size_bytes,
            )
        case UnknownBlock():
            return ShownBlock(index=index, kind="unknown", excerpt=excerpt, name=_name_unknown(block.data))
        case _:
            assert_never(block)


def _name_unknown(data: Mapping[str, JsonValue]) -> str:
    """A provider names the type in `type`, or by the name of the first member."""
    kind = data.get("type")
    return kind if isinstance(kind, str) else next(iter(data), "nothing")
