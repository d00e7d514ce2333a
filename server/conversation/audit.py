"""The audit log: who did what to whose data, and how it ended. A row is written once and never changed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Final, Protocol

from server.conversation.page import Page


class Action(StrEnum):
    """What operators do that is worth a row. The names are public: they are in the table for ever."""

    LOGIN = "login"
    LOGOUT = "logout"
    CREATE_KEY = "key.create"
    REVOKE_KEY = "key.revoke"
    FORK = "conversation.fork"
    CANCEL = "conversation.cancel"
    COMPACT = "conversation.compact"
    UNDO_COMPACTION = "conversation.undo_compaction"
    ERASE = "conversation.erase"
    EXPORT = "conversation.export"
    IMPORT = "conversation.import"
    SAVE_ASSISTANT = "assistant.save"
    SAVE_VIEW = "view.save"
    RENAME_VIEW = "view.rename"
    DELETE_VIEW = "view.delete"
    CREATE_REPLAY = "replay.create"
    PAUSE_REPLAY = "replay.pause"
    CONTINUE_REPLAY = "replay.continue"
    CANCEL_REPLAY = "replay.cancel"
    ERASE_REPLAY = "replay.erase"
    READ_OTHER_TENANT = "tenant.read"
    """A superadmin read data of another tenant, or of all."""


class Outcome(StrEnum):
    """How it ended."""

    DONE = "done"
    REFUSED = "refused"
    """Whoever asked was not let."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """Who acts. Nothing is known of somebody at the command line: the database's credentials let them in."""

    key_id: str | None = None
    session_id: str | None = None
    """Only through a page."""
    address: str | None = None


OPERATOR: Final = Actor()
"""Somebody at the command line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditDraft:
    """A row to be written."""

    tenant_id: str | None
    """None where nobody can say whose it is, as with a login by an unknown key."""
    actor: Actor
    action: str
    """One of `Action`, or of a later release."""
    object_id: str | None = None
    details: Mapping[str, object] = field(default_factory=dict)
    """Facts, never content or secrets."""
    outcome: Outcome = Outcome.DONE


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry(AuditDraft):
    """A row of the log."""

    id: str
    happened_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFilter:
    """Which rows. What is None does not matter."""

    action: str | None = None
    key_id: str | None = None
    object_id: str | None = None
    outcome: Outcome | None = None
    since: datetime | None = None
    until: datetime | None = None


class AuditLog(Protocol):
    """The log. Raises `DatabaseUnavailable` from any method.

    What can be is written in the transaction of what it tells, see `KeyRing` and `AdminSessions`; this `append` is
    for the rest. Rows stay for good.
    """

    async def append(self, draft: AuditDraft) -> None:
        """A row of its own."""
        ...

    async def list_entries(
        self, tenant_id: str | None, wanted: AuditFilter, *, cursor: str | None = None, limit: int = 50
    ) -> Page[AuditEntry]:
        """Newest first. Of one tenant, or of all and of nobody. Raises `CursorInvalid`."""
        ...
