"""What follows on a turn: the policy is asked, and where it says so the conversation is queued for a compaction.

The answer is durable and told by then. Asking costs no round trip: all that the planner wants to know was loaded for
the turn or came with its answer. Queueing happens in a task of its own.
"""

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import replace
from datetime import datetime
from typing import Any, Final, Protocol

from server.compaction.plan import CompactionDecision, SkipReason, decide_compaction
from server.compaction.report import CompactionAlarms, CompactionObserver
from server.compaction.state import count_request, read_state
from server.compaction.typical_lengths import TypicalLengths
from server.conversation.epoch import EpochReason
from server.conversation.errors import StrataError
from server.conversation.lru import LruCache
from server.conversation.store import BufferedTurn, PayloadSource
from server.conversation.turn import ModelResponseTurn, Native, TurnKind
from server.providers.token_estimate import TokenEstimate


class CompactionQueue(Protocol):
    """Has conversations looked at by some worker, soon or later. One that waits already is not queued again."""

    async def queue_compaction(self, tenant_id: str, conversation_id: str, *, at: datetime | None = None) -> None:
        """`at`: not before, which is when the provider's cache has gone cold. Raises `DatabaseUnavailable`."""
        ...


_IN_THE_WAY: Final = (SkipReason.BLOCKED_BY_OPEN_CALL, SkipReason.EXCHANGE_UNFINISHED)
_PATIENCE_SECONDS: Final = 5.0
_MAX_LOOKS: Final = 20_000
_log = logging.getLogger("strata.compaction")


class CompactionWatch:
    """Implements `server.turns.follower.TurnFollower`."""

    def __init__(
        self,
        queue: CompactionQueue,
        observer: CompactionObserver,
        estimate: TokenEstimate,
        *,
        alarm_tokens: int = 200_000,
        lengths: TypicalLengths | None = None,
        alarms: CompactionAlarms | None = None,
    ) -> None:
        """`alarm_tokens`: a request of this size that cannot be compacted is an alarm. `lengths`: None where nobody
        knows how long conversations get. `alarms`: where operators look for them; None where nobody does.
        """
        self._queue = queue
        self._observer = observer
        self._estimate = estimate
        self._alarm_tokens = alarm_tokens
        self._lengths = lengths
        self._alarms = alarms
        self._tasks: set[asyncio.Task[None]] = set()
        self._looks: LruCache[str, datetime] = LruCache(_MAX_LOOKS)
        """When somebody will look at a conversation anyway: a job that comes too early looks again by itself."""

    def turn_followed(
        self, tenant_id: str, source: PayloadSource, static_length: int, turn: ModelResponseTurn, native_length: int
    ) -> None:
        """Decides, and queues where something is to be done, now or when the cache has gone cold."""
        after = _with_answer(source, turn, native_length)
        conversation_id = source.conversation.id
        typical = None if self._lengths is None else self._lengths.find(tenant_id, source.assistant.id)
        try:
            state = read_state(
                after, static_length=static_length, estimate=self._estimate, typical_exchange_count=typical
            )
            decision = decide_compaction(after, state, now=turn.created_at)
        except StrataError as error:
            # Settings that cannot be read: the turn itself has told so.
            _log.warning("compaction.not_decided", extra={"conversation_id": conversation_id, "code": error.code})
            return
        if self._watch_obstacles(conversation_id, decision, count_request(state)):
            self._start(self._note_stuck(tenant_id, source, decision, count_request(state), turn.seq))
        undone = source.epoch is not None and source.epoch.reason is EpochReason.COMPACTION_UNDONE
        if undone and not decision.window_short:
            return
        if decision.plan is not None or (decision.needs_summary and source.epoch is not None):
            reason = "window" if decision.plan is None else decision.plan.reason.value
            self._send(tenant_id, conversation_id, reason, None)
        elif decision.recheck_at is not None and not self._is_looked_after(conversation_id, turn.created_at):
            self._looks.put(conversation_id, decision.recheck_at)
            self._send(tenant_id, conversation_id, "cold_cache", decision.recheck_at)

    async def close(self) -> None:
        """Lets what is being queued be queued."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=_PATIENCE_SECONDS)

    def _is_looked_after(self, conversation_id: str, now: datetime) -> bool:
        look_at = self._looks.get(conversation_id)
        return look_at is not None and look_at > now

    def _watch_obstacles(self, conversation_id: str, decision: CompactionDecision, size: int) -> bool:
        """Whether it has to be compacted and cannot be."""
        is_needed = decision.window_short or size >= self._alarm_tokens
        if decision.plan is None and decision.skip_reason in _IN_THE_WAY and is_needed:
            self._observer.compaction_blocked(conversation_id, str(decision.skip_reason), size)
            return True
        if decision.skip_reason not in _IN_THE_WAY:
            self._observer.compaction_unblocked(conversation_id)
        return False

    async def _note_stuck(
        self, tenant_id: str, source: PayloadSource, decision: CompactionDecision, size: int, seq: int
    ) -> None:
        if self._alarms is None:
            return
        conversation_id, epoch = source.conversation.id, 0 if source.epoch is None else source.epoch.number
        try:
            await self._alarms.record_blocked(
                tenant_id, conversation_id, reason=str(decision.skip_reason), request_tokens=size, seq=seq, epoch=epoch
            )
        except StrataError as error:
            # The next turn notes it again, and the observer has been told.
            _log.warning("compaction.alarm_not_noted", extra={"conversation_id": conversation_id, "code": error.code})

    def _send(self, tenant_id: str, conversation_id: str, reason: str, at: datetime | None) -> None:
        self._start(self._enqueue(tenant_id, conversation_id, reason, at))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="after a turn")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _enqueue(self, tenant_id: str, conversation_id: str, reason: str, at: datetime | None) -> None:
        try:
            await self._queue.queue_compaction(tenant_id, conversation_id, at=at)
        except StrataError as error:
            # The next turn asks again.
            _log.warning("compaction.not_queued", extra={"conversation_id": conversation_id, "code": error.code})
        else:
            self._observer.compaction_queued(conversation_id, reason)


def _with_answer(source: PayloadSource, turn: ModelResponseTurn, native_length: int) -> PayloadSource:
    """The conversation as the next load would find it, as far as the planner looks at it."""
    answer = BufferedTurn(
        seq=turn.seq,
        kind=TurnKind.MODEL_RESPONSE,
        state=turn.state,
        # Only its length counts here.
        native=Native(dialect=turn.provider, data=bytes(native_length)),
        blocks=turn.blocks,
        provider=turn.provider,
        model=turn.model,
        account=None,
        prefix_hash=b"" if source.epoch is None else source.epoch.prefix_hash,
        dynamic=None,
        language=None,
        args=None,
        output_tokens=turn.usage.output_tokens,
        reasoning_tokens=turn.usage.reasoning_tokens,
        created_at=turn.created_at,
    )
    return replace(source, buffered=(*source.buffered, answer))
