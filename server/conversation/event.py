"""Events: the content of a provider's stream, and the events of a turn as clients receive them.

A provider's stream yields, in the order in which the model writes:

| event             | fields                       | when                                                             |
|-------------------|------------------------------|------------------------------------------------------------------|
| `ThinkingDelta`   | text                         | a part of the reasoning                                          |
| `TextDelta`       | text                         | a part of the answer                                             |
| `ToolCallBegin`   | call_id, name                | a tool call begins                                               |
| `ToolCallDelta`   | call_id, arguments_json      | a part of its arguments, as JSON text; not on Gemini             |
| `ToolCallEnd`     | call_id, name, arguments     | the tool call is complete                                        |
| `UsageReported`   | usage                        | the provider reported usage; the last report counts              |

A failed stream is not an event: the error is raised, and the answer contains what was received.

A client receives `TurnStarted` when the input is durable, then the events above, and `TurnEnded` when the answer is
durable. They are numbered 1, 2, 3. The numbers are a function of the stored bytes: reading a turn again, in any process
and at any time, gives the same events with the same numbers. For that reason a call is retried only before the first
event of its answer.
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
    """A part of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """A part of the answer."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallBegin:
    """A tool call begins."""

    call_id: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """A part of a call's arguments, as JSON text."""

    call_id: str
    arguments_json: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallEnd:
    """A tool call is complete."""

    call_id: str
    name: str
    arguments: Mapping[str, JsonValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageReported:
    """The usage reported so far."""

    usage: Usage


ProviderEvent: TypeAlias = ThinkingDelta | TextDelta | ToolCallBegin | ToolCallDelta | ToolCallEnd | UsageReported


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnStarted:
    """The input is durable. The answer will have the number `seq`."""

    conversation_id: str
    input_seq: int
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnded:
    """The answer is durable, complete or not: see its state and error code."""

    turn: ModelResponseTurn
    conversation: ConversationStatus
    """Its status when the turn ended."""


TurnEvent: TypeAlias = TurnStarted | ProviderEvent | TurnEnded


def build_turn_ended(conversation_id: str, turn: ModelResponseTurn) -> TurnEnded:
    """Return the last event of a stored turn."""
    complete = turn.state is TurnState.COMPLETE
    calls = tuple(block for block in turn.blocks if isinstance(block, ToolCallBlock)) if complete else ()
    status = ConversationStatus(
        id=conversation_id,
        revision=turn.revision or 0,
        state=ConversationState.AWAITING_TOOLS if calls else ConversationState.IDLE,
        pending_calls=calls,
    )
    return TurnEnded(turn=turn, conversation=status)
