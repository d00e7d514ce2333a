"""An observer of compactions that records them."""

from dataclasses import dataclass, field

from server.compaction.report import CompactionReport
from server.conversation.call import CallEnd, CallStart


@dataclass(slots=True)
class Observed:
    """The observed compactions."""

    reports: list[CompactionReport] = field(default_factory=list)
    queued: list[tuple[str, str]] = field(default_factory=list)
    blocked: set[str] = field(default_factory=set)
    calls: list[tuple[str, CallStart, CallEnd]] = field(default_factory=list)

    def compaction_ended(self, report: CompactionReport) -> None:
        self.reports.append(report)

    def compaction_queued(self, conversation_id: str, reason: str) -> None:
        self.queued.append((conversation_id, reason))

    def compaction_blocked(self, conversation_id: str, reason: str, buffer_tokens: int) -> None:
        self.blocked.add(conversation_id)

    def compaction_unblocked(self, conversation_id: str) -> None:
        self.blocked.discard(conversation_id)

    def call_ended(self, start: CallStart, end: CallEnd, *, assistant_id: str) -> None:
        self.calls.append((assistant_id, start, end))
