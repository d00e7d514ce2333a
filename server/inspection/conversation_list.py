"""The list of conversations for operators: its filters and its rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from enum import StrEnum

from server.conversation.conversation import ConversationFacts, ConversationState
from server.conversation.turn import StopReason


class InspectedState(StrEnum):
    """A state to filter by: how any answer of the conversation ended, or what the conversation is doing now."""

    COMPLETE = "complete"
    INTERRUPTED = "interrupted"
    CANCELLED = "cancelled"
    FAILED = "failed"
    RUNNING = "running"
    AWAITING_TOOLS = "awaiting_tools"


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectionFilter:
    """Which conversations a list contains. Members that are None or False are ignored; all others must match."""

    assistant_id: str | None = None
    model: str | None = None
    provider: str | None = None
    state: InspectedState | None = None
    stop_reason: StopReason | None = None
    error_code: str | None = None
    tool_name: str | None = None
    has_repairs: bool = False
    has_missing_signature: bool = False
    has_withheld_signature: bool = False
    has_prefix_break: bool = False
    was_recovered: bool = False
    cost_from: Decimal | None = None
    """In USD, inclusive, as is `cost_to`. Only calls with a known price count."""
    cost_to: Decimal | None = None
    tokens_from: int | None = None
    """The sum of all buckets, inclusive, as is `tokens_to`."""
    tokens_to: int | None = None
    active_after: datetime | None = None
    """The newest turn was created at this time or later."""
    active_before: datetime | None = None
    """The newest turn was created before this time."""
    active_within: timedelta | None = None
    """The newest turn is not older than this, relative to the time of the query."""
    text: str | None = None
    """Words that one turn contains, all of them; `or` and `-word` work as in a web search."""
    phrase: str | None = None
    """A literal text that one turn contains; case does not matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedConversation:
    """A row of the list."""

    id: str
    tenant_id: str
    tenant_name: str
    assistant_id: str
    assistant_name: str
    """The current name."""
    identifier: str | None
    state: ConversationState
    created_at: datetime
    facts: ConversationFacts
    is_counted: bool
    """Whether the facts include the newest turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectionPage:
    """A page of conversations, latest activity first."""

    items: Sequence[InspectedConversation]
    next_cursor: str | None
    """None on the last page. A short or empty page may have one: see `searched_until`."""
    estimated_count: int
    """The number of all matching conversations."""
    is_count_exact: bool
    searched_until: datetime | None = None
    """Set if the search stopped before all conversations were read: how far back it went. The cursor continues it."""
