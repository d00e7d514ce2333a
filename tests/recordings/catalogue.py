"""Recorded streams: the bytes of one answer each, and the expected end of the answer.

Most were recorded from the emulators; those marked "By hand" have what the providers document and the emulators do not
send. A recording that was cut has the bytes up to the cut. The bytes do not show whether a body was cut or ended, so
the catalogue states the meaning for a body that ended properly.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from server.conversation.errors import (
    ProviderEmpty,
    ProviderEndedEarly,
    ProviderFailed,
    ProviderMalformed,
    ProviderOverloaded,
    ProviderUnavailable,
)
from server.conversation.turn import StopReason

NUMBERS: Final = (
    b'{"a":1.0,"b":1e5,"c":12345678901234567890,"d":1E400,"e":-0.0,"f":[1.50,2,1E+2],"z":0,"y":{"deep":0.10}}'
)
"""The arguments in the recordings of that name."""
_HERE: Final = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    vendor: str
    name: str
    stop_reason: StopReason | None = None
    failure: type[ProviderFailed] | None = None

    @property
    def body(self) -> bytes:
        return (_HERE / self.vendor / f"{self.name}.sse").read_bytes()

    def __str__(self) -> str:
        return f"{self.vendor}-{self.name}"


_OUTCOMES: Final[dict[str, dict[str, StopReason | type[ProviderFailed]]]] = {
    "gemini": {
        "text": StopReason.END_TURN,
        "thinking_hidden": StopReason.END_TURN,
        "parallel_calls": StopReason.TOOL_USE,
        "calls_without_ids": StopReason.TOOL_USE,
        "blocked_prompt": StopReason.REFUSAL,
        "safety": StopReason.REFUSAL,
        "max_tokens": StopReason.LENGTH,
        "continuation": StopReason.PAUSED,
        "unknown_parts": StopReason.END_TURN,
        "empty_stop": ProviderEmpty,
        "empty": ProviderEmpty,
        "cut_in_thinking": ProviderEndedEarly,
        "cut_in_text": ProviderEndedEarly,
        "cut_after_call": ProviderEndedEarly,
        "early_end": ProviderEndedEarly,
        "malformed": ProviderMalformed,
        "overloaded_mid_stream": ProviderOverloaded,
        "error_mid_stream": ProviderUnavailable,
        # By hand.
        "numbers": StopReason.TOOL_USE,
        "signed_texts": StopReason.END_TURN,
        "server_tools": StopReason.END_TURN,
        "usage_with_tools": StopReason.END_TURN,
    },
    "anthropic": {
        "text": StopReason.END_TURN,
        "thinking_omitted": StopReason.END_TURN,
        "parallel_calls": StopReason.TOOL_USE,
        "refusal": StopReason.REFUSAL,
        "pause_turn": StopReason.PAUSED,
        "max_tokens": StopReason.LENGTH,
        # The first of its two calls is whole and waits for a result.
        "max_tokens_in_call": StopReason.TOOL_USE,
        "window_exceeded": StopReason.LENGTH,
        "unknown_parts": StopReason.END_TURN,
        "empty_stop": ProviderEmpty,
        "empty": ProviderEmpty,
        "cut_in_thinking": ProviderEndedEarly,
        "cut_in_text": ProviderEndedEarly,
        "cut_in_call": ProviderEndedEarly,
        "early_end": ProviderEndedEarly,
        "malformed": ProviderMalformed,
        "overloaded_mid_stream": ProviderOverloaded,
        "error_mid_stream": ProviderUnavailable,
        # By hand.
        "numbers": StopReason.TOOL_USE,
        "citations": StopReason.END_TURN,
        "server_tools": StopReason.PAUSED,
        "redacted_thinking": StopReason.END_TURN,
        "unknown_everywhere": StopReason.TOOL_USE,
        "cache_missed": StopReason.END_TURN,
        "compaction": StopReason.PAUSED,
    },
}

RECORDINGS: Final = tuple(
    Recorded(
        vendor=vendor,
        name=name,
        stop_reason=outcome if isinstance(outcome, StopReason) else None,
        failure=None if isinstance(outcome, StopReason) else outcome,
    )
    for vendor, outcomes in _OUTCOMES.items()
    for name, outcome in outcomes.items()
)


def load(vendor: str, name: str) -> bytes:
    """The bytes of one recording."""
    return next(one for one in RECORDINGS if (one.vendor, one.name) == (vendor, name)).body
