"""The port that verification reads stored calls through: each with the source of its request and its stored answer.

What every implementation guarantees:

- **Bounded.** It holds the source of the largest request and one page. A conversation of n calls is read once, not once
  for each call.
- **Damage is reported.** A value that cannot be read is a `Flaw`, and reading continues after it.
- **Read-only.** A standby, or a role without write permission, is sufficient.

Every method raises `DatabaseUnavailable` if the database does not answer.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from server.conversation.block import Block
from server.conversation.call import Call
from server.conversation.store import PayloadSource
from server.conversation.turn import StopReason, TurnState
from server.conversation.usage import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFilter:
    """Which calls of a conversation are read. None means any."""

    provider: str | None = None
    model: str | None = None
    started_after: datetime | None = None
    """Inclusive."""
    started_before: datetime | None = None
    """Exclusive."""

    @property
    def is_open(self) -> bool:
        """Whether every call passes."""
        return self == CallFilter()


@dataclass(frozen=True, slots=True, kw_only=True)
class Flaw:
    """A stored value that cannot be read, is missing, or does not match its hash."""

    position: str
    note: str
    stored: str | None = None
    found: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAnswer:
    """A model turn as it is stored."""

    blocks: tuple[Block, ...]
    native: bytes
    state: TurnState
    stop_reason: StopReason | None
    error_code: str | None
    usage: Usage
    """Of all calls of the turn."""
    dialect: str
    provider: str | None
    model: str | None
    account: str | None
    model_version: str | None = None
    """None if it was not stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """A call with all that is needed to check it."""

    call: Call
    """With its raw bytes decoded, or None if they cannot be. Without headers and notes, which are not checked."""
    source: PayloadSource | None
    """The source of its request; None if a flaw says why it is missing."""
    answer: RecordedAnswer | None
    """The turn that this call produced. None for a call that was retried, for a background call, and if the turn is not
    stored yet.
    """
    usages: tuple[Usage, ...] | None
    """The usage of each call of the turn up to this one; None if not all of them were read."""
    continued: tuple[bytes | None, ...] = ()
    """The raw bytes of the calls of the same turn that this one continues, in order; None if they were removed."""
    flaws: tuple[Flaw, ...] = ()


class RecordedCalls(Protocol):
    """Stored calls, conversation by conversation. Implemented in `server.postgres.replay`, which is above this room."""

    def conversations(
        self, conversation_ids: Sequence[str], wanted: CallFilter
    ) -> AsyncIterator[tuple[str, AsyncIterator[RecordedCall | Flaw]]]:
        """Yield the id and the calls of each conversation, in this order. Conversations that do not exist are left out.

        The calls of turns come in their order, then the background calls. Flaws that belong to no call are among them.
        """
        ...

    async def has_conversation(self, conversation_id: str) -> bool:
        """Return whether a conversation still exists. The flaws of one that was erased meanwhile mean nothing."""
        ...
