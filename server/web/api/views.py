"""Views of blocks, turns and conversations, and the base class of all views.

Clients do not see signatures. Blocks of a type that this release does not know are shown without the members in which
providers send signatures and encrypted data.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Final, Generic, Literal, Self, TypeAlias, TypeVar, assert_never

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
from server.conversation.conversation import ConversationState
from server.conversation.epoch import EpochReason
from server.conversation.errors import StrataError, every_error
from server.conversation.store import EpochOutline
from server.conversation.turn import STOP_DETAILS, ModelResponseTurn, StopReason, ToolResponseTurn, Turn, TurnState
from server.web.errors import source_of

CONVERSATION_ID: Final = "conv_01jd0z8s3bf6h9kq2m4n6p8r0t"
ASSISTANT_ID: Final = "asst_01jd0z8s3bf6h9kq2m4n6p8r0t"
EXAMPLE_TIME: Final = "2026-01-31T09:30:00Z"
_CALL_EXAMPLE: Final[dict[str, Any]] = {"id": "call_1f0c", "name": "get_weather", "arguments": {"city": "Oslo"}}
_ANSWER_EXAMPLE: Final[dict[str, Any]] = {
    "turn": {
        "seq": 2,
        "kind": "model_response",
        "state": "complete",
        "stop_reason": "tool_use",
        "stop_details": None,
        "blocks": [
            {"type": "thinking", "text": "I have to look it up.", "redacted": False},
            {"type": "tool_call", **_CALL_EXAMPLE},
        ],
        "error": None,
        "usage": {
            "fresh_input_tokens": 120,
            "cache_read_tokens": 4096,
            "cache_write_tokens": 0,
            "output_tokens": 42,
            "reasoning_tokens": 16,
        },
        "cost_usd": 0.00123,
        "provider": "gemini",
        "model": "gemini-3.1-pro-preview",
        "created_at": EXAMPLE_TIME,
    },
    "conversation": {
        "id": CONVERSATION_ID,
        "revision": 2,
        "state": "awaiting_tools",
        "pending_tool_calls": [_CALL_EXAMPLE],
    },
}
_BY_CODE: Final[Mapping[str, type[StrataError]]] = {kind.code: kind for kind in every_error()}

_SEALED: Final = frozenset({"signature", "thoughtsignature", "data", "encryptedcontent"})
"""Members of unknown blocks that are not shown, in lower case and without underscores."""

Item = TypeVar("Item")


class View(BaseModel):
    """A part of an answer.

    `of` reads the members from the attributes of a value of the domain, and nested views from the values that it
    contains. `validation_alias` names the attribute if its name differs from the member's.
    """

    model_config = ConfigDict(frozen=True, from_attributes=True, populate_by_name=True)

    @classmethod
    def of(cls, value: Any, /) -> Self:
        return cls.model_validate(value)


class PageView(View, Generic[Item]):
    """A page of a list."""

    data: list[Item] = Field(validation_alias="items")
    next_cursor: str | None = Field(description="Null on the last page.", examples=[None])


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
    redacted: bool = Field(default=False, description="The provider encrypted it; the text is empty.")


class ToolCallView(View):
    """A tool call of the model. Run the tool and send its result with the id."""

    id: str = Field(examples=["call_1f0c"])
    name: str = Field(examples=["get_weather"])
    arguments: dict[str, Any] = Field(examples=[{"city": "Oslo"}])


class ToolCallBlockView(ToolCallView):
    """A tool call of the model. Run the tool and send its result with the id."""

    type: Literal["tool_call"] = "tool_call"


class ToolResultBlockView(View):
    """The result of one tool call."""

    type: Literal["tool_result"] = "tool_result"
    tool_call_id: str = Field(examples=["call_1f0c"])
    output: Any = Field(examples=[{"celsius": 4}])
    is_error: bool = False


class UnknownBlockView(View):
    """A block of a type that this release does not know, without signatures and encrypted data."""

    type: Literal["unknown"] = "unknown"
    data: dict[str, Any] = Field(examples=[{"type": "server_tool_use", "name": "web_search"}])


BlockView: TypeAlias = Annotated[
    TextBlockView | ImageBlockView | ThinkingBlockView | ToolCallBlockView | ToolResultBlockView | UnknownBlockView,
    Field(discriminator="type"),
]


def view_blocks(blocks: tuple[Block, ...]) -> list[BlockView]:
    """Build the views of blocks, in order. An empty text block, which only carries a signature, is left out."""
    return [
        _view_block(block)
        for block in blocks
        if not (isinstance(block, TextBlock) and not block.text and block.signature is not None)
    ]


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
            return UnknownBlockView(data=_remove_sealed(block.data))
        case _:
            assert_never(block)


def _remove_sealed(value: JsonValue) -> JsonValue:
    match value:
        case Mapping():
            return {
                name: _remove_sealed(inner)
                for name, inner in value.items()
                if name.lower().replace("_", "") not in _SEALED
            }
        case list() | tuple():
            return [_remove_sealed(inner) for inner in value]
        case _:
            return value


def find_error(code: str) -> type[StrataError] | None:
    """Return the class of a stored error code; None for a code of another release."""
    return _BY_CODE.get(code)


class UsageView(View):
    """Token counts. Each token is counted in exactly one member."""

    fresh_input_tokens: int = Field(examples=[120])
    cache_read_tokens: int = Field(examples=[4096])
    cache_write_tokens: int = Field(examples=[0])
    output_tokens: int = Field(examples=[42])
    reasoning_tokens: int = Field(examples=[16])


class TurnErrorView(View):
    """Why a turn failed or was interrupted."""

    code: str = Field(description="The error code, as in problems.", examples=["provider_overloaded"])
    message: str = Field(examples=["The provider is overloaded."])
    hint: str | None = Field(examples=["Try again in a moment."])
    source: Literal["provider", "strata"] = Field(description="Where the error occurred.", examples=["provider"])
    provider_message: str | None = Field(
        description="The provider's own message, if there is one.", examples=["Overloaded"]
    )
    provider_status: str | int | None = Field(
        description="The provider's own status or error type.", examples=["overloaded_error"]
    )
    retry_after_seconds: float | None = Field(description="The wait that the provider requests.", examples=[None])

    @classmethod
    def of(cls, code: str, ending: Mapping[str, Any] | None = None) -> Self:
        kind, ending = find_error(code), ending or {}
        return cls(
            code=code,
            message="The turn failed with an error code that this release does not know."
            if kind is None
            else kind().message,
            hint=None if kind is None else kind.hint or None,
            source=source_of(kind),
            provider_message=ending.get("provider_message"),
            provider_status=ending.get("provider_status"),
            retry_after_seconds=ending.get("retry_after_seconds"),
        )


class InputTurnView(View):
    """Input of a client: a user task, or results of tools."""

    seq: int = Field(description="Position in the conversation. Input has odd numbers.", examples=[1])
    kind: Literal["user_task", "tool_response"] = Field(examples=["user_task"])
    state: Literal["complete"] = "complete"
    blocks: list[BlockView]
    created_at: datetime = Field(examples=[EXAMPLE_TIME])


class ModelTurnView(View):
    """The answer of the model, or the part of it that arrived."""

    seq: int = Field(description="One more than that of the input.", examples=[2])
    kind: Literal["model_response"] = "model_response"
    state: TurnState = Field(examples=["complete"])
    stop_reason: StopReason | None = Field(examples=["end_turn"])
    stop_details: dict[str, Any] | None = Field(
        description="The provider's own details of the stop, beyond its reason: the category of a refusal, the stop "
        "sequence, a message.",
        examples=[None],
    )
    blocks: list[BlockView]
    error: TurnErrorView | None = Field(description="Null unless the turn failed or was interrupted.", examples=[None])
    usage: UsageView
    cost_usd: float | None = Field(description="Null if a price is not known.", examples=[0.00123])
    provider: str = Field(examples=["gemini"])
    model: str = Field(examples=["gemini-3.1-pro-preview"])
    created_at: datetime = Field(examples=[EXAMPLE_TIME])

    @classmethod
    def of(cls, turn: ModelResponseTurn) -> Self:
        code = "turn_interrupted" if turn.state is TurnState.INTERRUPTED else turn.error_code
        return cls(
            seq=turn.seq,
            state=turn.state,
            stop_reason=turn.stop_reason,
            stop_details=turn.ending.get(STOP_DETAILS),
            blocks=view_blocks(turn.blocks),
            error=None if code is None else TurnErrorView.of(code, turn.ending),
            usage=UsageView.of(turn.usage),
            cost_usd=None if turn.cost_usd is None else float(turn.cost_usd),
            provider=turn.provider,
            model=turn.model,
            created_at=turn.created_at,
        )


class RunningTurnView(View):
    """A running answer."""

    seq: int = Field(examples=[2])
    kind: Literal["model_response"] = "model_response"
    state: Literal["running"] = "running"


TurnView: TypeAlias = InputTurnView | ModelTurnView


class StatusView(View):
    """The part of a conversation that a client needs to continue it."""

    id: str = Field(examples=[CONVERSATION_ID])
    revision: int = Field(description="Increases with every change.", examples=[2])
    state: ConversationState = Field(examples=["idle"])
    pending_tool_calls: list[ToolCallView] = Field(
        validation_alias="pending_calls", description="Tool calls that wait for results.", examples=[[]]
    )


class OriginView(View):
    """The origin of a fork."""

    conversation_id: str = Field(examples=[CONVERSATION_ID])
    seq: int = Field(description="The last turn that both conversations share.", examples=[4])


class ConversationView(StatusView):
    """A conversation without its turns."""

    assistant_id: str = Field(examples=[ASSISTANT_ID])
    assistant_version: int = Field(examples=[1])
    identifier: str | None = Field(description="Your own name for the conversation.", examples=["ticket-4711"])
    source: str | None = Field(examples=["web"])
    direction: str | None = Field(examples=["inbound"])
    mode: str | None = Field(examples=["voice"])
    args: dict[str, Any] = Field(description="Prompt arguments.", examples=[{"city": "Oslo"}])
    context: dict[str, Any] = Field(description="Content of the dynamic layer.", examples=[{"todos": ["pack"]}])
    metadata: dict[str, Any] = Field(description="Your own data; never sent to a model.", examples=[{"team": "north"}])
    forked_from: OriginView | None = Field(examples=[None])
    created_at: datetime = Field(examples=[EXAMPLE_TIME])
    updated_at: datetime = Field(examples=[EXAMPLE_TIME])


class CompactionView(View):
    """A change of the compacted history, which began an epoch."""

    epoch: int = Field(examples=[2])
    reason: EpochReason = Field(examples=["compacted"])
    generation: int = Field(description="Within a generation segments are only added.", examples=[0])
    segment_count: int = Field(description="Number of segments since then.", examples=[1])
    buffer_start_seq: int = Field(description="The first turn that is sent as a message.", examples=[13])
    first_seq: int | None = Field(description="First turn of the newest segment.", examples=[1])
    last_seq: int | None = Field(description="Last turn of the newest segment.", examples=[12])
    segment_tokens: int | None = Field(description="Estimated size of the newest segment.", examples=[1300])
    created_at: datetime = Field(examples=[EXAMPLE_TIME])

    @classmethod
    def of(cls, outline: EpochOutline) -> Self:
        newest = outline.last_segment
        return cls(
            epoch=outline.number,
            reason=outline.reason,
            generation=outline.generation,
            segment_count=outline.segment_count,
            buffer_start_seq=outline.buffer_start_seq,
            first_seq=None if newest is None else newest.first_seq,
            last_seq=None if newest is None else newest.last_seq,
            segment_tokens=None if newest is None else newest.token_count,
            created_at=outline.created_at,
        )


class TurnAnswer(View):
    """An ended turn and the state of its conversation."""

    model_config = ConfigDict(json_schema_extra={"examples": [_ANSWER_EXAMPLE]})

    turn: ModelTurnView
    conversation: StatusView


class RunningAnswer(View):
    """A running turn. Follow its events, or load it again later."""

    turn: RunningTurnView
    conversation: StatusView


def view_turn(turn: Turn) -> TurnView:
    """Build the view of a turn."""
    if isinstance(turn, ModelResponseTurn):
        return ModelTurnView.of(turn)
    return InputTurnView(
        seq=turn.seq,
        kind="tool_response" if isinstance(turn, ToolResponseTurn) else "user_task",
        blocks=view_blocks(turn.blocks),
        created_at=turn.created_at,
    )
