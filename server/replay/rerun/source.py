"""What was recorded of a conversation, as far as replaying it needs it."""

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
from server.replay.rerun.result import AnswerFacts

_PAGE: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """One recorded answer, and what its request was made of."""

    call: Call | None
    """None where the answer came without one, as an imported turn or one that failed early."""
    definition: AssistantDefinition
    """Of the assistant that gave it; of the conversation's present one where that is not known."""
    arguments_hash: bytes | None
    args: Mapping[str, JsonValue] | None
    """The conversation's args that the static text was rendered with; None where they were not kept."""
    static: RenderedStatic | None
    """The static text up to where the history begins."""
    native: Native

    @property
    def manifest(self) -> Sequence[Mapping[str, JsonValue]]:
        """The blocks of its request; none where that is not known."""
        return () if self.call is None else self.call.start.manifest


class ReplaySource:
    """A recorded conversation, read once."""

    def __init__(self, store: Store, tenant_id: str, conversation: Conversation, turns: Sequence[Turn]) -> None:
        self._store = store
        self._tenant_id = tenant_id
        self._present: AssistantDefinition | None = None
        self.conversation = conversation
        self.turns = turns

    async def load_recorded_step(self, answer: ModelResponseTurn) -> RecordedStep:
        """Raises `ConversationNotFound` where it was erased meanwhile."""
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
        """Of a version of the conversation's assistant, or of another one. Raises `AssistantNotFound`."""
        wanted = assistant_id or self.conversation.assistant_id
        return (await self._store.load_assistant(self._tenant_id, wanted, version)).definition

    async def load_blobs(self, blocks: Sequence[Block]) -> tuple[Blob, ...]:
        """The images of an input."""
        hashes = {bytes.fromhex(block.sha256) for block in blocks if isinstance(block, ImageBlock)}
        found = [
            await self._store.load_blob(self._tenant_id, sha256, conversation_id=self.conversation.id)
            for sha256 in sorted(hashes)
        ]
        return tuple(blob for blob in found if blob is not None)

    async def _without_call(self, native: Native) -> RecordedStep:
        if self._present is None:
            self._present = await self.load_definition(None, self.conversation.assistant_version)
        return RecordedStep(
            call=None, definition=self._present, arguments_hash=None, args=None, static=None, native=native
        )

    async def _static_of(self, epoch: Epoch) -> RenderedStatic:
        """A text whose template is not in the archive stands for itself."""
        source = await self._store.load_template(epoch.template_hash)
        kept = epoch.base_text if source is None else source
        digest = hashlib.sha256(kept.encode("utf-8", "surrogatepass")).digest() if source is None else None
        return RenderedStatic(
            text=epoch.base_text, template_source=kept, template_hash=digest or epoch.template_hash, failures=()
        )


async def open_source(store: Store, tenant_id: str, conversation_id: str, *, until: datetime) -> ReplaySource:
    """The conversation as it was then, whoever goes on with it meanwhile. Raises `ConversationNotFound`."""
    conversation = await store.load_conversation(tenant_id, conversation_id)
    turns = await list_turns(store, tenant_id, conversation_id)
    return ReplaySource(store, tenant_id, conversation, [turn for turn in turns if turn.created_at <= until])


async def list_turns(store: Store, tenant_id: str, conversation_id: str) -> list[Turn]:
    """All turns of a conversation, oldest first. Raises `ConversationNotFound`."""
    turns: list[Turn] = []
    cursor: str | None = None
    while True:
        page = await store.list_turns(tenant_id, conversation_id, cursor=cursor, limit=_PAGE)
        turns.extend(page.items)
        cursor = page.next_cursor
        if cursor is None:
            return turns


def describe_recorded(turn: ModelResponseTurn, call: Call | None) -> AnswerFacts:
    """What a recorded answer took."""
    end = None if call is None else call.end
    return AnswerFacts(
        stop_reason=turn.stop_reason,
        error_code=turn.error_code,
        usage=turn.usage,
        cost_usd=turn.cost_usd,
        latency_ms=None if call is None or end is None else milliseconds(call, last=True),
        first_byte_ms=None if call is None or end is None else milliseconds(call, last=False),
    )


def milliseconds(call: Call, *, last: bool) -> int | None:
    """From a call's start to its first or its last byte; None where it never came."""
    if call.end is None:
        return None
    at = call.end.ended_at if last else call.end.first_byte_at
    return None if at is None else max(0, round((at - call.start.started_at).total_seconds() * 1000))
