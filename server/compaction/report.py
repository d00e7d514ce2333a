"""The result of a compaction, and the port through which metrics and logs observe compactions."""

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Protocol

from server.conversation.call import CallEnd, CallStart


class CompactionOutcome(StrEnum):
    """What was done, or would be done."""

    COMPACTED = "compacted"
    SIGNED = "signed"
    """Exchanges were replaced by a summary that the provider signed."""
    SUMMARISED = "summarised"
    """The oldest segments were summarised, possibly after exchanges were moved."""
    OLDEST_LEFT_OUT = "oldest_left_out"
    """A summary was needed and not available: the oldest segments are no longer sent."""
    UNDONE = "undone"
    UNCHANGED = "unchanged"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionReport:
    """One compaction of one conversation."""

    conversation_id: str
    outcome: CompactionOutcome
    reason: str
    """Why it was done, or why not."""
    is_dry_run: bool = False
    """Nothing was written; the report describes what would be done."""
    epoch: int
    """The conversation's epoch afterwards."""
    first_seq: int | None = None
    last_seq: int | None = None
    """The first and last turn that were moved, both included; None if none were."""
    moved_tokens: int = 0
    """Estimated size of the moved turns as messages."""
    segment_tokens: int = 0
    """Estimated size of the same turns as history. For a signed summary: of all turns that it replaces."""
    request_tokens: int | None = None
    """Estimated size of the next request without the new task; None if it was not estimated."""
    saved_tokens_per_call: float = 0.0
    """By how much each later call becomes cheaper, in uncached input tokens."""
    saved_usd_per_call: Decimal | None = None
    """None if the price is unknown or nothing is saved."""
    thinking_kept: bool = True
    """False: the turns that stay in the buffer are sent without their thinking from now on."""
    is_window_short: bool = False
    """The requests approach the model's window."""
    recheck_at: datetime | None = None
    """When the provider's cache expires, if a compaction would be worth it then but not now."""
    is_blocked: bool = False
    """A compaction is necessary and not possible. An operator should look at the conversation."""


class CompactionObserver(Protocol):
    """Notified about every compaction of this process. Its methods must not raise or block."""

    def compaction_ended(self, report: CompactionReport) -> None:
        """A compaction ended, with any outcome. Not called for dry runs."""
        ...

    def compaction_queued(self, conversation_id: str, reason: str) -> None:
        """A job was queued."""
        ...

    def compaction_blocked(self, conversation_id: str, reason: str, buffer_tokens: int) -> None:
        """A compaction is necessary and not possible. May be called repeatedly for the same conversation."""
        ...

    def compaction_unblocked(self, conversation_id: str) -> None:
        """The conversation is not blocked, or no longer blocked."""
        ...

    def call_ended(self, start: CallStart, end: CallEnd, *, assistant_id: str) -> None:
        """A provider call that belongs to no turn ended, with any outcome."""
        ...


class CompactionAlarms(Protocol):
    """Records compactions that are necessary and blocked. Raises `DatabaseUnavailable`."""

    async def record_blocked(
        self, tenant_id: str, conversation_id: str, *, reason: str, request_tokens: int, seq: int, epoch: int
    ) -> None:
        """Record the state after this answer in this epoch. The record is obsolete with the next answer or the next
        epoch.
        """
        ...
