"""What the emulated model says next: an answer, or a way to fail."""

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
    """One answer of the model. All three may be empty; then it ends its turn without a word."""

    thinking: str = ""
    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    server_calls: tuple[ToolCall, ...] = ()
    """Claude only: calls of the provider's own tools. Beside `tool_calls` their results open the next answer, else they
    follow at once."""


class FaultKind(StrEnum):
    """What can go wrong on the provider's side. Each provider renders a kind as its own documents describe it."""

    RATE_LIMITED = "rate_limited"
    """429 that says how long to wait."""
    RATE_LIMITED_NO_DELAY = "rate_limited_no_delay"
    """429 that does not."""
    INTERNAL = "internal"
    """500."""
    UNAVAILABLE = "unavailable"
    """503."""
    OVERLOADED = "overloaded"
    """529 of Claude, 503 of Gemini."""
    GATEWAY_TIMEOUT = "gateway_timeout"
    """504."""
    OVERLOADED_MID_STREAM = "overloaded_mid_stream"
    """The stream began well and then carries an overload error."""
    ERROR_MID_STREAM = "error_mid_stream"
    """The same with an internal error."""
    CUT = "cut"
    """The connection breaks in the middle of the body."""
    EARLY_END = "early_end"
    """The body ends cleanly, but before the answer does."""
    EMPTY_STREAM = "empty_stream"
    """200 and nothing at all."""
    SILENCE = "silence"
    """Nothing more comes until the client goes. After no chunks not even the head of the response."""
    SLOW = "slow"
    """A long time between chunks."""
    MALFORMED_JSON = "malformed_json"
    """An event that is not JSON."""
    REFUSAL = "refusal"
    """The model declines: `refusal` of Claude, SAFETY of Gemini."""
    BLOCKED_PROMPT = "blocked_prompt"
    """Gemini only: the prompt is blocked, no candidate follows."""
    MAX_TOKENS = "max_tokens"
    """The answer is cut off by the token limit."""
    PAUSE = "pause"
    """`pause_turn` of Claude, CONTINUATION of Gemini: send it back to go on."""
    EMPTY_STOP = "empty_stop"
    """A regular end of the turn with nothing visible in it."""
    CONTEXT_EXCEEDED = "context_exceeded"
    """The request is larger than the context window."""
    SIGNATURE_REJECTED = "signature_rejected"
    """400 about a signature, whatever the request holds."""
    UNKNOWN_PARTS = "unknown_parts"
    """A good answer with fields, parts or blocks that nobody has documented yet."""
    BAD_AUTH = "bad_auth"
    """401, whatever the key."""
    NO_CREDIT = "no_credit"
    """The account has no money left: 400 of Claude, 429 without a delay of Gemini."""
    RAW = "raw"
    """Exactly the bytes that were given, with the status and content type that were given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    kind: FaultKind
    after_chunks: int = 0
    """How much of the answer comes first, for the faults of a running stream."""
    retry_after_seconds: float | None = None
    message: str = ""
    """In place of the provider's usual text."""
    body: bytes = b""
    """Of `raw`."""
    status: int = 200
    """Of `raw`."""
    content_type: str = ""
    """Of `raw`; empty: that of an event stream."""


Turn: TypeAlias = Reply | Fault
