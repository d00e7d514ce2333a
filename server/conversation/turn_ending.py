"""What a provider says about the end of a turn, as it is stored with the turn and passed on to clients and operators.

| member                | when                                                                                       |
|-----------------------|--------------------------------------------------------------------------------------------|
| `provider_message`    | the provider refused or failed and said why; bounded, without secrets                      |
| `provider_status`     | its own word or number for it                                                              |
| `provider_code`       | its machine-readable code, if it gave one                                                  |
| `retry_after_seconds` | it asks to wait so long                                                                    |
| `stop_details`        | the model stopped, and more is known than the reason: a category, a stop sequence, a text  |
"""

from collections.abc import Mapping
from typing import Any, Final

from server.conversation.block import JsonValue
from server.conversation.errors import ProviderFailed, StrataError
from server.conversation.turn import StopReason

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
