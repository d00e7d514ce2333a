"""Turns: what was said, by whom, in a total order.

A turn is written once and never changed. Its place is its `seq`: 1 for the first, no gaps, assigned in the transaction
that writes it. Input (a user task or tool responses) has odd numbers, the model's answer to it the even number after,
so the number of an answer is known before it exists and can be listened to.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any, Final, TypeAlias

from server.conversation.block import Block, JsonValue, ToolCallBlock
from server.conversation.errors import ProviderFailed, StrataError
from server.conversation.usage import Usage

STRATA_DIALECT: Final = "strata"
"""The dialect of input turns: our own JSON of their blocks. A provider's form of them is built when it is sent, since
the same turn may go to more than one provider."""


class TurnKind(StrEnum):
    """Which of the three a turn is."""

    USER_TASK = "user_task"
    MODEL_RESPONSE = "model_response"
    TOOL_RESPONSE = "tool_response"


class TurnState(StrEnum):
    """How a turn ended. Input turns are always complete."""

    COMPLETE = "complete"
    INTERRUPTED = "interrupted"
    """The process that ran it died; what had arrived is kept."""
    CANCELLED = "cancelled"
    """Somebody asked for it to stop; what had arrived is kept."""
    FAILED = "failed"
    """The provider or the network failed; `error_code` says how, what had arrived is kept."""


class StopReason(StrEnum):
    """Why the model stopped."""

    END_TURN = "end_turn"
    LENGTH = "length"
    TOOL_USE = "tool_use"
    """Whenever a tool call is present, whatever the provider called it."""
    REFUSAL = "refusal"
    PAUSED = "paused"
    ERROR = "error"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Native:
    """A turn as a provider speaks it."""

    dialect: str
    """`strata` for input, else the provider's name."""
    data: bytes
    """UTF-8 JSON. For a model's turn: its message object, assembled from the wire, byte for byte what is sent back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserTaskTurn:
    """Something new from the user."""

    seq: int
    created_at: datetime
    blocks: tuple[Block, ...]
    language: str | None = None
    args: Mapping[str, JsonValue] | None = None
    """Prompt arguments that came with this turn and hold for it alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResponseTurn:
    """The results of all calls of the model turn before it."""

    seq: int
    created_at: datetime
    blocks: tuple[Block, ...]
    args: Mapping[str, JsonValue] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelResponseTurn:
    """The model's answer, or as much of it as came."""

    seq: int
    created_at: datetime
    blocks: tuple[Block, ...]
    state: TurnState
    stop_reason: StopReason | None
    error_code: str | None
    provider: str
    model: str
    usage: Usage
    cost_usd: Decimal | None
    """None where a price is not known; never a guess."""
    attempt: int | None
    """Which call of this turn gave it; None where it ended before any."""
    revision: int | None
    """The conversation's when this turn ended; None in a fork's turns that ended elsewhere, and in turns from before it
    was kept."""
    ending: Mapping[str, JsonValue] = field(default_factory=dict)
    """What the provider said about the end, see `server.conversation.turn`."""


Turn: TypeAlias = UserTaskTurn | ToolResponseTurn | ModelResponseTurn


def open_call_ids(blocks: tuple[Block, ...]) -> tuple[str, ...]:
    """The ids of the tool calls among the blocks, in order."""
    return tuple(block.id for block in blocks if isinstance(block, ToolCallBlock))


FAILURE_MEMBERS: Final = ("provider_message", "provider_status", "provider_code", "retry_after_seconds")
STOP_DETAILS: Final = "stop_details"
_ORDINARY: Final = frozenset({StopReason.END_TURN, StopReason.TOOL_USE})
_TOLD_ALWAYS: Final = frozenset({"reason", "safetyRatings"})
"""What providers say about ordinary stops too."""


def describe_failure(error: StrataError) -> dict[str, JsonValue]:
    """What the provider said about a failure; empty for one that is not the provider's."""
    if not isinstance(error, ProviderFailed):
        return {}
    return {name: value for name in FAILURE_MEMBERS if (value := error.details.get(name)) is not None}


def describe_stop(
    stop_reason: StopReason | None, details: Mapping[str, JsonValue] | None
) -> dict[str, dict[str, JsonValue]]:
    """What the provider said about a stop beyond its reason; empty for an ordinary one."""
    told = dict(details or {})
    if stop_reason in _ORDINARY:
        told = {name: value for name, value in told.items() if name != "safetyRatings"}
    return {STOP_DETAILS: told} if set(told) - _TOLD_ALWAYS or (told and stop_reason not in _ORDINARY) else {}


def describe_ending(ending: Mapping[str, Any]) -> str:
    """The same as one or two sentences for people; empty if there is nothing to say."""
    sentences = []
    if message := ending.get("provider_message"):
        sentences.append(f"The provider said: {message}")
    if (delay := ending.get("retry_after_seconds")) is not None:
        sentences.append(f"It asks to wait {delay:g} s.")
    details = ending.get(STOP_DETAILS) or {}
    for name, label in _STOP_LABELS.items():
        if isinstance(value := details.get(name), str) and value:
            sentences.append(f"{label}: {value}")
    return " ".join(sentences)


_STOP_LABELS: Final[Mapping[str, str]] = {
    "category": "Category",
    "explanation": "Explanation",
    "stop_sequence": "Stop sequence",
    "blockReason": "Block reason",
    "blockReasonMessage": "Message",
    "finishMessage": "Message",
}
