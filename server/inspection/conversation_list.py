"""The list of conversations for operators: its filters, its rows, and saved views, which are named filters.

A view stores the filters as query parameters, so relative times such as "the last seven days" stay relative. Views
belong to a tenant and are visible to all operators of the tenant.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from enum import StrEnum
from typing import Final, Protocol

from server.conversation.audit import Actor
from server.conversation.conversation import ConversationFacts, ConversationState
from server.conversation.errors import ValidationFailed
from server.conversation.turn import StopReason

VIEW_LIMIT: Final = 50
"""Maximum number of views of a tenant."""
NAME_LIMIT: Final = 80


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedView:
    """A named set of filters."""

    id: str
    name: str
    filters: Mapping[str, str]
    """Query parameters; never empty."""
    key_id: str | None
    """The key that saved it."""
    created_at: datetime


def clean_name(name: str) -> str:
    """Strip and collapse the spaces of a name. Raises `ValidationFailed`."""
    cleaned = " ".join(name.split())
    if not 0 < len(cleaned) <= NAME_LIMIT:
        sentence = f"Use 1 to {NAME_LIMIT} characters."
        fault = {"path": "name", "source": "body", "message": sentence}
        raise ValidationFailed(f"The name cannot be used. {sentence}", hint="Go back and correct it.", errors=[fault])
    return cleaned


class SavedViews(Protocol):
    """Stores views. Changes are audited in the same transaction. Every method may raise `DatabaseUnavailable`."""

    async def list_views(self, tenant_id: str) -> Sequence[SavedView]:
        """List all views by name."""
        ...

    async def load_view(self, tenant_id: str, view_id: str) -> SavedView:
        """Load a view. Raises `ViewNotFound`, also for a view of another tenant."""
        ...

    async def save_view(self, tenant_id: str, name: str, filters: Mapping[str, str], by: Actor) -> SavedView:
        """Save a new view. Raises `ViewExists` and `ViewLimitReached`."""
        ...

    async def rename_view(self, tenant_id: str, view_id: str, name: str, by: Actor) -> SavedView:
        """Rename a view and return it. Raises `ViewNotFound` and `ViewExists`."""
        ...

    async def delete_view(self, tenant_id: str, view_id: str, by: Actor) -> None:
        """Delete a view. Raises `ViewNotFound`."""
        ...
