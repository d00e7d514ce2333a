"""The port for walking through stored calls: each with what it was made of and what was kept of its answer.

What every implementation promises:

- **Bounded.** What is held at once is what the largest request was made of, and a page. A conversation of n calls is
  read once, not once for each of them.
- **Damage is told.** What cannot be read is a `Flaw`, and the walk goes on behind it.
- **Nothing is written**, so a standby or a role that may only read will do.

Every method raises `DatabaseUnavailable` when the database does not answer.
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
    """Which calls of a conversation are walked. What is None does not matter."""

    provider: str | None = None
    model: str | None = None
    started_after: datetime | None = None
    """Itself included."""
    started_before: datetime | None = None

    @property
    def is_open(self) -> bool:
        """Whether every call passes."""
        return self == CallFilter()


@dataclass(frozen=True, slots=True, kw_only=True)
class Flaw:
    """Something stored that cannot be read, is missing, or is not what its own hash says."""

    place: str
    note: str
    stored: str | None = None
    found: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PastAnswer:
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
    """None where it was not kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastCall:
    """A call with all that is needed to check it."""

    call: Call
    """Its raw bytes decoded; None also where they cannot be. Without its headers and notes, which prove nothing."""
    source: PayloadSource | None
    """What its request was made of; None where a flaw says why."""
    answer: PastAnswer | None
    """The turn, where this call gave it. None for an attempt that another one followed, for a call of no turn, and
    where the turn is not there yet."""
    usages: tuple[Usage, ...] | None
    """Of all calls of the turn up to this one; None where the walk has not met them all."""
    continued: tuple[bytes | None, ...] = ()
    """The raw bytes of the calls of the same turn that this one continues, in order; None where they are gone."""
    flaws: tuple[Flaw, ...] = ()


class WalkedConversation(Protocol):
    """One conversation on the way."""

    @property
    def id(self) -> str:
        """Its id."""
        ...

    def items(self) -> AsyncIterator[PastCall | Flaw]:
        """The calls of its turns in their order, then those of no turn; among them flaws that belong to no call."""
        ...

    async def is_there(self) -> bool:
        """False where it was erased meanwhile: what seems wrong with it then is not."""
        ...


class CallWalk(Protocol):
    """Stored calls, conversation by conversation."""

    def conversations(self, conversation_ids: Sequence[str], wanted: CallFilter) -> AsyncIterator[WalkedConversation]:
        """These conversations in this order, without those that are not there."""
        ...
