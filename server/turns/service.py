"""Taking turns: the use case that everything else is for.

A turn belongs to the server and not to the connection that requested it. After a request has been read, everything
happens in a task of this process. The connection only listens, and can end at any time.
"""

import asyncio
import time
from uuid import uuid4

from server.conversation.conversation import ConversationState, OnBusy
from server.conversation.errors import CallLimitReached, ConversationBusy, Internal, ShuttingDown, TurnNotFound
from server.conversation.store import AcceptOutcome, Duplicate, NewInput
from server.providers.call_slots import Reservation
from server.turns.handle import TurnHandle
from server.turns.live import LiveHandle, LiveTurn
from server.turns.queue import TurnQueue
from server.turns.recovery import TurnRecovery
from server.turns.request import TurnRequest
from server.turns.runner import TurnRunner
from server.turns.running import RunningTurns
from server.turns.stored import StoredHandle, TurnLibrary
from server.turns.tools import TurnTools


class TurnService:
    """Takes turns, and finds turns to listen to and to cancel."""

    def __init__(self, tools: TurnTools, running_turns: RunningTurns) -> None:
        self._tools = tools
        self._running_turns = running_turns
        self._queue = TurnQueue(tools, running_turns)
        self._recovery = TurnRecovery(tools)
        self._library = TurnLibrary(store=tools.store, notifications=tools.notifications, folds=tools.folds)
        self._live: dict[tuple[str, int], LiveTurn] = {}

    async def take_turn(self, tenant_id: str, request: TurnRequest) -> TurnHandle:
        """Accept the input and begin the answer. Returns when the input is durable, or was accepted before.

        Cancelling this coroutine does not cancel the turn. Raises the errors of `Store.accept_turn`, `QueueFull`,
        `CallLimitReached` and `ShuttingDown`.
        """
        began = time.monotonic()
        accepted: asyncio.Future[TurnHandle] = asyncio.get_running_loop().create_future()
        self._running_turns.start(self._take(tenant_id, request, accepted, began), name="turn")
        return await asyncio.shield(accepted)

    async def follow_turn(self, tenant_id: str, conversation_id: str, seq: int) -> TurnHandle:
        """Return a turn to listen to: one that runs in any process, or one that has ended.

        Raises `ConversationNotFound`, `TurnNotFound`.
        """
        live = self._live.get((conversation_id, seq))
        if live is not None and live.tenant_id == tenant_id:
            return LiveHandle(live=live)
        if await self._library.find_answer(tenant_id, conversation_id, seq) is None:
            conversation = await self._tools.store.load_conversation(tenant_id, conversation_id)
            runs = conversation.state is ConversationState.RUNNING and conversation.next_seq == seq + 1
            # It may have ended between the two reads.
            if not runs and await self._library.find_answer(tenant_id, conversation_id, seq) is None:
                raise TurnNotFound
        return self._stored(tenant_id, conversation_id, seq)

    async def cancel_turn(self, tenant_id: str, conversation_id: str, turn_seq: int | None = None) -> TurnHandle:
        """Request that the running turn ends, in any process. Waiting on the handle returns when it has ended.

        Raises `ConversationNotFound`, `TurnNotRunning`.
        """
        seq = await self._tools.store.request_cancel(tenant_id, conversation_id, turn_seq=turn_seq)
        live = self._live.get((conversation_id, seq))
        if live is None:
            await self._recovery.recover(conversation_id)
            return self._stored(tenant_id, conversation_id, seq)
        live.request_cancel()
        return LiveHandle(live=live)

    async def _take(
        self, tenant_id: str, request: TurnRequest, accepted: "asyncio.Future[TurnHandle]", began: float
    ) -> None:
        reservation: Reservation | None = None
        try:
            turn = self._input_of(request)
            reservation = await self._reserve(tenant_id, turn)
            outcome = await self._accept(tenant_id, turn, request.on_busy, reservation)
        except asyncio.CancelledError:
            _drop(reservation)
            accepted.set_exception(ShuttingDown())
            raise
        # The caller gets every error, and there is no turn yet that would have to be ended.
        except Exception as error:  # noqa: BLE001  reason: passed to the caller
            _drop(reservation)
            accepted.set_exception(error)
            return
        if isinstance(outcome, Duplicate):
            _drop(reservation)
            accepted.set_result(self._duplicate(tenant_id, request.conversation_id, outcome))
            return
        live = LiveTurn(
            tenant_id=tenant_id,
            conversation_id=request.conversation_id,
            input_seq=outcome.seq,
            seq=outcome.lease.turn_seq,
        )
        key = (live.conversation_id, live.seq)
        self._live[key] = live
        accepted.set_result(LiveHandle(live=live))
        try:
            await TurnRunner(self._tools, tenant_id, outcome.lease, live, began=began).run()
        finally:
            del self._live[key]
            _drop(reservation)
            if live.ended is None and live.lost is None:
                # The runner crashed while it ended the turn. Its listeners must not wait forever.
                live.lose(Internal())

    async def _reserve(self, tenant_id: str, turn: NewInput) -> Reservation | None:
        """Reserve a slot for the provider call. None for a turn that was accepted before, which needs none.

        Raises `CallLimitReached`.
        """
        try:
            return await self._tools.call_slots.reserve()
        except CallLimitReached:
            if await self._tools.store.find_duplicate(tenant_id, turn) is None:
                raise
            return None

    async def _accept(
        self, tenant_id: str, turn: NewInput, on_busy: OnBusy, reservation: Reservation | None
    ) -> AcceptOutcome:
        """Accept the input, or wait, by the request's policy for a busy conversation."""

        async def accept(turn: NewInput) -> AcceptOutcome:
            return await self._accept_or_recover(tenant_id, turn)

        try:
            return await accept(turn)
        except ConversationBusy:
            if on_busy is OnBusy.REJECT:
                raise
        # The turn may wait for minutes, and reserves a slot again when it makes its call.
        _drop(reservation)
        return await self._queue.wait_in(tenant_id, turn, on_busy, accept)

    async def _accept_or_recover(self, tenant_id: str, turn: NewInput) -> AcceptOutcome:
        """Accept the input. If the lease of a dead process makes the conversation busy, its turn is ended first."""
        try:
            return await self._tools.store.accept_turn(tenant_id, turn)
        except ConversationBusy:
            if not await self._recovery.recover(turn.conversation_id):
                raise
        return await self._tools.store.accept_turn(tenant_id, turn)

    def _input_of(self, request: TurnRequest) -> NewInput:
        return NewInput(
            conversation_id=request.conversation_id,
            kind=request.kind,
            blocks=request.blocks,
            body_hash=request.body_hash,
            lease_token=uuid4(),
            lease_owner=self._tools.owner,
            lease_seconds=self._tools.limits.lease_seconds,
            blobs=request.blobs,
            answers=request.answers,
            abandons_calls=request.abandons_calls,
            language=request.language,
            args=request.args,
            idempotency_key=request.idempotency_key,
            announces_retry=request.announces_retry,
            expected_revision=request.expected_revision,
        )

    def _duplicate(self, tenant_id: str, conversation_id: str, duplicate: Duplicate) -> TurnHandle:
        live = self._live.get((conversation_id, duplicate.answer_seq))
        if live is not None:
            return LiveHandle(live=live, duplicate=True)
        return self._stored(tenant_id, conversation_id, duplicate.answer_seq, duplicate=True)

    def _stored(self, tenant_id: str, conversation_id: str, seq: int, *, duplicate: bool = False) -> StoredHandle:
        return StoredHandle(
            library=self._library,
            tenant_id=tenant_id,
            conversation_id=conversation_id,
            seq=seq,
            duplicate=duplicate,
        )


def _drop(reservation: Reservation | None) -> None:
    if reservation is not None:
        reservation.drop()
