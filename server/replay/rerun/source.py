"""The recorded conversation that an item replays."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from server.conversation.assistant import AssistantDefinition
from server.conversation.block import Blob, Block, ImageBlock, JsonValue
from server.conversation.call import Call
from server.conversation.conversation import Conversation
from server.conversation.epoch import Epoch
from server.conversation.errors import CallNotFound
from server.conversation.store import Store
from server.conversation.turn import ModelResponseTurn, Native, Turn
from server.payload.renderer import RenderedStatic

_PAGE: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """One recorded answer, and the parts of its request."""

    call: Call | None
    """None if the answer has no call, such as an imported turn or one that failed early."""
    definition: AssistantDefinition
    """Of the assistant that answered; the conversation's current one if that is not known."""
    arguments_hash: bytes | None
    args: Mapping[str, JsonValue] | None
    """The conversation's args that the static text was rendered with; None if they were not stored."""
    static: RenderedStatic | None
    """The static text before the compacted history."""
    native: Native


class ReplaySource:
    """A recorded conversation, read once."""

    def __init__(self, store: Store, tenant_id: str, conversation: Conversation, turns: Sequence[Turn]) -> None:
        self._store = store
        self._tenant_id = tenant_id
        self._current: AssistantDefinition | None = None
        self.conversation = conversation
        self.turns = turns

    async def load_recorded_step(self, answer: ModelResponseTurn) -> RecordedStep:
        """Load the recording of an answer. Raises `ConversationNotFound` if it was erased meanwhile."""
        native = await self._store.load_native(self._tenant_id, self.conversation.id, answer.seq)
        if answer.attempt is None:
            return await self._without_call(native)
        try:
            rebuild = await self._store.load_rebuild_source(
                self._tenant_id, self.conversation.id, answer.seq, answer.attempt
            )
        except CallNotFound:
            return await self._without_call(native)
        epoch = rebuild.source.epoch
        return RecordedStep(
            call=rebuild.call,
            definition=rebuild.source.assistant.definition,
            arguments_hash=None if epoch is None else epoch.arguments_hash,
            args=None if epoch is None else epoch.args,
            static=None if epoch is None else await self._static_of(epoch),
            native=native,
        )

    async def load_definition(self, assistant_id: str | None, version: int | None) -> AssistantDefinition:
        """Load a version of the conversation's assistant, or of another one. Raises `AssistantNotFound`."""
        wanted = assistant_id or self.conversation.assistant_id
        return (await self._store.load_assistant(self._tenant_id, wanted, version)).definition

    async def load_blobs(self, blocks: Sequence[Block]) -> tuple[Blob, ...]:
        """Load the images of an input."""
        hashes = {bytes.fromhex(block.sha256) for block in blocks if isinstance(block, ImageBlock)}
        found = [
            await self._store.load_blob(self._tenant_id, sha256, conversation_id=self.conversation.id)
            for sha256 in sorted(hashes)
        ]
        return tuple(blob for blob in found if blob is not None)

    async def _without_call(self, native: Native) -> RecordedStep:
        if self._current is None:
            self._current = await self.load_definition(None, self.conversation.assistant_version)
        return RecordedStep(
            call=None, definition=self._current, arguments_hash=None, args=None, static=None, native=native
        )

    async def _static_of(self, epoch: Epoch) -> RenderedStatic:
        """Build the static text of an epoch. If its template is not stored, the text itself is its source."""
        source = await self._store.load_template(epoch.template_hash)
        template_hash = epoch.template_hash
        if source is None:
            source = epoch.base_text
            template_hash = hashlib.sha256(source.encode("utf-8", "surrogatepass")).digest()
        return RenderedStatic(text=epoch.base_text, template_source=source, template_hash=template_hash, failures=())


async def open_source(store: Store, tenant_id: str, conversation_id: str, *, until: datetime) -> ReplaySource:
    """Load the conversation with the turns that existed at this time. Raises `ConversationNotFound`."""
    conversation = await store.load_conversation(tenant_id, conversation_id)
    turns = await list_turns(store, tenant_id, conversation_id)
    return ReplaySource(store, tenant_id, conversation, [turn for turn in turns if turn.created_at <= until])


async def list_turns(store: Store, tenant_id: str, conversation_id: str) -> list[Turn]:
    """List all turns of a conversation, oldest first. Raises `ConversationNotFound`."""
    turns: list[Turn] = []
    cursor: str | None = None
    while True:
        page = await store.list_turns(tenant_id, conversation_id, cursor=cursor, limit=_PAGE)
        turns.extend(page.items)
        cursor = page.next_cursor
        if cursor is None:
            return turns
