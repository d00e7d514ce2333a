"""Conversations: the durable whole that owns its turns."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from uuid import UUID

from server.conversation.block import JsonValue, ToolCallBlock
from server.conversation.usage import Usage


class OnBusy(StrEnum):
    """What happens to an input while a turn of the conversation runs."""

    REJECT = "reject"
    QUEUE = "queue"
    """It waits, first come first served."""
    SUPERSEDE = "supersede"
    """The running turn is cancelled, and the input is next."""


class ConversationState(StrEnum):
    """What the conversation waits for."""

    IDLE = "idle"
    RUNNING = "running"
    AWAITING_TOOLS = "awaiting_tools"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The source of a fork."""

    conversation_id: str
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationDraft:
    """The settings of a new conversation."""

    assistant_id: str
    assistant_version: int | None = None
    """None for the latest version."""
    identifier: str | None = None
    source: str | None = None
    direction: str | None = None
    mode: str | None = None
    args: Mapping[str, JsonValue] = field(default_factory=dict)
    context: Mapping[str, JsonValue] = field(default_factory=dict)
    metadata: Mapping[str, JsonValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation without its turns. Loading it takes the same time for any length."""

    id: str
    assistant_id: str
    assistant_version: int
    revision: int
    """Counts every change: an accepted turn, its end, an edit. Protects against outdated writers."""
    next_seq: int
    buffer_start_seq: int
    """The first turn that is not compacted."""
    epoch: int
    """0 until the first payload is built."""
    state: ConversationState
    pending_call_ids: tuple[str, ...]
    """Tool calls without results, in order."""
    pending_calls: tuple[ToolCallBlock, ...]
    """The same with names and arguments. Only in results of `load_conversation` and lists; otherwise empty."""
    identifier: str | None
    source: str | None
    direction: str | None
    mode: str | None
    args: Mapping[str, JsonValue]
    context: Mapping[str, JsonValue]
    metadata: Mapping[str, JsonValue]
    forked_from: Origin | None
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationStatus:
    """What a client needs to continue."""

    id: str
    revision: int
    state: ConversationState
    pending_calls: tuple[ToolCallBlock, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to run one turn of a conversation, proven by the token."""

    conversation_id: str
    token: UUID
    owner: str
    """The server process, for operators and for giving up all leases at shutdown."""
    turn_seq: int
    """The number of the model turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationFacts:
    """Aggregates of a conversation for lists and filters, computed after its turns."""

    last_indexed_seq: int = 0
    """The newest turn that is counted."""
    last_indexed_background_seq: int = 0
    """The lowest number of a counted call that belongs to no turn."""
    turn_count: int = 0
    call_count: int = 0
    models: tuple[str, ...] = ()
    providers: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    stop_reasons: tuple[str, ...] = ()
    error_codes: tuple[str, ...] = ()
    tool_names: tuple[str, ...] = ()
    has_repairs: bool = False
    has_missing_signature: bool = False
    has_withheld_signature: bool = False
    has_prefix_break: bool = False
    was_recovered: bool = False
    usage: Usage = field(default_factory=Usage)
    cost_usd: Decimal = Decimal(0)
    """Of the calls with a known price."""
    unpriced_count: int = 0
    slowest_call_ms: int | None = None
    last_activity_at: datetime
    excerpt: str = ""
    """The beginning of the first user task."""
