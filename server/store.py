"""The store port: where conversations live.

What every implementation promises, and `tests/contracts/store_contract.py` checks:

- **Bound to a tenant.** An object of another tenant is not found; no method tells that it exists.
- **Order is `seq`.** It is assigned in the transaction that writes the turn: 1, 2, 3, without gaps or repeats, whatever
  the number of writers and whatever their clocks say.
- **One writer.** `accept_turn` takes the conversation's lease, and everything else that writes a turn must hold it. A
  lease never ends by itself: after its time anybody may take it over with `take_over_lease`, and then the old token is
  worth nothing.
- **Whole or not at all.** Each method is one transaction. What it returned from is durable.
- **Repeatable.** What writes a turn, a call or chunks can be sent again after a lost answer and has the effect of one.
- **Byte for byte.** Any text comes back as it went in, NUL bytes and lone surrogates included, any bytes likewise.
- **Flat.** `accept_turn`, `load_payload_source` and `finish_turn` are one round trip each, and none of them costs more
  in a long conversation than in a short one with the same buffer.

Every method raises `DatabaseUnavailable` when the database does not answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Protocol, TypeAlias
from uuid import UUID

from server.assistant import Assistant, AssistantDefinition
from server.block import Blob, Block, JsonValue
from server.call import Call, CallEnd, CallStart, Chunk
from server.conversation import Conversation, ConversationDraft, Lease
from server.epoch import Epoch, Segment
from server.page import Page
from server.turn import Native, StopReason, Turn, TurnKind, TurnState
from server.usage import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class NewInput:
    """An input turn that wants to be accepted, and the lease to take for answering it."""

    conversation_id: str
    kind: TurnKind
    """`user_task` or `tool_response`."""
    blocks: tuple[Block, ...]
    body_hash: bytes
    """SHA-256 of the request: tells a retry from a reused key."""
    lease_token: UUID
    """New for every request; sending the same again is a repetition of it."""
    lease_owner: str
    lease_seconds: float
    blobs: tuple[Blob, ...] = ()
    answers: tuple[str, ...] = ()
    """For tool responses: the ids of the calls that are answered."""
    abandons_calls: bool = False
    """For a user task: pending calls are given up."""
    language: str | None = None
    args: Mapping[str, JsonValue] | None = None
    idempotency_key: str | None = None
    announces_retry: bool = False
    """The client says that it sent this before: without a key it is recognised by `body_hash`."""
    expected_revision: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The turn is durable and the caller holds the conversation."""

    seq: int
    revision: int
    lease: Lease


@dataclass(frozen=True, slots=True, kw_only=True)
class Duplicate:
    """The turn was accepted before; nothing was written now."""

    seq: int
    answer_seq: int
    running: bool
    """Whether its answer is still on its way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferedTurn:
    """A turn as a payload needs it."""

    seq: int
    kind: TurnKind
    state: TurnState
    native: Native
    provider: str | None
    model: str | None
    account: str | None
    dynamic: bytes | None
    """For model turns: the dynamic layer that they answered."""
    language: str | None
    args: Mapping[str, JsonValue] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadSource:
    """All that a payload is built from, as of one moment."""

    conversation: Conversation
    assistant: Assistant
    epoch: Epoch | None
    """None before the first payload. `base_text` is empty where the static text is held already."""
    static_text: str | None
    """None where there is no epoch, or where its hash was among those held."""
    buffered: tuple[BufferedTurn, ...]
    """From the buffer's start to the newest turn, the trigger included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewAnswer:
    """How a model turn ended, with the call that gave it."""

    blocks: tuple[Block, ...]
    native: Native
    state: TurnState
    stop_reason: StopReason | None
    error_code: str | None
    usage: Usage
    cost_usd: Decimal | None
    pending_call_ids: tuple[str, ...] = ()
    """Calls that the client has to answer next. Empty for a turn that did not complete."""
    start: CallStart
    end: CallEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationFilter:
    """Which conversations a list shows. What is None does not matter."""

    assistant_id: str | None = None
    identifier: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationChange:
    """An edit of a conversation. What is None stays."""

    assistant_version: int | None = None
    args: Mapping[str, JsonValue] | None = None
    context: Mapping[str, JsonValue] | None = None
    metadata: Mapping[str, JsonValue] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ErasureReport:
    """What went, or would go: rows by table. Tables without any are left out."""

    rows: Mapping[str, int]


AcceptOutcome: TypeAlias = Accepted | Duplicate


