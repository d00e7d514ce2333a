"""The inspection port: read-only views for operators, over what turns have left behind.

What every implementation promises:

- **Bound to a tenant.** With a tenant's id everything else does not exist. None means all tenants; whoever passes it
  has seen to it that the caller may see them all.
- **Bounded.** No method reads more rows than a page, a window or a cap allows, however many there are. Counts are
  estimates of the planner unless they say that they are exact.
- **Behind the turns.** Lists and searches show what the indexer has counted, some seconds late; timelines and calls
  read the rows themselves.

Every method raises `DatabaseUnavailable` when the database does not answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from enum import StrEnum
from typing import Final, Protocol

from server.conversation.block import JsonValue
from server.conversation.call import Call
from server.conversation.conversation import Conversation, ConversationFacts, ConversationState
from server.conversation.epoch import EpochReason
from server.conversation.payload import LayerOrder
from server.conversation.store import EpochOutline
from server.conversation.turn import StopReason, Turn
from server.conversation.usage import Usage

TIMELINE_LIMIT: Final = 100
"""More turns than this are never read at once."""
TIMELINE_BYTES: Final = 4 * 1024 * 1024
"""Turns that take more than this in the store are read in smaller parts; one is always read."""


class InspectedState(StrEnum):
    """What a conversation can be looked for by: how any of its answers ended, or what it does now."""

    COMPLETE = "complete"
    INTERRUPTED = "interrupted"
    CANCELLED = "cancelled"
    FAILED = "failed"
    RUNNING = "running"
    AWAITING_TOOLS = "awaiting_tools"


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectionFilter:
    """Which conversations a list shows. What is None or False does not matter; all that is said has to hold."""

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
    """In USD, of the calls whose price is known; itself included, and so is `cost_to`."""
    cost_to: Decimal | None = None
    tokens_from: int | None = None
    """Of all buckets together."""
    tokens_to: int | None = None
    active_after: datetime | None = None
    """The newest turn came then or later."""
    active_before: datetime | None = None
    """The newest turn came before."""
    active_within: timedelta | None = None
    """The newest turn is no older than this, whenever it is asked."""
    text: str | None = None
    """Words that one turn has, all of them; `or` and `-word` as in a web search."""
    phrase: str | None = None
    """What one turn says, literally but for case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedConversation:
    """A conversation in a list."""

    id: str
    tenant_id: str
    tenant_name: str
    assistant_id: str
    assistant_name: str
    """As it is called now."""
    identifier: str | None
    state: ConversationState
    created_at: datetime
    facts: ConversationFacts
    is_counted: bool
    """False: there are newer turns than the facts tell of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectionPage:
    """Conversations, newest activity first."""

    items: Sequence[InspectedConversation]
    next_cursor: str | None
    """None on the last page. A page may be short, or empty, and have one: see `searched_until`."""
    estimated_count: int
    """How many there are in all, about."""
    is_count_exact: bool
    searched_until: datetime | None = None
    """Where filters that many pass made it look through a part only: how far back. The cursor goes on from there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOutline:
    """A call without its large parts."""

    turn_seq: int
    attempt: int
    provider: str
    model: str
    epoch: int
    layer_order: LayerOrder
    dynamic: str
    """The dynamic layer as it was sent."""
    started_at: datetime
    first_byte_at: datetime | None
    ended_at: datetime | None
    status: int | None
    error_code: str | None
    usage: Usage | None
    """None while it runs."""
    cost_usd: Decimal | None
    cache_expected_tokens: int | None
    cache_miss_reason: str | None
    raw_length: int | None
    repair_count: int
    template_failure_count: int
    warning_kinds: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochMark:
    """How the epoch of a call began."""

    number: int
    reason: EpochReason
    assistant_version: int
    buffer_start_seq: int
    created_at: datetime
    args: Mapping[str, JsonValue] | None
    """The conversation's args that its text was rendered with; None where they were not kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineTurn:
    """A turn with the calls that were made for it, oldest first."""

    turn: Turn
    calls: Sequence[CallOutline] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningTurn:
    """The turn that is being answered now."""

    seq: int
    owner: str
    """The process that runs it."""
    lease_expires_at: datetime
    cancel_requested_at: datetime | None
    calls: Sequence[CallOutline] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A part of a conversation as it went."""

    tenant_id: str
    tenant_name: str
    conversation: Conversation
    assistant_name: str
    facts: ConversationFacts | None
    """None before the indexer has seen it."""
    turns: Sequence[TimelineTurn]
    """In their order."""
    earlier_seq: int | None
    """Of the newest turn before these; None where they begin the conversation."""
    later_seq: int | None
    """Of the first turn after these; None where they end it."""
    running: RunningTurn | None
    epochs: Sequence[EpochOutline]
    """Compactions and the like, newest first: each says where the buffer began from then on."""
    background_calls: Sequence[CallOutline]
    """Those of no turn, such as summaries, newest first."""
    last_seq: int = 0
    """Of the newest turn of the whole conversation; 0 before the first."""
    earlier_call: CallOutline | None = None
    """The newest call for a turn before these: what the first of them is compared with."""
    call_epochs: Mapping[int, EpochMark] = field(default_factory=dict)
    """The epochs in which these calls were made, by number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPlace:
    """Where a call is found in its conversation."""

    turn_seq: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCall:
    """A call with all that is kept of it, and the one that was made before it."""

    tenant_id: str
    call: Call
    previous: Call | None
    """The newest earlier call of the conversation that belongs to a turn, without its raw bytes."""
    next_place: CallPlace | None
    """Of the first later call of the conversation that belongs to a turn; None for a call of no turn."""
    attempts: Sequence[CallOutline]
    """All calls for the same turn, this one included."""


class Inspector(Protocol):
    """See the module for what holds for all methods."""

    async def list_conversations(
        self,
        tenant_id: str | None,
        *,
        filters: InspectionFilter = InspectionFilter(),  # noqa: B008  reason: frozen
        cursor: str | None = None,
        limit: int = 20,
    ) -> InspectionPage:
        """Raises `CursorInvalid`."""
        ...

    async def load_timeline(
        self,
        tenant_id: str | None,
        conversation_id: str,
        *,
        after_seq: int | None = None,
        before_seq: int | None = None,
        around_seq: int | None = None,
        limit: int = 50,
    ) -> Timeline:
        """The turns behind `after_seq`, those before `before_seq`, those around `around_seq` or, where there is no such
        turn, around the nearest that there is; or the newest. Fewer where they are very large.

        Raises `ConversationNotFound`.
        """
        ...

    async def load_stored_call(
        self, tenant_id: str | None, conversation_id: str, turn_seq: int, attempt: int
    ) -> StoredCall:
        """Raises `ConversationNotFound`, `CallNotFound`."""
        ...

    async def find_tenant(self, conversation_id: str) -> str | None:
        """Whose conversation it is. For callers that may see all tenants."""
        ...
