"""Views of conversations and turns."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, Literal, Self, TypeAlias

from pydantic import ConfigDict, Field

from server.conversation.conversation import Conversation, ConversationState, ConversationStatus
from server.conversation.errors import StrataError, every_error
from server.conversation.turn import STOP_DETAILS, ModelResponseTurn, StopReason, ToolResponseTurn, Turn, TurnState
from server.conversation.usage import Usage
from server.web.api.block_views import BlockView, ToolCallView, View, view_blocks
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

    @classmethod
    def of(cls, usage: Usage) -> Self:
        return cls(
            fresh_input_tokens=usage.fresh_input_tokens,
            cache_read_tokens=usage.cache_read_tokens,
            cache_write_tokens=usage.cache_write_tokens,
            output_tokens=usage.output_tokens,
            reasoning_tokens=usage.reasoning_tokens,
        )


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
    pending_tool_calls: list[ToolCallView] = Field(description="Tool calls that wait for results.", examples=[[]])

    @classmethod
    def of(cls, status: ConversationStatus) -> Self:
        return cls(
            id=status.id,
            revision=status.revision,
            state=status.state,
            pending_tool_calls=[ToolCallView.of(call) for call in status.pending_calls],
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

    @classmethod
    def showing(cls, conversation: Conversation) -> Self:
        origin = conversation.forked_from
        return cls(
            id=conversation.id,
            revision=conversation.revision,
            state=conversation.state,
            pending_tool_calls=[ToolCallView.of(call) for call in conversation.pending_calls],
            assistant_id=conversation.assistant_id,
            assistant_version=conversation.assistant_version,
            identifier=conversation.identifier,
            source=conversation.source,
            direction=conversation.direction,
            mode=conversation.mode,
            args=dict(conversation.args),
            context=dict(conversation.context),
            metadata=dict(conversation.metadata),
            forked_from=None if origin is None else OriginView(conversation_id=origin.conversation_id, seq=origin.seq),
            created_at=conversation.created_at,
            updated_at=conversation.updated_at,
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
