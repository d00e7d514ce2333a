"""The port through which operators see compactions. Nothing here may raise or wait."""

from typing import Protocol

from server.call import CallEnd, CallStart
from server.compaction_report import CompactionReport


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
