"""Events: what a stream means.

A provider's stream gives, in the order in which the model writes:

| event             | fields                       | when                                                             |
|-------------------|------------------------------|------------------------------------------------------------------|
| `ThinkingDelta`   | text                         | some reasoning                                                   |
| `TextDelta`       | text                         | some of the answer                                               |
| `ToolCallBegin`   | call_id, name                | a call begins                                                    |
| `ToolCallDelta`   | call_id, arguments_json      | some of its arguments, as JSON text; Gemini sends none           |
| `ToolCallEnd`     | call_id, name, arguments     | the call is whole                                                |
| `UsageReported`   | usage                        | the provider said what it took; the last one counts              |

Events are purely semantic. That a stream failed is no event: it is raised, and what had arrived is in the snapshot.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from server.conversation.block import JsonValue, ToolCallBlock
from server.conversation.conversation import ConversationState, ConversationStatus
from server.conversation.turn import ModelResponseTurn, TurnState
from server.conversation.usage import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingDelta:
    """Some reasoning."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """Some of the answer."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallBegin:
    """A call begins."""

    call_id: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """Some of a call's arguments, as JSON text."""

    call_id: str
    arguments_json: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallEnd:
    """A call is whole."""

    call_id: str
    name: str
    arguments: Mapping[str, JsonValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageReported:
    """What the provider says it took so far."""

    usage: Usage


ProviderEvent: TypeAlias = ThinkingDelta | TextDelta | ToolCallBegin | ToolCallDelta | ToolCallEnd | UsageReported


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnStarted:
    """The input is durable, and the answer will have this number."""

    conversation_id: str
    input_seq: int
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnded:
    """The answer is durable, whole or not: its state says which, its error code why."""

    turn: ModelResponseTurn
    conversation: ConversationStatus
    """As it was when the turn ended."""


TurnEvent: TypeAlias = TurnStarted | ProviderEvent | TurnEnded


def build_turn_ended(conversation_id: str, turn: ModelResponseTurn) -> TurnEnded:
    """The last event of a stored turn."""
    complete = turn.state is TurnState.COMPLETE
    calls = tuple(block for block in turn.blocks if isinstance(block, ToolCallBlock)) if complete else ()
    status = ConversationStatus(
        id=conversation_id,
        revision=turn.revision or 0,
        state=ConversationState.AWAITING_TOOLS if calls else ConversationState.IDLE,
        pending_calls=calls,
    )
    return TurnEnded(turn=turn, conversation=status)
