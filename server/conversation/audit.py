"""The audit log: who did what to which data, and with what outcome. An entry never changes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Final, Protocol

from server.conversation.page import Page


class Action(StrEnum):
    """Recorded actions. Their names are public, because they are stored permanently."""

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
    """A superadmin read data of another tenant, or of all tenants."""


class Outcome(StrEnum):
    """The outcome of an action."""

    DONE = "done"
    REFUSED = "refused"
    """The actor was not allowed to do it."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """Who acts. All fields are None at the command line, where access is granted by the credentials of the database."""

    key_id: str | None = None
    session_id: str | None = None
    """Only for actions on a page."""
    address: str | None = None


OPERATOR: Final = Actor()
"""An operator at the command line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditDraft:
    """An entry to be written."""

    tenant_id: str | None
    """None if the tenant is unknown, as for a login with an unknown key."""
    actor: Actor
    action: str
    """One of `Action`, or of a later release."""
    object_id: str | None = None
    details: Mapping[str, object] = field(default_factory=dict)
    """Facts, never content or secrets."""
    outcome: Outcome = Outcome.DONE


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry(AuditDraft):
    """A stored entry."""

    id: str
    happened_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFilter:
    """Which entries to list. None matches all."""

    action: str | None = None
    key_id: str | None = None
    object_id: str | None = None
    outcome: Outcome | None = None
    since: datetime | None = None
    until: datetime | None = None


class AuditLog(Protocol):
    """The log. Every method raises `DatabaseUnavailable`.

    Most entries are written in the transaction of the action that they describe, see `KeyRing` and `AdminSessions`;
    `append` is for the others. Entries are never deleted.
    """

    async def append(self, draft: AuditDraft) -> None:
        """Write an entry in its own transaction."""
        ...

    async def list_entries(
        self, tenant_id: str | None, wanted: AuditFilter, *, cursor: str | None = None, limit: int = 50
    ) -> Page[AuditEntry]:
        """List entries, newest first: of one tenant, or of all and without one. Raises `CursorInvalid`."""
        ...
