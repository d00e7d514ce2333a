"""What a server answers, as values.

Texts that a later server may add to (states, kinds, stop reasons) are plain strings: `turn.state == TurnState.COMPLETE`
holds, and one that is not known here is no error. Members that are not known are passed over.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal

from server.conversation.block import Block, JsonValue, TextBlock, ToolCallBlock
from server.conversation.conversation import Origin
from server.conversation.usage import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnError:
    """Why a turn did not end well."""

    code: str
    message: str
    hint: str = ""
    source: str = "strata"
    """`provider` or `strata`: whose error it is."""
    provider_message: str | None = None
    """What the provider said about it."""
    provider_status: str | int | None = None
    retry_after_seconds: float | None = None
    """How long the provider asks to wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A turn of any kind. What only a model's turn has is None in the others."""

    seq: int
    kind: str
    state: str
    """As `server.conversation.turn.TurnState`, or `running`."""
    blocks: tuple[Block, ...] = ()
    created_at: datetime | None = None
    stop_reason: str | None = None
    stop_details: Mapping[str, JsonValue] = field(default_factory=dict)
    """What the provider said about the stop beyond its reason."""
    error: TurnError | None = None
    usage: Usage | None = None
    cost_usd: Decimal | None = None
    """None where a price is not known; never a guess."""
    provider: str | None = None
    model: str | None = None

    @property
    def text(self) -> str:
        """What was said, without reasoning and calls."""
        return "".join(block.text for block in self.blocks if isinstance(block, TextBlock))

    @property
    def tool_calls(self) -> tuple[ToolCallBlock, ...]:
        """The calls that the model asks for, in its order."""
        return tuple(block for block in self.blocks if isinstance(block, ToolCallBlock))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationStatus:
    """What a client has to know to go on."""

    id: str
    revision: int
    state: str
    pending_tool_calls: tuple[ToolCallBlock, ...] = ()
    """These wait for results; a new task has to abandon them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation without its turns."""

    id: str
    revision: int
    state: str
    pending_tool_calls: tuple[ToolCallBlock, ...]
    assistant_id: str
    assistant_version: int
    identifier: str | None = None
    source: str | None = None
    direction: str | None = None
    mode: str | None = None
    args: Mapping[str, JsonValue] = field(default_factory=dict)
    context: Mapping[str, JsonValue] = field(default_factory=dict)
    metadata: Mapping[str, JsonValue] = field(default_factory=dict)
    forked_from: Origin | None = None
    created_at: datetime | None = None
    updated_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnStart:
    """A turn that the server has taken, whether or not it has ended."""

    turn: Turn
    conversation: ConversationStatus
    replayed: bool
    """The server knew the request: it was sent before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnded:
    """The answer is durable, whole or not: its state says which. The last event of a turn."""

    turn: Turn
    conversation: ConversationStatus
    """As it was when the turn ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Erasure:
    """What went with a conversation, or would go."""

    dry_run: bool
    rows: Mapping[str, int]
    """By table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionReport:
    """What a compaction did, or would do. Tokens are estimates."""

    conversation_id: str
    outcome: str
    """As `server.compaction.report.CompactionOutcome`."""
    reason: str
    dry_run: bool
    epoch: int
    first_seq: int | None = None
    last_seq: int | None = None
    """Of the turns that changed their place; None where none did."""
    moved_tokens: int = 0
    segment_tokens: int = 0
    request_tokens: int | None = None
    saved_tokens_per_call: float = 0.0
    saved_usd_per_call: Decimal | None = None
    blocked: bool = False
    """Something has to be compacted and cannot be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """A change of a conversation's history: an epoch that began with it."""

    epoch: int
    reason: str
    generation: int
    segment_count: int
    buffer_start_seq: int
    """The first turn that is still a message."""
    first_seq: int | None = None
    last_seq: int | None = None
    """Of the newest piece of history."""
    segment_tokens: int | None = None
    created_at: datetime | None = None
