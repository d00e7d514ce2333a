"""What became of a compaction, in words for clients, operators and logs."""

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Protocol

from server.conversation.call import CallEnd, CallStart


class CompactionOutcome(StrEnum):
    """What was done, or would be."""

    COMPACTED = "compacted"
    SIGNED = "signed"
    """Exchanges gave way to a block that the provider has signed."""
    SUMMARISED = "summarised"
    """The oldest segments were summed up, and perhaps exchanges moved before that."""
    OLDEST_LEFT_OUT = "oldest_left_out"
    """A summary was needed and could not be had: the oldest segments are no longer sent."""
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
    """Nothing was written: this is what would be done."""
    epoch: int
    """The conversation's when it was over."""
    first_seq: int | None = None
    last_seq: int | None = None
    """Of the turns that changed their place, both included; None where none did."""
    moved_tokens: int = 0
    """What they were as messages, about."""
    segment_tokens: int = 0
    """What they are as history, about; of a signed block, all that it stands for."""
    request_tokens: int | None = None
    """What the next request has beside the new task, about; None where nobody has looked."""
    saved_tokens_per_call: float = 0.0
    """What each later call costs less, in uncached input tokens."""
    saved_usd_per_call: Decimal | None = None
    """None where the price is not known, or nothing is saved."""
    thinking_kept: bool = True
    """False: the turns that stay in the buffer are sent without their thinking from now on."""
    is_window_short: bool = False
    """The requests are near the model's window."""
    recheck_at: datetime | None = None
    """Where nothing was done now, but would be then: when the provider's cache has gone cold."""
    is_blocked: bool = False
    """Something has to be compacted and cannot be. An operator should look."""


class CompactionObserver(Protocol):
    """Told about every compaction of this process."""

    def compaction_ended(self, report: CompactionReport) -> None:
        """One is over, whichever way; not for dry runs."""
        ...

    def compaction_queued(self, conversation_id: str, reason: str) -> None:
        """A job was queued."""
        ...

    def compaction_blocked(self, conversation_id: str, reason: str, buffer_tokens: int) -> None:
        """A conversation that has to be compacted and cannot be: the alarm. May come again and again."""
        ...

    def compaction_unblocked(self, conversation_id: str) -> None:
        """Whatever stood in the way is gone, if anything did."""
        ...

    def call_ended(self, start: CallStart, end: CallEnd, *, assistant_id: str) -> None:
        """A call to a provider is over that belongs to no turn, whichever way."""
        ...


class CompactionAlarms(Protocol):
    """Where it is noted that a compaction is stuck. Raises `DatabaseUnavailable`."""

    async def record_blocked(
        self, tenant_id: str, conversation_id: str, *, reason: str, request_tokens: int, seq: int, epoch: int
    ) -> None:
        """As seen behind this answer in this epoch. It ends by itself with the next answer or the next epoch."""
        ...
