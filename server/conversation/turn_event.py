"""The events of a turn, as a client hears them.

In this order, numbered 1, 2, 3:

| event                    | when                                  |
|--------------------------|---------------------------------------|
| `TurnStarted`            | the input is durable                  |
| events of `server.conversation.event` | as the model writes                   |
| `TurnEnded`              | the answer is durable; the last one   |

The numbers are a function of the stored bytes: whoever reads a turn again, in any process and at any time, hears the
same events under the same numbers. That is why a retry happens only as long as no event of an answer was given out.
"""

from dataclasses import dataclass
from typing import TypeAlias

from server.conversation.block import ToolCallBlock
from server.conversation.conversation import ConversationState, ConversationStatus
from server.conversation.event import ProviderEvent
from server.conversation.turn import ModelResponseTurn, TurnState


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


def end_of(conversation_id: str, turn: ModelResponseTurn) -> TurnEnded:
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
