"""Assistants as operators see them: rows of the lists, and one version with the numbers around it."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from server.conversation.assistant import Assistant

COUNT_CAP: Final = 1000
"""Conversations are counted up to this number. A count that equals it means that many or more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantOutline:
    """An assistant in a list, as of its newest version."""

    id: str
    tenant_id: str
    tenant_name: str
    name: str
    provider: str
    model: str
    version: int
    version_count: int
    conversation_count: int
    """At most `COUNT_CAP`."""
    created_at: datetime
    changed_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionOutline:
    """A version of an assistant in a list."""

    version: int
    created_at: datetime
    name: str
    provider: str
    model: str
    tool_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedAssistant:
    """One version of an assistant, and how many conversations use which version."""

    tenant_id: str
    tenant_name: str
    assistant: Assistant
    newest_version: int
    conversation_counts: Mapping[int, int]
    """Conversations by version, among the newest `COUNT_CAP` of the assistant."""
