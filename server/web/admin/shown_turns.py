"""Turns as a page shows them: every block with as much of its content as there is room for."""

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
from server.conversation.errors import StrataError
from server.conversation.image import IMAGE_TYPES
from server.conversation.turn import ModelResponseTurn, ToolResponseTurn, UserTaskTurn, describe_ending
from server.inspection.signature_report import SignatureState, report_received
from server.inspection.timeline import ToldTurn
from server.providers.choice import ANTHROPIC, GEMINI
from server.providers.model_profile import find_profile
from server.web.admin.pieces import Allowance, Piece
from server.web.api.views import find_error

BLOCKS_SHOWN: Final = 60
"""Of one turn. The others are in its JSON."""
_PROFILED: Final = frozenset({GEMINI, ANTHROPIC})
"""A provider that this release does not know has no profiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownBlock:
    """One block."""

    place: int
    kind: str
    """Which part of the template shows it."""
    piece: Piece | None = None
    name: str = ""
    """Of a tool, of a kind that is not known, of an image's type."""
    call_id: str = ""
    is_error: bool = False
    is_redacted: bool = False
    is_answered: bool = False
    """Of a call: the next turn has its result."""
    is_drawable: bool = False
    """Of an image: a browser can show it."""
    sha256: str = ""
    size_bytes: int = 0
    signature: SignatureMark | None = None
    is_signature_missing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTurn:
    """One turn."""

    told: ToldTurn
    role: str
    """Who speaks: user, model, tools."""
    blocks: Sequence[ShownBlock]
    hidden_count: int
    """Blocks that are not shown."""
    answer: ModelResponseTurn | None
    error: StrataError | None
    """What the error's code means; None also for a code of another release."""
    ending: str
    """What the provider said about the end, for people."""
    args: Piece | None
    conversation_args: Piece | None
    """Where a static text was rendered with them."""
    context: Piece | None
    """Where it is not what it was before."""


def show_turn(told: ToldTurn, allowance: Allowance) -> ShownTurn:
    """A turn with what fits of it."""
    turn = told.item.turn
    answer = turn if isinstance(turn, ModelResponseTurn) else None
    args = None if isinstance(turn, ModelResponseTurn) else turn.args
    missing = _find_missing(answer)
    return ShownTurn(
        told=told,
        role=_name_role(told),
        blocks=[
            _show_block(place, block, told, allowance, is_signature_missing=place in missing)
            for place, block in enumerate(turn.blocks[:BLOCKS_SHOWN])
            if not _is_empty(block)
        ],
        hidden_count=max(0, len(turn.blocks) - BLOCKS_SHOWN),
        answer=answer,
        error=_explain(answer),
        ending="" if answer is None else describe_ending(answer.ending),
        args=allowance.take_json(args) if args else None,
        conversation_args=allowance.take_json(dict(told.new_args)) if told.new_args is not None else None,
        context=allowance.take_json(told.context) if told.is_context_new else None,
    )


def content_of(block: Block) -> JsonValue:
    """What a block says: text, or a value."""
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


def _name_role(told: ToldTurn) -> str:
    match told.item.turn:
        case UserTaskTurn():
            return "user"
        case ModelResponseTurn():
            return "model"
        case ToolResponseTurn():
            return "tools"
        case _:
            assert_never(told.item.turn)


def _explain(answer: ModelResponseTurn | None) -> StrataError | None:
    kind = find_error(answer.error_code) if answer and answer.error_code else None
    return None if kind is None else kind()


def _is_empty(block: Block) -> bool:
    """Without anything to say, and without a signature that would have to be told."""
    return isinstance(block, TextBlock) and not block.text and block.signature is None


def _find_missing(answer: ModelResponseTurn | None) -> frozenset[int]:
    """The places of blocks that lack a signature where the model insists on one."""
    if answer is None or answer.provider not in _PROFILED:
        return frozenset()
    parts = report_received(answer.seq, answer.blocks, find_profile(answer.provider, answer.model))
    return frozenset(part.place for part in parts if part.state is SignatureState.MISSING)


def _show_block(
    place: int, block: Block, told: ToldTurn, allowance: Allowance, *, is_signature_missing: bool
) -> ShownBlock:
    match block:
        case TextBlock():
            return ShownBlock(place=place, kind="text", piece=allowance.take(block.text), signature=block.signature)
        case ThinkingBlock():
            return ShownBlock(
                place=place,
                kind="thinking",
                piece=allowance.take(block.text),
                is_redacted=block.redacted,
                signature=block.signature,
            )
        case ToolCallBlock():
            return ShownBlock(
                place=place,
                kind="tool_call",
                piece=allowance.take_json(block.arguments),
                name=block.name,
                call_id=block.id,
                is_answered=block.id in told.answered_ids,
                signature=block.signature,
                is_signature_missing=is_signature_missing,
            )
        case ToolResultBlock():
            return ShownBlock(
                place=place,
                kind="tool_result",
                piece=allowance.take_json(block.output),
                name=told.called_tools.get(block.tool_call_id, ""),
                call_id=block.tool_call_id,
                is_error=block.is_error,
            )
        case ImageBlock():
            return ShownBlock(
                place=place,
                kind="image",
                name=block.media_type,
                is_drawable=block.media_type in IMAGE_TYPES,
                sha256=block.sha256,
                size_bytes=block.size_bytes,
            )
        case UnknownBlock():
            return ShownBlock(
                place=place, kind="unknown", piece=allowance.take_json(block.data), name=_name_unknown(block.data)
            )
        case _:
            assert_never(block)


def _name_unknown(data: Mapping[str, JsonValue]) -> str:
    """A provider says what it is in `type`, or by the name of its first member."""
    kind = data.get("type")
    return kind if isinstance(kind, str) else next(iter(data), "nothing")
