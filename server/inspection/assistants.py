"""The port for looking at assistants: read-only views for operators.

With a tenant's id everything else does not exist. None means all tenants; whoever passes it has seen to it that the
caller may see them all. No method reads more than a page, and counts end at a cap, however many rows there are.

Every method raises `DatabaseUnavailable` when the database does not answer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Protocol

from server.conversation.assistant import Assistant
from server.conversation.page import Page

COUNT_CAP: Final = 1000
"""Conversations are counted up to here: a count that has reached it means that many or more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantOutline:
    """An assistant in a list, as its newest version has it."""

    id: str
    tenant_id: str
    tenant_name: str
    name: str
    provider: str
    model: str
    version: int
    version_count: int
    conversation_count: int
    """Up to `COUNT_CAP`."""
    created_at: datetime
    changed_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionOutline:
    """A version in a list."""

    version: int
    created_at: datetime
    name: str
    provider: str
    model: str
    tool_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedAssistant:
    """A version with what stands around it."""

    tenant_id: str
    tenant_name: str
    assistant: Assistant
    newest_version: int
    conversation_counts: Mapping[int, int]
    """How many of the newest `COUNT_CAP` conversations are on which version."""


class AssistantInspector(Protocol):
    """See the module for what holds for all methods."""

    async def list_assistants(
        self, tenant_id: str | None, *, cursor: str | None = None, limit: int = 20
    ) -> Page[AssistantOutline]:
        """Newest assistant first. Raises `CursorInvalid`."""
        ...

    async def load_assistant(
        self, tenant_id: str | None, assistant_id: str, version: int | None = None
    ) -> InspectedAssistant:
        """A version, or the newest. Raises `AssistantNotFound`."""
        ...

    async def list_versions(
        self, tenant_id: str | None, assistant_id: str, *, cursor: str | None = None, limit: int = 20
    ) -> Page[VersionOutline]:
        """Newest first. Raises `AssistantNotFound` and `CursorInvalid`."""
        ...
