"""A replay conversation, as an item writes it: its inputs, its assistant and its answers.

The lease of the item decides which process may write. The lease of a turn in a replay conversation is only a fence:
it expires at once, and the next process that claims the item takes it over, so that the previous one can no longer
write. Inputs and changes name the revision that they follow, so if two processes write, one of them fails.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from uuid import uuid4

from server.conversation.assistant import AssistantDefinition
from server.conversation.block import Blob, JsonValue, ToolResultBlock
from server.conversation.call import Call, CallEnd
from server.conversation.conversation import Conversation, Lease
from server.conversation.errors import ConversationBusy, Internal, LeaseLost, RevisionMismatch
from server.conversation.outages import retry_while_unavailable
from server.conversation.store import Accepted, ConversationChange, Finished, NewAnswer, NewInput, Store
from server.conversation.turn import StopReason, TurnKind, UserTaskTurn
from server.payload.arguments import hash_arguments
from server.replay.rerun.admission import ItemHalted
from server.replay.rerun.answers import read_answer
from server.replay.rerun.walk import WalkStep
from server.turns.recovery import TurnRecovery
from server.turns.stored import OpenFold

_EXPIRED_AT_ONCE: Final = 0.0
_MAX_LOST: Final = 5
"""After this number of lost calls an answer is not requested again: it may be the reason why the processes died."""
CALL_LOST: Final = "call_lost"
"""The error code of a call whose process died before the answer was complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTurn:
    """A turn without an answer."""

    lease: Lease
    calls: tuple[Call, ...]
    """The calls that other processes have made for it. All of them have ended."""

    @property
    def next_attempt(self) -> int:
        """The number of the next call."""
        return max((call.start.attempt for call in self.calls), default=0) + 1

    @property
    def ends(self) -> tuple[CallEnd, ...]:
        """The ends of its calls."""
        return tuple(call.end for call in self.calls if call.end is not None)

    def find_answer(self, folds: Mapping[str, OpenFold]) -> NewAnswer | None:
        """Return the answer if the last call is complete, or if too many calls were lost to make another one.

        A paused answer that was not continued does not count.
        """
        is_given_up = sum(end.error_code == CALL_LOST for end in self.ends) >= _MAX_LOST
        if not self.calls or not (is_given_up or self.ends[-1].error_code is None):
            return None
        answer = read_answer(self.calls, folds)
        return None if answer is None or answer.stop_reason is StopReason.PAUSED else answer


class ReplayConversation:
    """One replay conversation."""

    def __init__(
        self, store: Store, tenant_id: str, conversation: Conversation, recovery: TurnRecovery, owner: str
    ) -> None:
        self._store = store
        self._tenant_id = tenant_id
        self._recovery = recovery
        self._owner = owner
        self._conversation = conversation
        self._revision = conversation.revision
        self._left_open: OpenTurn | None = None
        self._definition: AssistantDefinition | None = None

    @property
    def id(self) -> str:
        """The id of the conversation."""
        return self._conversation.id

    async def take_over(self) -> None:
        """Fence the process that wrote the conversation before, and end the calls that it left open.

        Must precede every read. Raises `ItemHalted`.
        """
        for _, lease in await self._store.list_expired_leases(conversation_id=self.id):
            try:
                taken = await self._store.take_over_lease(
                    lease, token=uuid4(), owner=self._owner, lease_seconds=_EXPIRED_AT_ONCE
                )
            except LeaseLost as error:
                # The other process has just ended the turn.
                raise ItemHalted from error
            calls = await self._store.list_calls(self._tenant_id, self.id, taken.turn_seq)
            ended = [await self._recovery.end_call(self._tenant_id, taken, call, lost_code=CALL_LOST) for call in calls]
            self._left_open = OpenTurn(lease=taken, calls=tuple(ended))

    async def update(self, definition: AssistantDefinition, args: Mapping[str, JsonValue]) -> None:
        """Change the assistant and the args from the next task on. Raises `ItemHalted`."""
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

    def take_open_turn(self) -> OpenTurn | None:
        """Return the turn that the previous process left open, the first time only."""
        found, self._left_open = self._left_open, None
        return found

    async def open_turn(self, step: WalkStep, blobs: Sequence[Blob]) -> OpenTurn:
        """Store the input of a step. Raises `HistoryRuleBroken`, `ItemHalted`."""
        try:
            accepted = await self._store.accept_turn(self._tenant_id, self._input_of(step, blobs))
        except (ConversationBusy, RevisionMismatch) as error:
            raise ItemHalted from error
        if not isinstance(accepted, Accepted):
            raise Internal("A turn of a replay conversation has no idempotency key.")
        if accepted.lease.turn_seq != step.answer_seq:
            raise Internal("The replay conversation and its results disagree about the next turn.")
        self._revision = accepted.revision
        return OpenTurn(lease=accepted.lease, calls=())

    async def finish_turn(self, turn: OpenTurn, answer: NewAnswer) -> None:
        """Store an answer without a call of its own. Raises `LeaseLost`, `DatabaseUnavailable`."""
        self.turn_finished(await retry_while_unavailable(lambda: self._store.finish_turn(turn.lease, answer)))

    def turn_finished(self, finished: Finished) -> None:
        """Note the revision after the running turn was stored."""
        self._revision = finished.revision

    async def list_calls(self, turn_seq: int) -> tuple[Call, ...]:
        """List all calls of a turn, with their raw bytes."""
        return tuple(await self._store.list_calls(self._tenant_id, self.id, turn_seq))

    async def _change(self, change: ConversationChange) -> None:
        try:
            self._conversation = await self._store.change_conversation(
                self._tenant_id, self.id, change, expected_revision=self._revision
            )
        except RevisionMismatch as error:
            raise ItemHalted from error
        self._revision = self._conversation.revision

    def _input_of(self, step: WalkStep, blobs: Sequence[Blob]) -> NewInput:
        turn = step.input
        return NewInput(
            conversation_id=self.id,
            kind=TurnKind.USER_TASK if step.is_task else TurnKind.TOOL_RESPONSE,
            blocks=turn.blocks,
            body_hash=hashlib.sha256(b"%d" % step.position).digest(),
            lease_token=uuid4(),
            lease_owner=self._owner,
            lease_seconds=_EXPIRED_AT_ONCE,
            expected_revision=self._revision,
            blobs=tuple(blobs),
            answers=tuple(block.tool_call_id for block in turn.blocks if isinstance(block, ToolResultBlock)),
            abandons_calls=step.is_task,
            language=turn.language if isinstance(turn, UserTaskTurn) else None,
            args=turn.args,
        )
