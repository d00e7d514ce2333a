"""A replay conversation while it is written: its inputs, its assistant, its answers.

The item's lease says who may write. A replay conversation's own lease only fences: it is over the moment it is taken,
and whoever claims the item takes it over, so that a process that was believed dead can write nothing more. Inputs and
changes name the revision that they follow on: of two who believe that it is their turn, one is told that it is not.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final
from uuid import uuid4

from server.conversation.assistant import AssistantDefinition
from server.conversation.block import Blob, JsonValue, ToolResultBlock
from server.conversation.call import Call, CallEnd, CallStart
from server.conversation.conversation import Conversation, Lease
from server.conversation.errors import ConversationBusy, Internal, LeaseLost, RevisionMismatch
from server.conversation.store import Accepted, ConversationChange, NewAnswer, NewInput, Store
from server.conversation.turn import TurnKind, UserTaskTurn
from server.payload.arguments import hash_arguments
from server.replay.rerun.call import CALL_LOST, ItemHalted
from server.replay.rerun.renderer import ARGUMENTS_MARK
from server.replay.rerun.walk import WalkStep

_OVER_AT_ONCE: Final = 0.0
_MAX_LOST: Final = 5
"""An answer that so many processes have died over is not asked for again: it may be what they die of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTurn:
    """A turn that waits for its answer."""

    lease: Lease
    calls: tuple[Call, ...]
    """Those that were made for it before, all ended."""

    @property
    def next_attempt(self) -> int:
        """The number of the next call."""
        return max((call.start.attempt for call in self.calls), default=0) + 1

    @property
    def answered(self) -> Call | None:
        """The call that was answered before the turn could be ended; what it says is not asked for again."""
        ended = ((call, call.end) for call in self.calls if call.end is not None)
        return next((call for call, end in ended if end.error_code is None and end.raw_response), None)

    @property
    def given_up(self) -> Call | None:
        """The last call, where so many were lost that the next one would hardly fare better."""
        lost = [call for call in self.calls if call.end is not None and call.end.error_code == CALL_LOST]
        return self.calls[-1] if len(lost) >= _MAX_LOST else None

    @property
    def ends(self) -> tuple[CallEnd, ...]:
        """How they ended."""
        return tuple(call.end for call in self.calls if call.end is not None)


class ReplayConversation:
    """One replay conversation."""

    def __init__(self, store: Store, tenant_id: str, conversation: Conversation, owner: str) -> None:
        self._store = store
        self._tenant_id = tenant_id
        self._owner = owner
        self._conversation = conversation
        self._revision = conversation.revision
        self._left_open: OpenTurn | None = None
        self._definition: AssistantDefinition | None = None

    @property
    def id(self) -> str:
        """Of the conversation."""
        return self._conversation.id

    async def take_over(self) -> None:
        """Before anything is read of it: whoever wrote it before writes no answer any more.

        A turn that was left open is ours, and calls that it had open are lost. Raises `ItemHalted`.
        """
        for _, lease in await self._store.list_expired_leases(conversation_id=self.id):
            try:
                taken = await self._store.take_over_lease(
                    lease, token=uuid4(), owner=self._owner, lease_seconds=_OVER_AT_ONCE
                )
            except LeaseLost as error:
                # It was ended a moment ago.
                raise ItemHalted from error
            self._left_open = OpenTurn(lease=taken, calls=await self._end_lost_calls(taken))

    async def follow(self, definition: AssistantDefinition, args: Mapping[str, JsonValue]) -> None:
        """From the next task on it has this assistant and these args. Raises `ItemHalted`."""
        if self._definition is None:
            assistant = await self._store.load_assistant(
                self._tenant_id, self._conversation.assistant_id, self._conversation.assistant_version
            )
            self._definition = assistant.definition
        if definition != self._definition:
            revised = await self._store.revise_assistant(self._tenant_id, self._conversation.assistant_id, definition)
            await self._change(ConversationChange(assistant_version=revised.version))
            self._definition = definition
        if hash_arguments(args) != hash_arguments(self._conversation.args):
            await self._change(ConversationChange(args=args))

    def find_open_turn(self) -> OpenTurn | None:
        """The turn whose process died over its answer. It is given out once."""
        found, self._left_open = self._left_open, None
        return found

    async def open_turn(self, step: WalkStep, blobs: Sequence[Blob]) -> OpenTurn:
        """The step's input is there, and its answer may be written. Raises `HistoryRuleBroken`, `ItemHalted`."""
        try:
            accepted = await self._store.accept_turn(self._tenant_id, self._input_of(step, blobs))
        except (ConversationBusy, RevisionMismatch) as error:
            raise ItemHalted from error
        if not isinstance(accepted, Accepted):
            raise Internal("No turn of a replay conversation has a key.")
        if accepted.lease.turn_seq != 2 * step.place:
            raise Internal("A replay conversation is not where its results are.")
        self._revision = accepted.revision
        return OpenTurn(lease=accepted.lease, calls=())

    async def end_call(self, turn: OpenTurn, start: CallStart, end: CallEnd) -> None:
        """Makes the end of a call durable before the turn's. Raises `LeaseLost`."""
        await self._store.end_call(turn.lease, start, end)

    async def end_turn(self, turn: OpenTurn, answer: NewAnswer) -> None:
        """Makes the answer durable. Raises `LeaseLost`."""
        self._revision = (await self._store.finish_turn(turn.lease, answer)).revision

    async def list_calls(self, place: int) -> tuple[Call, ...]:
        """All calls of a step, with their raw bytes."""
        return tuple(await self._store.list_calls(self._tenant_id, self.id, 2 * place))

    async def _change(self, change: ConversationChange) -> None:
        try:
            self._conversation = await self._store.change_conversation(
                self._tenant_id, self.id, change, expected_revision=self._revision
            )
        except RevisionMismatch as error:
            raise ItemHalted from error
        self._revision = self._conversation.revision

    async def _end_lost_calls(self, lease: Lease) -> tuple[Call, ...]:
        calls = await self._store.list_calls(self._tenant_id, self.id, lease.turn_seq)
        ended: list[Call] = []
        for call in calls:
            end = call.end
            if end is None:
                end = CallEnd(ended_at=datetime.now(UTC), first_byte_at=None, status=None, error_code=CALL_LOST)
                await self._store.end_call(lease, call.start, end)
            ended.append(replace(call, end=end))
        return tuple(ended)

    def _input_of(self, step: WalkStep, blobs: Sequence[Blob]) -> NewInput:
        said = step.input
        return NewInput(
            conversation_id=self.id,
            kind=TurnKind.USER_TASK if step.is_task else TurnKind.TOOL_RESPONSE,
            blocks=said.blocks,
            body_hash=hashlib.sha256(b"%d" % step.place).digest(),
            lease_token=uuid4(),
            lease_owner=self._owner,
            lease_seconds=_OVER_AT_ONCE,
            expected_revision=self._revision,
            blobs=tuple(blobs),
            answers=tuple(block.tool_call_id for block in said.blocks if isinstance(block, ToolResultBlock)),
            abandons_calls=step.is_task,
            language=said.language if isinstance(said, UserTaskTurn) else None,
            args=said.args,
        )


def mark_arguments(args: Mapping[str, JsonValue], recorded_hash: bytes | None) -> dict[str, JsonValue]:
    """The args of a replay conversation: those of its source as they are now, marked where they were others when it
    was recorded.
    """
    if recorded_hash is None or recorded_hash == hash_arguments(args):
        return dict(args)
    return {**args, ARGUMENTS_MARK: recorded_hash.hex()}
