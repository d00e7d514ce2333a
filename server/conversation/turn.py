"""Turns: the messages of a conversation, in a total order.

A turn is written once and never changed. Its position is its `seq`: 1 for the first, without gaps, assigned in the
transaction that writes it. Input (a user task or tool responses) has odd numbers and the model's answer to it the
following even number, so the number of an answer is known before it exists.

A turn stores what its provider reported about its end in `ending`, which is passed on to clients and operators:

| member                | when                                                                                       |
|-----------------------|--------------------------------------------------------------------------------------------|
| `provider_message`    | the provider rejected the request or failed; limited in length, without secrets            |
| `provider_status`     | its own status                                                                             |
| `provider_code`       | its machine-readable code, if it gave one                                                  |
| `retry_after_seconds` | the delay that it asks for                                                                 |
| `stop_details`        | more than the stop reason is known: a category, a stop sequence, a text                    |
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
"""The dialect of input turns: Strata's JSON of their blocks. It is converted to a provider's format when it is sent,
because the same turn may be sent to several providers."""


class TurnKind(StrEnum):
    """The kind of a turn."""

    USER_TASK = "user_task"
    MODEL_RESPONSE = "model_response"
    TOOL_RESPONSE = "tool_response"


class TurnState(StrEnum):
    """How a turn ended. Input turns are always complete. Received output is kept in all states."""

    COMPLETE = "complete"
    INTERRUPTED = "interrupted"
    """The process that ran it stopped."""
    CANCELLED = "cancelled"
    """A client or an operator cancelled it."""
    FAILED = "failed"
    """The provider or the network failed; see `error_code`."""


class StopReason(StrEnum):
    """Why the model stopped."""

    END_TURN = "end_turn"
    LENGTH = "length"
    TOOL_USE = "tool_use"
    """Whenever there is a tool call, whatever the provider reports."""
    REFUSAL = "refusal"
    PAUSED = "paused"
    ERROR = "error"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Native:
    """A turn in a provider's format."""

    dialect: str
    """`strata` for input, otherwise the provider's name."""
    data: bytes
    """UTF-8 JSON. For a model turn: its message object, assembled from the stream, which is sent back unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserTaskTurn:
    """A message of the user."""

    seq: int
    created_at: datetime
    blocks: tuple[Block, ...]
    language: str | None = None
    args: Mapping[str, JsonValue] | None = None
    """Prompt arguments for this turn only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResponseTurn:
    """The results of all calls of the model turn before it."""

    seq: int
    created_at: datetime
    blocks: tuple[Block, ...]
    args: Mapping[str, JsonValue] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelResponseTurn:
    """The model's answer, or the part of it that was received."""

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
    """None if a price is unknown; never an estimate."""
    attempt: int | None
    """The call that returned it; None if it ended before any call."""
    revision: int | None
    """The conversation's revision when this turn ended. None for turns that a fork copied, and for turns from before it
    was stored."""
    ending: Mapping[str, JsonValue] = field(default_factory=dict)
    """What the provider reported about the end, see the module."""


Turn: TypeAlias = UserTaskTurn | ToolResponseTurn | ModelResponseTurn


def open_call_ids(blocks: tuple[Block, ...]) -> tuple[str, ...]:
    """Return the ids of the tool calls among the blocks, in order."""
    return tuple(block.id for block in blocks if isinstance(block, ToolCallBlock))


FAILURE_MEMBERS: Final = ("provider_message", "provider_status", "provider_code", "retry_after_seconds")
STOP_DETAILS: Final = "stop_details"
_ORDINARY_STOPS: Final = frozenset({StopReason.END_TURN, StopReason.TOOL_USE})
_ALWAYS_REPORTED: Final = frozenset({"reason", "safetyRatings"})
"""Details that providers also report about ordinary stops."""


def describe_failure(error: StrataError) -> dict[str, JsonValue]:
    """Return what the provider reported about a failure; empty if the failure is not the provider's."""
    if not isinstance(error, ProviderFailed):
        return {}
    return {name: value for name in FAILURE_MEMBERS if (value := error.details.get(name)) is not None}


def describe_stop(
    stop_reason: StopReason | None, details: Mapping[str, JsonValue] | None
) -> dict[str, dict[str, JsonValue]]:
    """Return what the provider reported about a stop besides its reason; empty for an ordinary stop."""
    reported = dict(details or {})
    if stop_reason in _ORDINARY_STOPS:
        reported = {name: value for name, value in reported.items() if name != "safetyRatings"}
    return (
        {STOP_DETAILS: reported}
        if set(reported) - _ALWAYS_REPORTED or (reported and stop_reason not in _ORDINARY_STOPS)
        else {}
    )


def describe_ending(ending: Mapping[str, Any]) -> str:
    """Return the same as one or two sentences; empty if there is nothing to report."""
    sentences = []
    if message := ending.get("provider_message"):
        sentences.append(f"Provider message: {message}")
    if (delay := ending.get("retry_after_seconds")) is not None:
        sentences.append(f"Retry after {delay:g} s.")
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
