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
- **Announced.** What others may wait for (more of an answer, the end of a turn, a wish to cancel) is announced when it
  is durable, see `server.conversation.notifications`.
- **Flat.** `accept_turn`, `load_payload_source` and `finish_turn` are one round trip each, and none of them costs more
  in a long conversation than in a short one with the same buffer.

Every method raises `DatabaseUnavailable` when the database does not answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Protocol, TypeAlias
from uuid import UUID

from server.conversation.assistant import Assistant, AssistantDefinition
from server.conversation.block import Blob, Block, JsonValue
from server.conversation.cache_register import RegisteredCache
from server.conversation.call import Call, CallEnd, CallStart, CallTrace, Chunk
from server.conversation.conversation import Conversation, ConversationDraft, Lease
from server.conversation.epoch import Epoch, EpochReason, Segment
from server.conversation.page import Page
from server.conversation.payload import LayerOrder
from server.conversation.turn import Native, StopReason, Turn, TurnKind, TurnState
from server.conversation.usage import Usage


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
    ticket: int | None = None
    """The place in the queue that it holds, if it had to wait; given up when the turn is accepted."""


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
    blocks: tuple[Block, ...] | None
    """For input turns always. For model turns where the native alone is not enough: they may hold tool calls, they did
    not complete, or another provider made them. None for the others."""
    provider: str | None
    model: str | None
    account: str | None
    prefix_hash: bytes | None
    """For model turns: that of the epoch in which they were made; None where no call was."""
    dynamic: bytes | None
    """For model turns: the dynamic block inside the input that they answered. None where it stood elsewhere, as the
    layered order has it, or nowhere."""
    language: str | None
    args: Mapping[str, JsonValue] | None
    output_tokens: int | None = None
    """For model turns: how many the provider counted, without reasoning."""
    reasoning_tokens: int | None = None
    """For model turns: how many more it counted as reasoning."""
    created_at: datetime | None = None
    """Of a turn that was read from the store."""
    model_version: str | None = None
    """For model turns: the model that the answer names. None where it names none, or it was not kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadSource:
    """All that a payload is built from, as of one moment."""

    conversation: Conversation
    assistant: Assistant
    """The conversation's version for a user task. Within a tool loop the one that began it: thinking and calls of an
    open loop belong to its tools and its texts."""
    epoch: Epoch | None
    """None before the first payload. `base_text` is empty where the static text is held already."""
    static_text: str | None
    """None where there is no epoch, or where its hash was among those held."""
    buffered: tuple[BufferedTurn, ...]
    """From the buffer's start to the newest turn, the trigger included."""
    blobs: Mapping[str, Blob]
    """By the hex of their hash: those of the buffered turns, without the ones that are held."""
    previous_manifest: Sequence[Mapping[str, JsonValue]]
    """Of the newest call before the trigger; empty where there is none."""
    previous_order: LayerOrder | None
    """Of the same call."""
    previous_prefix_hash: bytes | None
    """Of the same call's epoch."""
    previous_epoch: int | None = None
    """The same call's epoch."""
    previous_container: Mapping[str, JsonValue] | None = None
    """The same call's note about the provider's container that it used, see `server.providers.continuation`."""
    previous_call: CallTrace | None = None
    """The same call."""
    recent_call_times: tuple[datetime, ...] = ()
    """When it and the few before it left, newest first."""
    cache: RegisteredCache | None = None
    """The explicit cache that the conversation uses, whatever it stands for."""
    exchange_count: int = 0
    """Of the whole conversation up to now, those that were compacted included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildSource:
    """All that the payload of a past call was built from."""

    call: Call
    """Without its raw bytes."""
    source: PayloadSource
    """As it was then: the epoch of the call with its static text, the assistant's version of that epoch, the turns
    from the epoch's buffer start up to the trigger. The conversation is as it is now. A call of no turn has the turns
    up to the `last_seq` of its note, or none."""
    continued: tuple[bytes | None, ...] = ()
    """The raw bytes of the calls of the same turn that this one continues, in order; None where they are gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedSegments:
    """Segments of an older generation that a new one begins with, or goes on with."""

    generation: int
    from_position: int
    count: int
    to_position: int
    """Where the first of them stands in the new one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What a compaction works on, as of one moment."""

    source: PayloadSource
    """The buffer as a payload would have it, the newest turn included, running or not; without any blobs. The
    assistant is the epoch's version: its tools are those of the epoch's prefix."""
    segments: tuple[Segment, ...]
    """Those of the current epoch. Their texts are empty where the static text is held."""
    newest_generation: int
    """The highest that any segment has; 0 where there is none."""
    can_append_segment: bool
    """Whether the next segment of the epoch's generation can be written: it was never written before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochOutline:
    """An epoch without its texts, with the segment that was written when it began."""

    number: int
    reason: EpochReason
    assistant_version: int
    generation: int
    segment_count: int
    buffer_start_seq: int
    created_at: datetime
    last_segment: Segment | None
    """The newest of the epoch's segments, its text left empty, or what its signed summary would be as one; None where
    there is neither."""


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
    provider: str
    model: str
    account: str | None
    start: CallStart | None
    end: CallEnd | None
    """Both None where the turn ended before any call was made."""
    model_version: str | None = None
    """The model that the answer names."""
    ending: Mapping[str, JsonValue] = field(default_factory=dict)
    """What the provider said about the end, see `server.conversation.turn`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The answer is durable and the conversation is free."""

    revision: int
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationFilter:
    """Which conversations a list shows. What is None does not matter.

    Times count to the millisecond, by the clock of the process that made the conversation. `created_after` includes its
    own millisecond and `created_before` does not, so that a moment parts the list in two.
    """

    assistant_id: str | None = None
    identifier: str | None = None
    created_after: datetime | None = None
    created_before: datetime | None = None


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
    stored_bytes: int | None = None
    """What these rows take in the database, compressed as they are there; only a dry run counts it."""


AcceptOutcome: TypeAlias = Accepted | Duplicate


class Store(Protocol):
    """See the module for what holds for all methods."""

    async def create_assistant(self, tenant_id: str, definition: AssistantDefinition) -> Assistant:
        """Version 1 of a new assistant."""
        ...

    async def revise_assistant(
        self,
        tenant_id: str,
        assistant_id: str,
        definition: AssistantDefinition,
        *,
        expected_version: int | None = None,
    ) -> Assistant:
        """The next version. Conversations stay on theirs.

        Raises `AssistantNotFound`, and `AssistantRevised` where the newest version is not the expected one: of several
        who expect the same, one succeeds.
        """
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
        or not the lease's time is over, and also where others wait in the queue before the turn's ticket (without one:
        where anybody waits); `RevisionMismatch`; `HistoryRuleBroken` with the missing and unexpected ids. A duplicate
        is recognised before any of the last three.
        """
        ...

    async def find_duplicate(self, tenant_id: str, turn: NewInput) -> Duplicate | None:
        """What `accept_turn` would recognise the turn as, without writing anything.

        Raises `ConversationNotFound`, `IdempotencyKeyReused`.
        """
        ...

    async def enter_queue(
        self, tenant_id: str, conversation_id: str, *, limit: int, seconds: float, first: bool = False
    ) -> int:
        """A ticket for the conversation: behind all that wait, or before them. It lapses after so many seconds.

        Raises `ConversationNotFound`, `QueueFull` where `limit` others wait already (not for `first`).
        """
        ...

    async def renew_ticket(self, conversation_id: str, ticket: int, *, seconds: float) -> bool:
        """Moves its end on. False where it has lapsed and been cleared away: then a new one has to be drawn."""
        ...

    async def leave_queue(self, conversation_id: str, ticket: int) -> None:
        """Gives the ticket back. One that is gone is no error."""
        ...

    async def load_payload_source(
        self,
        tenant_id: str,
        conversation_id: str,
        *,
        cached_static_hashes: Sequence[bytes] = (),
        cached_blobs: Sequence[bytes] = (),
    ) -> PayloadSource:
        """Raises `ConversationNotFound`. `cached_blobs`: hashes of blobs that need not be read."""
        ...

    async def load_rebuild_source(
        self, tenant_id: str, conversation_id: str, turn_seq: int, attempt: int
    ) -> RebuildSource:
        """Raises `ConversationNotFound`, `CallNotFound`."""
        ...

    async def begin_epoch(
        self,
        tenant_id: str,
        conversation_id: str,
        epoch: Epoch,
        *,
        segment: Segment | None = None,
        copies: CopiedSegments | None = None,
        template_source: str | None = None,
        seen_next_seq: int | None = None,
    ) -> None:
        """Starts epoch `number`, which must follow the current one, and moves the buffer's start to the epoch's.

        `segment` is written with it, `copies` are brought along into the epoch's generation, and `template_source` is
        archived under the epoch's `template_hash`. `seen_next_seq` is the conversation's `next_seq` that the caller
        based its decision on; None if turns that were accepted since do not matter. Raises `EpochMoved` if another
        epoch has begun, or if `next_seq` differs from `seen_next_seq`; `ConversationNotFound`.
        """
        ...

    async def load_history(
        self, tenant_id: str, conversation_id: str, *, cached_static_hashes: Sequence[bytes] = ()
    ) -> History:
        """Raises `ConversationNotFound`."""
        ...

    async def load_segments(
        self, tenant_id: str, conversation_id: str, generation: int, count: int
    ) -> Sequence[Segment]:
        """The first so many segments of a generation, with their texts. Raises `ConversationNotFound`."""
        ...

    async def find_epoch_before(self, tenant_id: str, conversation_id: str, signed_summary: bytes) -> Epoch | None:
        """The epoch that the newest signed one with this signed summary has followed. Raises `ConversationNotFound`."""
        ...

    async def load_turns(self, tenant_id: str, conversation_id: str, first_seq: int, last_seq: int) -> Sequence[Turn]:
        """The turns from the one to the other, both included, those that there are. Raises `ConversationNotFound`."""
        ...

    async def list_epochs(
        self, tenant_id: str, conversation_id: str, *, cursor: str | None = None, limit: int = 20
    ) -> Page[EpochOutline]:
        """Those that moved the buffer's start or the history, newest first: compactions, undone ones, summaries.

        Raises `ConversationNotFound`, `CursorInvalid`.
        """
        ...

    async def record_call(
        self, tenant_id: str, conversation_id: str, call: Call, *, template_source: str | None = None
    ) -> bool:
        """Writes a call that belongs to no turn, such as a summary's. Its `turn_seq` is below zero.

        Again with an end, where it had none, completes it. False where another call has its number, which is told by
        its start's time and hash: then nothing is written. `template_source` is archived under its SHA-256 with a
        call that begins. Raises `ConversationNotFound`.
        """
        ...

    async def load_template(self, template_hash: bytes) -> str | None:
        """The source of a template that some epoch, or the question of some background call, was rendered from."""
        ...

    async def begin_call(self, lease: Lease, start: CallStart) -> None:
        """Records that a request leaves. Not awaited before it leaves. Raises `LeaseLost`."""
        ...

    async def end_call(self, lease: Lease, start: CallStart, end: CallEnd) -> None:
        """Records a call that another one will follow. Its chunks go. Raises `LeaseLost`."""
        ...

    async def append_chunks(self, lease: Lease, chunks: Sequence[Chunk], *, lease_seconds: float) -> bool:
        """Keeps raw bytes of a running call and moves the lease's expiry on: the heartbeat, with or without chunks.

        Whether somebody wants the turn to stop. Raises `LeaseLost`.
        """
        ...

    async def request_cancel(self, tenant_id: str, conversation_id: str, *, turn_seq: int | None = None) -> int:
        """Notes that the running turn should stop, whichever process runs it. Its number.

        Raises `ConversationNotFound`; `TurnNotRunning` where none runs, or not the one that was named.
        """
        ...

    async def finish_turn(self, lease: Lease, answer: NewAnswer) -> Finished:
        """Writes the model turn and its call, removes the chunks, gives the lease back.

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
        """The raw bytes of a running turn's calls so far, in order: of this attempt from the offset on, and of those
        that followed it. A call's pieces are gone once it has ended. Raises `ConversationNotFound`.
        """
        ...

    async def load_blob(self, tenant_id: str, sha256: bytes, *, conversation_id: str | None = None) -> Blob | None:
        """None where no turn refers to it: of the conversation, where one is named, else of the tenant."""
        ...

    async def list_expired_leases(
        self, *, conversation_id: str | None = None, limit: int = 100
    ) -> Sequence[tuple[str, Lease]]:
        """Leases whose time is over by the database's clock, with their tenants: of one conversation, or of all."""
        ...

    async def take_over_lease(self, lease: Lease, *, token: UUID, owner: str, lease_seconds: float) -> Lease:
        """The lease under a new token, if it is still expired and still the same. Raises `LeaseLost`."""
        ...

    async def fork_conversation(self, tenant_id: str, conversation_id: str, at_seq: int) -> Conversation:
        """A new conversation with the turns up to and including `at_seq`, and all that their requests were made of.

        It has their numbers, calls, raw bytes and blobs, and is in the epoch of the newest call among them, so that its
        next request begins with the bytes that the original's would have begun with. Where `at_seq` is an input turn,
        its answer is left behind: an empty cancelled model turn stands in its place. Idempotency keys do not come
        along. Its metadata, args, context, mode, source, direction and assistant version are copied, its identifier is
        not. It begins at revision 0, and the turns that came along have none.

        Raises `ConversationNotFound`, `TurnNotFound`. A running turn is no obstacle.
        """
        ...

    async def expire_leases(self, owner: str) -> int:
        """Ends the time of all leases of a process that stops, so that another may take them over at once."""
        ...

    async def erase_conversation(self, tenant_id: str, conversation_id: str, *, dry_run: bool = False) -> ErasureReport:
        """Everything of the conversation, in every table; blobs and caches with their last user.

        Raises `ConversationNotFound`, `ConversationBusy` while a turn runs.
        """
        ...
