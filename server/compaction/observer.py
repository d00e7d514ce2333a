"""The port through which operators see compactions. Nothing here may raise or wait."""

from typing import Protocol

from server.compaction.report import CompactionReport
from server.conversation.call import CallEnd, CallStart


class CompactionObserver(Protocol):
    """Told about every compaction of this process."""

    def compaction_ended(self, report: CompactionReport) -> None:
        """One is over, whichever way; not for dry runs."""
        ...

    def compaction_needed(self, conversation_id: str, reason: str) -> None:
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

    async def note_stuck(
        self, tenant_id: str, conversation_id: str, *, reason: str, request_tokens: int, seq: int, epoch: int
    ) -> None:
        """As seen behind this answer in this epoch. It ends by itself with the next answer or the next epoch."""
        ...
