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
    """What a second writer wants while a turn runs."""

    REJECT = "reject"
    QUEUE = "queue"
    """To wait for its turn, first come first served."""
    SUPERSEDE = "supersede"
    """To have the running turn cancelled, and to be the next."""


class ConversationState(StrEnum):
    """What the conversation waits for."""

    IDLE = "idle"
    RUNNING = "running"
    AWAITING_TOOLS = "awaiting_tools"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a fork came from."""

    conversation_id: str
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationDraft:
    """What is chosen when a conversation is made."""

    assistant_id: str
    assistant_version: int | None = None
    """None pins the newest version there is."""
    identifier: str | None = None
    source: str | None = None
    direction: str | None = None
    mode: str | None = None
    args: Mapping[str, JsonValue] = field(default_factory=dict)
    context: Mapping[str, JsonValue] = field(default_factory=dict)
    metadata: Mapping[str, JsonValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation without its turns. It costs the same to load however long it is."""

    id: str
    assistant_id: str
    assistant_version: int
    revision: int
    """Counts every change: one for an accepted turn, one for its end, one for an edit. Guards against stale writers."""
    next_seq: int
    buffer_start_seq: int
    """The first turn that is not compacted."""
    epoch: int
    """0 until the first payload is built."""
    state: ConversationState
    pending_call_ids: tuple[str, ...]
    """Tool calls that wait for results, in the order of the calls."""
    pending_calls: tuple[ToolCallBlock, ...]
    """The same with names and arguments. Filled by `load_conversation` and by lists; empty elsewhere."""
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
    """What a client has to know to go on."""

    id: str
    revision: int
    state: ConversationState
    pending_calls: tuple[ToolCallBlock, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to run one turn of a conversation. Whoever knows the token holds it."""

    conversation_id: str
    token: UUID
    owner: str
    """Which server process, for operators and for handing everything back at shutdown."""
    turn_seq: int
    """The number of the model turn that it is for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationFacts:
    """What operators ask of a conversation, as far as it is counted."""

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
    """Of the calls whose price is known."""
    unpriced_count: int = 0
    slowest_call_ms: int | None = None
    last_activity_at: datetime
    excerpt: str = ""
    """How the first user task begins."""