class Store(Protocol):
    """See the module for what holds for all methods."""

    async def create_assistant(self, tenant_id: str, definition: AssistantDefinition) -> Assistant:
        """Version 1 of a new assistant."""
        ...

    async def revise_assistant(self, tenant_id: str, assistant_id: str, definition: AssistantDefinition) -> Assistant:
        """The next version. Conversations stay on theirs. Raises `AssistantNotFound`."""
        ...

    async def load_assistant(self, tenant_id: str, assistant_id: str, version: int | None = None) -> Assistant:
        """A version, or the newest. Raises `AssistantNotFound`."""
        ...

    async def list_assistants(self, tenant_id: str, *, cursor: str | None = None, limit: int = 20) -> Page[Assistant]:
        """The newest version of each, newest assistant first. Raises `CursorInvalid`."""
        ...

    async def create_conversation(self, tenant_id: str, draft: ConversationDraft) -> Conversation:
        """Raises `AssistantNotFound`."""
        ...

    async def load_conversation(self, tenant_id: str, conversation_id: str) -> Conversation:
        """Raises `ConversationNotFound`."""
        ...

    async def list_conversations(
        self,
        tenant_id: str,
        *,
        filters: ConversationFilter = ConversationFilter(),  # noqa: B008  reason: frozen
        cursor: str | None = None,
        limit: int = 20,
    ) -> Page[Conversation]:
        """Newest first. Raises `CursorInvalid`."""
        ...

    async def change_conversation(
        self,
        tenant_id: str,
        conversation_id: str,
        change: ConversationChange,
        *,
        expected_revision: int | None = None,
    ) -> Conversation:
        """Counts as a revision, also while a turn runs: the turn keeps what it loaded.

        Raises `ConversationNotFound`, `AssistantNotFound` (no such version), `RevisionMismatch`.
        """
        ...

    async def accept_turn(self, tenant_id: str, turn: NewInput) -> AcceptOutcome:
        """Checks, takes the lease, and writes the input turn.

        Raises, in this order of precedence: `ConversationNotFound`; `IdempotencyKeyReused`; `ConversationBusy`, whether
        or not the lease's time is over; `RevisionMismatch`; `HistoryRuleBroken` with the missing and unexpected ids. A
        duplicate is recognised before any of the last three.
        """
        ...

    async def load_payload_source(
        self, tenant_id: str, conversation_id: str, *, held_static_hashes: Sequence[bytes] = ()
    ) -> PayloadSource:
        """Raises `ConversationNotFound`."""
        ...

    async def begin_epoch(
        self, tenant_id: str, conversation_id: str, epoch: Epoch, *, segment: Segment | None = None
    ) -> None:
        """Starts epoch `number`, which must follow the current one, and moves the buffer's start to the epoch's.

        `segment` is written with it. Raises `EpochMoved` where another epoch has begun, `ConversationNotFound`.
        """
        ...

    async def begin_call(self, lease: Lease, start: CallStart) -> None:
        """Records that a request leaves. Not awaited before it leaves. Raises `LeaseLost`."""
        ...

    async def end_call(self, lease: Lease, start: CallStart, end: CallEnd) -> None:
        """Records a call that another one will follow. Its chunks go. Raises `LeaseLost`."""
        ...

    async def append_chunks(self, lease: Lease, chunks: Sequence[Chunk], *, lease_seconds: float) -> None:
        """Keeps raw bytes of a running call and moves the lease's expiry on: the heartbeat, with or without chunks.

        Raises `LeaseLost`.
        """
        ...

    async def finish_turn(self, lease: Lease, answer: NewAnswer) -> int:
        """Writes the model turn and its call, removes the chunks, gives the lease back. The new revision.

        Raises `LeaseLost` unless this very turn was written before by the same lease.
        """
        ...

    async def load_turn(self, tenant_id: str, conversation_id: str, seq: int) -> Turn:
        """Raises `ConversationNotFound`, `TurnNotFound`."""
        ...

    async def load_native(self, tenant_id: str, conversation_id: str, seq: int) -> Native:
        """Raises `ConversationNotFound`, `TurnNotFound`."""
        ...

    async def list_turns(
        self,
        tenant_id: str,
        conversation_id: str,
        *,
        cursor: str | None = None,
        limit: int = 20,
        newest_first: bool = False,
    ) -> Page[Turn]:
        """Raises `ConversationNotFound`, `CursorInvalid`."""
        ...

    async def list_calls(self, tenant_id: str, conversation_id: str, turn_seq: int) -> Sequence[Call]:
        """All calls of a turn with their raw bytes, oldest first. Raises `ConversationNotFound`."""
        ...

    async def list_chunks(
        self, tenant_id: str, conversation_id: str, turn_seq: int, *, attempt: int, from_offset: int = 0
    ) -> Sequence[Chunk]:
        """The raw bytes of a running call so far, in order. Raises `ConversationNotFound`."""
        ...

    async def load_blob(self, tenant_id: str, sha256: bytes) -> Blob | None:
        """None where no turn of the tenant refers to it."""
        ...

    async def list_expired_leases(self, *, limit: int = 100) -> Sequence[tuple[str, Lease]]:
        """Leases whose time is over by the database's clock, with their tenants."""
        ...

    async def take_over_lease(self, lease: Lease, *, token: UUID, owner: str, lease_seconds: float) -> Lease:
        """The lease under a new token, if it is still expired and still the same. Raises `LeaseLost`."""
        ...

    async def surrender_leases(self, owner: str) -> int:
        """Ends the time of all leases of a process that stops, so that another may take them over at once."""
        ...

    async def erase_conversation(self, tenant_id: str, conversation_id: str, *, dry_run: bool = False) -> ErasureReport:
        """Everything of the conversation, in every table; blobs and caches with their last user.

        Raises `ConversationNotFound`, `ConversationBusy` while a turn runs.
        """
        ...
