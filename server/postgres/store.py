"""The store on Postgres.

The idea: a conversation is one small row that is locked briefly, and turns that are only ever added. The row knows the
next number, the pending calls, the buffer's start and who runs a turn, so accepting a turn reads no turn, and building
a payload reads the buffer and nothing before it. Everything that a provider said is kept as bytes; what lists show is
a projection of it.

How the promises of the port are kept:
- numbers: taken from the row by the same statement that inserts the turn; the row's lock orders the writers;
- leases: a token in the row that every write of the running turn names in its WHERE;
- one round trip: accepting, loading and finishing are one statement each, and a statement is its own transaction;
- announcements: NOTIFY within the statement that writes what is announced;
- repetition: a turn remembers the lease that wrote it, a chunk its offset, a call its attempt.

Each method's statement and its reasons live in the module that it is delegated to.
"""

from collections.abc import Sequence
from uuid import UUID

from server.conversation.assistant import Assistant, AssistantDefinition
from server.conversation.block import Blob
from server.conversation.call import Call, CallEnd, CallStart, Chunk
from server.conversation.conversation import Conversation, ConversationDraft, Lease
from server.conversation.epoch import Epoch, Segment
from server.conversation.identifiers import CONVERSATION, decode_id
from server.conversation.page import Page
from server.conversation.store import (
    AcceptOutcome,
    ConversationChange,
    ConversationFilter,
    CopiedSegments,
    Duplicate,
    EpochOutline,
    ErasureReport,
    Finished,
    History,
    NewAnswer,
    NewInput,
    PayloadSource,
    RebuildSource,
)
from server.conversation.turn import Native, Turn
from server.postgres.compaction import epochs
from server.postgres.conversation import assistants, conversations
from server.postgres.conversation import erasure as erasing
from server.postgres.conversation import forks as forking
from server.postgres.engine import Database
from server.postgres.payload import loading
from server.postgres.payload.source_rows import RowCache
from server.postgres.turns import accept as accepting
from server.postgres.turns import leases, reading
from server.postgres.turns import queue as queueing
from server.postgres.turns import running as finishing

_EVERYTHING = ConversationFilter()


