"""The store port: conversations, their turns and calls.

Every implementation promises the following, and `tests/contracts/store_contract.py` checks it:

- **Bound to a tenant.** An object of another tenant is not found, and no method reveals that it exists.
- **Ordered by `seq`.** It is assigned in the transaction that writes the turn: 1, 2, 3, without gaps or repetitions,
  for any number of writers and whatever their clocks show.
- **One writer.** `accept_turn` takes the conversation's lease, and everything else that writes a turn must hold it. A
  lease does not end by itself: after its expiry any process can take it over with `take_over_lease`, and then the old
  token is invalid.
- **Atomic.** Each method is one transaction. When it has returned, its effect is durable.
- **Repeatable.** Methods that write a turn, a call or chunks can be repeated after a lost response and have the effect
  of one call.
- **Exact.** Any text is returned as it was stored, including NUL bytes and lone surrogates, and so are any bytes.
- **Announced.** Changes that other processes may wait for (more of an answer, the end of a turn, a cancellation) are
  announced when they are durable, see `server.conversation.notifications`.
- **Constant cost.** `accept_turn`, `load_payload_source` and `finish_turn` are one round trip each, and cost no more in
  a long conversation than in a short one with the same buffer.

Every method raises `DatabaseUnavailable` if the database does not answer.
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
from server.conversation.payload import LayerOrder, ManifestEntry
from server.conversation.turn import Native, StopReason, Turn, TurnKind, TurnState
from server.conversation.usage import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class NewInput:
    """An input turn to be accepted, and the lease to take for answering it."""

    conversation_id: str
    kind: TurnKind
    """`user_task` or `tool_response`."""
    blocks: tuple[Block, ...]
    body_hash: bytes
    """SHA-256 of the request, to distinguish a retry from a reused key."""
    lease_token: UUID
    """New for every request; the same token repeats the request."""
    lease_owner: str
    lease_seconds: float
    blobs: tuple[Blob, ...] = ()
    answers: tuple[str, ...] = ()
    """For tool responses: the ids of the calls that they answer."""
    abandons_calls: bool = False
    """For a user task: pending calls are abandoned."""
    language: str | None = None
    args: Mapping[str, JsonValue] | None = None
    idempotency_key: str | None = None
    announces_retry: bool = False
    """The client states that it has sent this before. Without a key it is recognised by `body_hash`."""
    expected_revision: int | None = None
    ticket: int | None = None
    """Its position in the queue, if it had to wait. Released when the turn is accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The turn is durable, and the caller has the lease."""

    seq: int
    revision: int
    lease: Lease


@dataclass(frozen=True, slots=True, kw_only=True)
class Duplicate:
    """The turn was accepted before; nothing was written."""

    seq: int
    answer_seq: int
    running: bool
    """Whether its answer is still being generated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferedTurn:
    """A turn as a payload needs it."""

    seq: int
    kind: TurnKind
    state: TurnState
    native: Native
    blocks: tuple[Block, ...] | None
    """Always for input turns. For model turns only if the native bytes are not sufficient: they may contain tool calls,
    did not complete, or come from another provider. Otherwise None."""
    provider: str | None
    model: str | None
    account: str | None
    prefix_hash: bytes | None
    """For model turns: that of their epoch; None if they had no call."""
    dynamic: bytes | None
    """For model turns: the dynamic block inside the input that they answered. None if it was elsewhere, as in the
    layered order, or absent."""
    language: str | None
    args: Mapping[str, JsonValue] | None
    output_tokens: int | None = None
    """For model turns: the reported output tokens, without reasoning."""
    reasoning_tokens: int | None = None
    """For model turns: the reported reasoning tokens."""
    created_at: datetime | None = None
    """For turns that were loaded from the store."""
    input_time: str | None = None
    """For model turns in the layered order: the text with the time inside the user task that they answered; see
    `server.payload.dynamic_clock`."""
    model_version: str | None = None
    """For model turns: the model that the response names. None if it names none, or it was not stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadSource:
    """Everything that a payload is built from, at one point in time."""

    conversation: Conversation
    assistant: Assistant
    """For a user task: the conversation's version. Within a tool loop: the version that began the loop, because its
    thinking and calls belong to that version's tools and texts."""
    epoch: Epoch | None
    """None before the first payload. `base_text` is empty if the static text is cached."""
    static_text: str | None
    """None if there is no epoch, or if its hash was among the cached ones."""
    buffered: tuple[BufferedTurn, ...]
    """From the start of the buffer to the newest turn, including the trigger."""
    blobs: Mapping[str, Blob]
    """By the hex of their hash: those of the buffered turns, except the cached ones."""
    previous_manifest: tuple[ManifestEntry, ...]
    """Of the newest call before the trigger; empty if there is none. The other `previous_` fields are of
    the same call."""
    previous_order: LayerOrder | None
    previous_prefix_hash: bytes | None
    """Of its epoch."""
    previous_epoch: int | None = None
    previous_key: tuple[int, int] | None = None
    """Its turn and attempt."""
    previous_container: Mapping[str, JsonValue] | None = None
    """Its note about the provider's container that it used, see `server.providers.continuation`."""
    previous_call: CallTrace | None = None
    recent_call_times: tuple[datetime, ...] = ()
    """The start of it and of the few calls before it, newest first."""
    cache: RegisteredCache | None = None
    """The explicit cache that the conversation is registered for, whatever prefix it covers."""
    exchange_count: int = 0
    """Of the whole conversation so far, including compacted exchanges."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildSource:
    """Everything that the payload of a past call was built from."""

    call: Call
    """Without its raw bytes."""
    source: PayloadSource
    """As it was then: the epoch of the call with its static text, the assistant's version of that epoch, and the turns
    from the epoch's buffer start to the trigger. The conversation is as it is now. A call of no turn has the turns up
    to the `last_seq` of its note, or none."""
    continued: tuple[bytes | None, ...] = ()
    """The raw bytes of the calls of the same turn that this one continues, in order; None for removed ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedSegments:
    """Segments of an older generation that are copied into a new one."""

    generation: int
    from_position: int
    count: int
    to_position: int
    """The position of the first copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What a compaction works on, at one point in time."""

    source: PayloadSource
    """The buffer as for a payload, including the newest turn, running or not, without blobs. The assistant is the
    epoch's version, because its tools belong to the epoch's prefix."""
    segments: tuple[Segment, ...]
    """Those of the current epoch. Their texts are empty if the static text is cached."""
    newest_generation: int
    """The highest generation of any segment; 0 if there is none."""
    can_append_segment: bool
    """Whether the next position of the epoch's generation is free: it was never written."""


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
    """The newest of the epoch's segments, without its text, or its signed summary as a segment; None if there is
    neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewAnswer:
    """The end of a model turn, with its call."""

    blocks: tuple[Block, ...]
    native: Native
    state: TurnState
    stop_reason: StopReason | None
    error_code: str | None
    usage: Usage
    cost_usd: Decimal | None
    pending_call_ids: tuple[str, ...] = ()
    """Calls that the client has to answer. Empty for a turn that did not complete."""
    provider: str
    model: str
    account: str | None
    start: CallStart | None
    end: CallEnd | None
    """Both None if the turn ended before any call."""
    is_call_recorded: bool = False
    """The beginning of the call is durable. Of `start` only the warnings are stored again."""
    model_version: str | None = None
    """The model that the response names."""
    ending: Mapping[str, JsonValue] = field(default_factory=dict)
    """What the provider reported about the end, see `server.conversation.turn`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The answer is durable, and the lease is released."""

    revision: int
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationFilter:
    """Which conversations to list. None matches all.

    Times have millisecond precision, by the clock of the process that created the conversation. `created_after` is
    inclusive and `created_before` exclusive, so a point in time divides the list in two.
    """

    assistant_id: str | None = None
    identifier: str | None = None
    created_after: datetime | None = None
    created_before: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationChange:
    """An edit of a conversation. None leaves a field unchanged."""

    assistant_version: int | None = None
    args: Mapping[str, JsonValue] | None = None
    context: Mapping[str, JsonValue] | None = None
    metadata: Mapping[str, JsonValue] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ErasureReport:
    """The erased rows by table, or those that would be erased. Tables without rows are omitted."""

    rows: Mapping[str, int]
    stored_bytes: int | None = None
    """The size of these rows in the database, compressed. Only for a dry run."""


AcceptOutcome: TypeAlias = Accepted | Duplicate


class Store(Protocol):
    """See the module for the promises of all methods."""

    async def create_assistant(self, tenant_id: str, definition: AssistantDefinition) -> Assistant:
        """Create version 1 of a new assistant."""
        ...

    async def revise_assistant(
        self,
        tenant_id: str,
        assistant_id: str,
        definition: AssistantDefinition,
        *,
        expected_version: int | None = None,
    ) -> Assistant:
        """Create the next version. Conversations keep theirs.

        Raises `AssistantNotFound`, and `AssistantRevised` if the latest version is not the expected one: of several
        writers that expect the same version, one succeeds.
        """
        ...

    async def load_assistant(self, tenant_id: str, assistant_id: str, version: int | None = None) -> Assistant:
        """Load a version, or the latest. Raises `AssistantNotFound`."""
        ...

    async def list_assistants(self, tenant_id: str, *, cursor: str | None = None, limit: int = 20) -> Page[Assistant]:
        """List the latest version of each assistant, newest assistant first. Raises `CursorInvalid`."""
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
        """Edit a conversation and count a revision, even while a turn runs: the turn keeps what it has loaded.

        Raises `ConversationNotFound`, `AssistantNotFound` (for an unknown version), `RevisionMismatch`.
        """
        ...

    async def accept_turn(self, tenant_id: str, turn: NewInput) -> AcceptOutcome:
        """Check the input, take the lease, and write the input turn.

        Raises, in this order of precedence: `ConversationNotFound`; `IdempotencyKeyReused`; `ConversationBusy`, whether
        or not the lease has expired, and also if others are in the queue before the turn's ticket (without a ticket: if
        any are); `RevisionMismatch`; `HistoryRuleBroken` with the missing and unexpected ids. A duplicate is recognised
        before any of the last three.
        """
        ...

    async def find_duplicate(self, tenant_id: str, turn: NewInput) -> Duplicate | None:
        """Return the duplicate that `accept_turn` would recognise, without writing anything.

        Raises `ConversationNotFound`, `IdempotencyKeyReused`.
        """
        ...

    async def enter_queue(
        self, tenant_id: str, conversation_id: str, *, limit: int, seconds: float, first: bool = False
    ) -> int:
        """Add a ticket to the queue of the conversation, at its end or at its start. It expires after this time.

        Raises `ConversationNotFound`, and `QueueFull` if `limit` others are waiting (not for `first`).
        """
        ...

    async def renew_ticket(self, conversation_id: str, ticket: int, *, seconds: float) -> bool:
        """Extend a ticket. False if it has expired and was removed: the caller needs a new one."""
        ...

    async def leave_queue(self, conversation_id: str, ticket: int) -> None:
        """Remove a ticket. A missing ticket is no error."""
        ...

    async def load_payload_source(
        self,
        tenant_id: str,
        conversation_id: str,
        *,
        cached_static_hashes: Sequence[bytes] = (),
        cached_blobs: Sequence[bytes] = (),
        cached_turns: tuple[BufferedTurn, ...] = (),
        cached_provider: str | None = None,
    ) -> PayloadSource:
        """Raises `ConversationNotFound`. Texts and blobs with the given hashes are not loaded.

        `cached_turns` are consecutive turns of an earlier buffer, which was loaded while the assistant had
        `cached_provider`. They become part of the result and are not loaded again, if they are still a part of the
        buffer.
        """
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
        """Begin epoch `number`, which must follow the current one, and set the start of the buffer to the epoch's.

        `segment` is written with it, `copies` are copied into the epoch's generation, and `template_source` is archived
        under the epoch's `template_hash`. `seen_next_seq` is the conversation's `next_seq` that the caller based its
        decision on; None if turns that were accepted since do not matter. Raises `EpochMoved` if another epoch has
        begun, or if `next_seq` differs from `seen_next_seq`; `ConversationNotFound`.
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
        """Load the first `count` segments of a generation, with their texts. Raises `ConversationNotFound`."""
        ...

    async def find_epoch_before(self, tenant_id: str, conversation_id: str, signed_summary: bytes) -> Epoch | None:
        """Find the epoch before the newest one that introduced this signed summary. Raises `ConversationNotFound`."""
        ...

    async def load_turns(self, tenant_id: str, conversation_id: str, first_seq: int, last_seq: int) -> Sequence[Turn]:
        """Load the existing turns of a range, both ends included. Raises `ConversationNotFound`."""
        ...

    async def list_epochs(
        self, tenant_id: str, conversation_id: str, *, cursor: str | None = None, limit: int = 20
    ) -> Page[EpochOutline]:
        """List the epochs that changed the buffer's start or the history, newest first: compactions, undone ones,
        summaries.

        Raises `ConversationNotFound`, `CursorInvalid`.
        """
        ...

    async def record_call(
        self, tenant_id: str, conversation_id: str, call: Call, *, template_source: str | None = None
    ) -> bool:
        """Write a call that belongs to no turn, such as that of a summary. Its `turn_seq` is negative.

        A repeated call with an end completes a call without one. Returns False without writing if another call, with
        another start time and hash, has its number. `template_source` is archived under its SHA-256 with the start of a
        call. Raises `ConversationNotFound`.
        """
        ...

    async def load_template(self, template_hash: bytes) -> str | None:
        """Load the source of a template that an epoch, or the prompt of a background call, was rendered from."""
        ...

    async def begin_call(self, lease: Lease, start: CallStart) -> None:
        """Record that a request is being sent. The request does not wait for it. Raises `LeaseLost`."""
        ...

    async def end_call(self, lease: Lease, start: CallStart, end: CallEnd) -> None:
        """Record a call that is followed by another one, and remove its chunks. Raises `LeaseLost`."""
        ...

    async def append_chunks(self, lease: Lease, chunks: Sequence[Chunk], *, lease_seconds: float) -> bool:
        """Write raw bytes of a running call, if any, and renew the lease.

        Returns whether a cancellation was requested. Raises `LeaseLost`.
        """
        ...

    async def request_cancel(self, tenant_id: str, conversation_id: str, *, turn_seq: int | None = None) -> int:
        """Request the cancellation of the running turn, in whichever process it runs. Returns its number.

        Raises `ConversationNotFound`, and `TurnNotRunning` if no turn runs, or not the given one.
        """
        ...

    async def request_growth_notifications(
        self, tenant_id: str, conversation_id: str, turn_seq: int, *, seconds: float
    ) -> None:
        """Have the growth of a running turn announced for this long (`Notification.GROWN`).

        Chunks that a later read does not return are announced. Does nothing if the turn does not run.
        """
        ...

    async def finish_turn(self, lease: Lease, answer: NewAnswer) -> Finished:
        """Write the model turn and its call, remove the chunks, and release the lease.

        Raises `LeaseLost`, except if the same turn was written before with the same lease.
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
        """List all calls of a turn with their raw bytes, oldest first. Raises `ConversationNotFound`."""
        ...

    async def list_chunks(
        self, tenant_id: str, conversation_id: str, turn_seq: int, *, attempt: int, from_offset: int = 0
    ) -> Sequence[Chunk]:
        """List the raw bytes of a running turn's calls so far, in order: of this attempt from the offset on, and of
        later attempts.

        The chunks of a call are removed when it ends. Raises `ConversationNotFound`.
        """
        ...

    async def load_blob(self, tenant_id: str, sha256: bytes, *, conversation_id: str | None = None) -> Blob | None:
        """None if no turn of the conversation, or without one of the tenant, references it."""
        ...

    async def list_expired_leases(
        self, *, conversation_id: str | None = None, limit: int = 100
    ) -> Sequence[tuple[str, Lease]]:
        """List the leases that have expired by the database's clock, with their tenants: of one conversation, or of
        all.
        """
        ...

    async def take_over_lease(self, lease: Lease, *, token: UUID, owner: str, lease_seconds: float) -> Lease:
        """Take over a lease with a new token, if it is still expired and unchanged. Raises `LeaseLost`."""
        ...

    async def fork_conversation(self, tenant_id: str, conversation_id: str, at_seq: int) -> Conversation:
        """Create a conversation with the turns up to and including `at_seq`, and everything that their requests were
        built from.

        It has their numbers, calls, raw bytes and blobs, and the epoch of the newest call among them, so its next
        request begins with the same bytes as the original's would. If `at_seq` is an input turn, its answer is replaced
        by an empty cancelled model turn. Idempotency keys are not copied. Metadata, args, context, mode, source,
        direction and assistant version are copied, the identifier is not. The fork begins at revision 0, and the copied
        turns have no revision.

        Raises `ConversationNotFound`, `TurnNotFound`. A running turn does not prevent a fork.
        """
        ...

    async def expire_leases(self, owner: str) -> int:
        """End all leases of a process that stops, so that others can take them over at once."""
        ...

    async def erase_conversation(self, tenant_id: str, conversation_id: str, *, dry_run: bool = False) -> ErasureReport:
        """Erase the conversation from every table, and blobs and caches that it was the last to use.

        Raises `ConversationNotFound`, `ConversationBusy` while a turn runs.
        """
        ...
