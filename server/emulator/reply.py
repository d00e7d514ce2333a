"""What the emulated model does next: a reply or a fault."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    toolset_name: str = ""
    """Claude only: the toolset that the tool belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One reply of the model. All three may be empty: then the turn ends without content."""

    thinking: str = ""
    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    server_calls: tuple[ToolCall, ...] = ()
    """Claude only: calls of the provider's server tools. With `tool_calls` present their results begin the next reply,
    else they follow immediately."""


class FaultKind(StrEnum):
    """Faults of a provider. Each emulator renders a kind as its provider documents it."""

    RATE_LIMITED = "rate_limited"
    """429 with a retry delay."""
    RATE_LIMITED_NO_DELAY = "rate_limited_no_delay"
    """429 without a retry delay."""
    INTERNAL = "internal"
    """500."""
    UNAVAILABLE = "unavailable"
    """503."""
    OVERLOADED = "overloaded"
    """529 of Claude, 503 of Gemini."""
    GATEWAY_TIMEOUT = "gateway_timeout"
    """504."""
    OVERLOADED_MID_STREAM = "overloaded_mid_stream"
    """An overload error in the middle of a stream."""
    ERROR_MID_STREAM = "error_mid_stream"
    """An internal error in the middle of a stream."""
    CUT = "cut"
    """The connection breaks in the middle of the body."""
    EARLY_END = "early_end"
    """The body ends regularly, but before the response is complete."""
    EMPTY_STREAM = "empty_stream"
    """200 with an empty body."""
    SILENCE = "silence"
    """No more bytes until the client disconnects. With `after_chunks` 0 not even the response head is sent."""
    SLOW = "slow"
    """A long time between chunks."""
    MALFORMED_JSON = "malformed_json"
    """An event that is not JSON."""
    REFUSAL = "refusal"
    """The model declines: `refusal` of Claude, SAFETY of Gemini."""
    BLOCKED_PROMPT = "blocked_prompt"
    """Gemini only: the prompt is blocked, no candidate follows."""
    MAX_TOKENS = "max_tokens"
    """The response is cut off by the token limit."""
    PAUSE = "pause"
    """`pause_turn` of Claude, CONTINUATION of Gemini: the client sends the response back to continue."""
    EMPTY_STOP = "empty_stop"
    """A regular end of the turn without visible content."""
    CONTEXT_EXCEEDED = "context_exceeded"
    """The request is larger than the context window."""
    SIGNATURE_REJECTED = "signature_rejected"
    """400 about a signature, for any request."""
    UNKNOWN_PARTS = "unknown_parts"
    """A valid response with undocumented fields, parts or blocks."""
    BAD_AUTH = "bad_auth"
    """401, for any key."""
    NO_CREDIT = "no_credit"
    """The account has no money left: 400 of Claude, 429 without a delay of Gemini."""
    RAW = "raw"
    """Exactly the given bytes, with the given status and content type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    kind: FaultKind
    after_chunks: int = 0
    """How many chunks are sent before the fault, for faults of a running stream."""
    retry_after_seconds: float | None = None
    message: str = ""
    """Replaces the provider's usual error text."""
    body: bytes = b""
    """Of `raw`."""
    status: int = 200
    """Of `raw`."""
    content_type: str = ""
    """Of `raw`. Empty: `text/event-stream`."""


Turn: TypeAlias = Reply | Fault