class PostgresStore:
    """Implements `server.conversation.store.Store`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._held = RowCache()

    async def create_assistant(self, tenant_id: str, definition: AssistantDefinition) -> Assistant:
        return await assistants.create_assistant(self._database, tenant_id, definition)

    async def revise_assistant(
        self,
        tenant_id: str,
        assistant_id: str,
        definition: AssistantDefinition,
        *,
        expected_version: int | None = None,
    ) -> Assistant:
        return await assistants.revise_assistant(self._database, tenant_id, assistant_id, definition, expected_version)

    async def load_assistant(self, tenant_id: str, assistant_id: str, version: int | None = None) -> Assistant:
        return await assistants.load_assistant(self._database, tenant_id, assistant_id, version)

    async def list_assistants(self, tenant_id: str, *, cursor: str | None = None, limit: int = 20) -> Page[Assistant]:
        return await assistants.list_assistants(self._database, tenant_id, cursor, limit)

    async def create_conversation(self, tenant_id: str, draft: ConversationDraft) -> Conversation:
        return await conversations.create_conversation(self._database, tenant_id, draft)

    async def load_conversation(self, tenant_id: str, conversation_id: str) -> Conversation:
        return await conversations.load_conversation(self._database, tenant_id, conversation_id)

    async def list_conversations(
        self,
        tenant_id: str,
        *,
        filters: ConversationFilter = _EVERYTHING,
        cursor: str | None = None,
        limit: int = 20,
    ) -> Page[Conversation]:
        return await conversations.list_conversations(self._database, tenant_id, filters, cursor, limit)

    async def change_conversation(
        self,
        tenant_id: str,
        conversation_id: str,
        change: ConversationChange,
        *,
        expected_revision: int | None = None,
    ) -> Conversation:
        return await conversations.change_conversation(
            self._database, tenant_id, conversation_id, change, expected_revision
        )

    async def accept_turn(self, tenant_id: str, turn: NewInput) -> AcceptOutcome:
        return await accepting.accept_turn(self._database, tenant_id, turn)

    async def find_duplicate(self, tenant_id: str, turn: NewInput) -> Duplicate | None:
        return await accepting.find_duplicate(self._database, tenant_id, turn)

    async def enter_queue(
        self, tenant_id: str, conversation_id: str, *, limit: int, seconds: float, first: bool = False
    ) -> int:
        return await queueing.enter_queue(
            self._database, tenant_id, conversation_id, limit=limit, seconds=seconds, first=first
        )

    async def keep_ticket(self, conversation_id: str, ticket: int, *, seconds: float) -> bool:
        return await queueing.keep_ticket(self._database, conversation_id, ticket, seconds)

    async def leave_queue(self, conversation_id: str, ticket: int) -> None:
        await queueing.leave_queue(self._database, conversation_id, ticket)

    async def load_payload_source(
        self,
        tenant_id: str,
        conversation_id: str,
        *,
        held_static_hashes: Sequence[bytes] = (),
        held_blobs: Sequence[bytes] = (),
    ) -> PayloadSource:
        return await loading.load_payload_source(
            self._database,
            self._held,
            tenant_id,
            conversation_id,
            held_static_hashes=held_static_hashes,
            held_blobs=held_blobs,
        )

    async def load_rebuild_source(
        self, tenant_id: str, conversation_id: str, turn_seq: int, attempt: int
    ) -> RebuildSource:
        return await loading.load_rebuild_source(
            self._database, self._held, tenant_id, conversation_id, turn_seq=turn_seq, attempt=attempt
        )

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
        await epochs.begin_epoch(
            self._database,
            tenant_id,
            conversation_id,
            epoch,
            segment=segment,
            copies=copies,
            template_source=template_source,
            seen_next_seq=seen_next_seq,
        )

    async def load_history(
        self, tenant_id: str, conversation_id: str, *, held_static_hashes: Sequence[bytes] = ()
    ) -> History:
        return await loading.load_history(
            self._database, self._held, tenant_id, conversation_id, held_static_hashes=held_static_hashes
        )

    async def load_segments(
        self, tenant_id: str, conversation_id: str, generation: int, count: int
    ) -> Sequence[Segment]:
        return await epochs.load_segments(self._database, tenant_id, conversation_id, generation, count)

    async def find_epoch_before(self, tenant_id: str, conversation_id: str, signed_summary: bytes) -> Epoch | None:
        return await epochs.find_epoch_before(self._database, tenant_id, conversation_id, signed_summary)

    async def load_turns(self, tenant_id: str, conversation_id: str, first_seq: int, last_seq: int) -> Sequence[Turn]:
        return await reading.load_turns(self._database, tenant_id, conversation_id, first_seq, last_seq)

    async def list_epochs(
        self, tenant_id: str, conversation_id: str, *, cursor: str | None = None, limit: int = 20
    ) -> Page[EpochOutline]:
        return await epochs.list_epochs(self._database, tenant_id, conversation_id, cursor, limit)

    async def record_call(
        self, tenant_id: str, conversation_id: str, call: Call, *, template_source: str | None = None
    ) -> bool:
        return await finishing.record_call(self._database, tenant_id, conversation_id, call, template_source)

    async def load_template(self, template_hash: bytes) -> str | None:
        return await epochs.load_template(self._database, template_hash)

    async def begin_call(self, lease: Lease, start: CallStart) -> None:
        await finishing.begin_call(self._database, lease, start)

    async def end_call(self, lease: Lease, start: CallStart, end: CallEnd) -> None:
        await finishing.end_call(self._database, lease, start, end)

    async def append_chunks(self, lease: Lease, chunks: Sequence[Chunk], *, lease_seconds: float) -> bool:
        return await finishing.append_chunks(self._database, lease, chunks, lease_seconds)

    async def request_cancel(self, tenant_id: str, conversation_id: str, *, turn_seq: int | None = None) -> int:
        return await leases.request_cancel(self._database, tenant_id, conversation_id, turn_seq)

    async def finish_turn(self, lease: Lease, answer: NewAnswer) -> Finished:
        finished = await finishing.finish_turn(self._database, lease, answer)
        conversation = decode_id(CONVERSATION, lease.conversation_id)
        if answer.start is not None and conversation is not None:
            self._held.hold_manifest(conversation, answer.start)
        return finished

    async def load_turn(self, tenant_id: str, conversation_id: str, seq: int) -> Turn:
        return await reading.load_turn(self._database, tenant_id, conversation_id, seq)

    async def load_native(self, tenant_id: str, conversation_id: str, seq: int) -> Native:
        return await reading.load_native(self._database, tenant_id, conversation_id, seq)

    async def list_turns(
        self,
        tenant_id: str,
        conversation_id: str,
        *,
        cursor: str | None = None,
        limit: int = 20,
        newest_first: bool = False,
    ) -> Page[Turn]:
        return await reading.list_turns(
            self._database, tenant_id, conversation_id, cursor, limit, newest_first=newest_first
        )

    async def list_calls(self, tenant_id: str, conversation_id: str, turn_seq: int) -> Sequence[Call]:
        return await reading.list_calls(self._database, tenant_id, conversation_id, turn_seq)

    async def list_chunks(
        self, tenant_id: str, conversation_id: str, turn_seq: int, *, attempt: int, from_offset: int = 0
    ) -> Sequence[Chunk]:
        return await reading.list_chunks(
            self._database, tenant_id, conversation_id, turn_seq, attempt=attempt, from_offset=from_offset
        )

    async def load_blob(self, tenant_id: str, sha256: bytes, *, conversation_id: str | None = None) -> Blob | None:
        return await reading.load_blob(self._database, tenant_id, sha256, conversation_id)

    async def list_expired_leases(
        self, *, conversation_id: str | None = None, limit: int = 100
    ) -> Sequence[tuple[str, Lease]]:
        return await leases.list_expired_leases(self._database, conversation_id, limit)

    async def take_over_lease(self, lease: Lease, *, token: UUID, owner: str, lease_seconds: float) -> Lease:
        return await leases.take_over_lease(self._database, lease, token, owner, lease_seconds)

    async def fork_conversation(self, tenant_id: str, conversation_id: str, at_seq: int) -> Conversation:
        return await forking.fork_conversation(self._database, tenant_id, conversation_id, at_seq)

    async def surrender_leases(self, owner: str) -> int:
        return await leases.surrender_leases(self._database, owner)

    async def erase_conversation(self, tenant_id: str, conversation_id: str, *, dry_run: bool = False) -> ErasureReport:
        return await erasing.erase_conversation(self._database, tenant_id, conversation_id, dry_run=dry_run)
