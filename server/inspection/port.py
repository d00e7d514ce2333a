"""The inspection port: read-only views for operators.

Every implementation guarantees:

- **Tenant scope.** With a tenant id, data of other tenants does not exist. None means all tenants; the caller has
  checked that this is allowed.
- **Bounded reads.** No method reads more rows than a page, a window or a cap allows, however many there are. Counts are
  estimates of the query planner unless they are documented as exact.
- **Delay.** Lists and searches show what the indexer has counted, a few seconds after the turns. Timelines, calls and
  reports read the rows themselves.

Every method raises `DatabaseUnavailable` if the database does not answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from server.conversation.call import Call
from server.conversation.page import Page
from server.inspection.assistants import AssistantOutline, InspectedAssistant, VersionOutline
from server.inspection.conversation_list import InspectionFilter, InspectionPage
from server.inspection.jobs import JobStatus
from server.inspection.overview import Overview, OverviewBy
from server.inspection.timeline import CallOutline, Timeline
from server.inspection.usage_report import UsageBy, UsageReport


@dataclass(frozen=True, slots=True, kw_only=True)
class CallKey:
    """The turn and attempt of a call, which identify it within its conversation."""

    turn_seq: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCall:
    """A call with everything that is stored of it, and its neighbours."""

    tenant_id: str
    call: Call
    previous: Call | None
    """The last earlier call of the conversation that belongs to a turn, without its raw bytes."""
    next_call: CallKey | None
    """The first later call of the conversation that belongs to a turn. None for a call that belongs to no turn."""
    attempts: Sequence[CallOutline]
    """All calls of the same turn, including this one."""


class Inspector(Protocol):
    """Reads conversations, calls, assistants and reports. The module states what holds for all methods."""

    async def find_tenant(self, conversation_id: str) -> str | None:
        """Return the tenant of a conversation. For callers that may see all tenants."""
        ...

    async def list_conversations(
        self,
        tenant_id: str | None,
        *,
        filters: InspectionFilter = InspectionFilter(),  # noqa: B008  reason: frozen
        cursor: str | None = None,
        limit: int = 20,
    ) -> InspectionPage:
        """List conversations, latest activity first. Raises `CursorInvalid`."""
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
        """Load the turns after, before or around a turn, or the newest turns. Fewer than `limit` if they are large.

        Raises `ConversationNotFound`.
        """
        ...

    async def load_stored_call(
        self, tenant_id: str | None, conversation_id: str, turn_seq: int, attempt: int
    ) -> StoredCall:
        """Load one call. Raises `ConversationNotFound` and `CallNotFound`."""
        ...

    async def list_assistants(
        self, tenant_id: str | None, *, cursor: str | None = None, limit: int = 20
    ) -> Page[AssistantOutline]:
        """List assistants, newest first. Raises `CursorInvalid`."""
        ...

    async def load_assistant(
        self, tenant_id: str | None, assistant_id: str, version: int | None = None
    ) -> InspectedAssistant:
        """Load a version of an assistant, by default the newest. Raises `AssistantNotFound`."""
        ...

    async def list_versions(
        self, tenant_id: str | None, assistant_id: str, *, cursor: str | None = None, limit: int = 20
    ) -> Page[VersionOutline]:
        """List the versions of an assistant, newest first. Raises `AssistantNotFound` and `CursorInvalid`."""
        ...

    async def load_overview(
        self, tenant_id: str | None, by: OverviewBy, *, since: datetime, until: datetime
    ) -> Overview:
        """Summarize the calls that started at `since` or later and before `until`."""
        ...

    async def report_usage(
        self, tenant_id: str | None, by: UsageBy, *, since: datetime, until: datetime, limit: int = 100
    ) -> UsageReport:
        """Report tokens and cost of the calls that started at `since` or later and before `until`."""
        ...

    async def report_jobs(self, tenant_id: str | None) -> Sequence[JobStatus]:
        """Report background jobs by name. Without a tenant, also the jobs that belong to none."""
        ...
