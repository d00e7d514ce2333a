"""The check after every turn: is a compaction due? If so, the conversation is queued for a worker.

By then the answer is durable and its last event has been sent. The decision needs no round trip: everything it depends
on was loaded for the turn or came with its answer. Queueing runs in a separate task.

A decision takes time in proportion to the buffer. The `cost` policy is therefore applied to a long buffer only after it
has grown by a sixteenth, in turns or in tokens, so that the average turn pays the same for a buffer of any length.
"""

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import replace
from datetime import datetime
from typing import Any, Final, Protocol

from server.compaction.plan import CompactionDecision, SkipReason, decide_compaction, policy_of
from server.compaction.report import CompactionAlarms, CompactionObserver
from server.compaction.state import count_request, read_state
from server.compaction.typical_lengths import TypicalLengths
from server.conversation.compaction_policy import PolicyKind
from server.conversation.epoch import EpochReason
from server.conversation.errors import StrataError
from server.conversation.lru import LruCache
from server.conversation.store import BufferedTurn, PayloadSource
from server.conversation.turn import ModelResponseTurn, Native, TurnKind
from server.providers.token_estimate import TokenEstimate


class CompactionQueue(Protocol):
    """Queues conversations for compaction by a worker. A conversation that is queued already is not queued twice."""

    async def queue_compaction(self, tenant_id: str, conversation_id: str, *, at: datetime | None = None) -> None:
        """Queue the conversation, to be processed not before `at`. Raises `DatabaseUnavailable`."""
        ...


_OBSTACLES: Final = (SkipReason.BLOCKED_BY_OPEN_CALL, SkipReason.EXCHANGE_UNFINISHED)
_CLOSE_SECONDS: Final = 5.0
_MAX_SCHEDULED: Final = 20_000
_GROWTH: Final = 16
"""The share of the buffer by which it has to grow before the `cost` policy is applied again."""
_log = logging.getLogger("strata.compaction")


class CompactionWatch:
    """Implements `server.turns.observer.TurnFollower`."""

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
        """A request of `alarm_tokens` or more that cannot be compacted raises an alarm. Without `lengths`, decisions
        ignore how long conversations usually get. Without `alarms`, only the observer is notified.
        """
        self._queue = queue
        self._observer = observer
        self._estimate = estimate
        self._alarm_tokens = alarm_tokens
        self._lengths = lengths
        self._alarms = alarms
        self._tasks: set[asyncio.Task[None]] = set()
        self._scheduled: LruCache[str, datetime] = LruCache(_MAX_SCHEDULED)
        """When a job will check a conversation in any case. A job that runs too early schedules itself again."""
        self._decided: LruCache[str, tuple[int, int, int]] = LruCache(_MAX_SCHEDULED)
        """The last decision that moved nothing: the start of the buffer, its turns, and the tokens of the request."""

    def turn_followed(
        self, tenant_id: str, source: PayloadSource, static_length: int, turn: ModelResponseTurn, native_length: int
    ) -> None:
        """Decide, and queue the conversation if something is to be moved, now or when the cache expires."""
        conversation_id = source.conversation.id
        try:
            if self._was_just_decided(source, turn):
                return
            after = _with_answer(source, turn, native_length)
            typical = None if self._lengths is None else self._lengths.find(tenant_id, source.assistant.id)
            state = read_state(
                after, static_length=static_length, estimate=self._estimate, typical_exchange_count=typical
            )
            decision = decide_compaction(after, state, now=turn.created_at)
        except StrataError as error:
            # The settings are invalid; the turn has failed with the same error.
            _log.warning("compaction.not_decided", extra={"conversation_id": conversation_id, "code": error.code})
            return
        if self._report_obstacles(conversation_id, decision, count_request(state)):
            self._start(self._record_blocked(tenant_id, source, decision, count_request(state), turn.seq))
        if decision.plan is None and not decision.window_short:
            size = turn.usage.input_tokens
            self._decided.put(conversation_id, (source.conversation.buffer_start_seq, len(source.buffered), size))
        undone = source.epoch is not None and source.epoch.reason is EpochReason.COMPACTION_UNDONE
        if undone and not decision.window_short:
            return
        if decision.plan is not None or (decision.needs_summary and source.epoch is not None):
            reason = "window" if decision.plan is None else decision.plan.reason.value
            self._send(tenant_id, conversation_id, reason, None)
        elif decision.recheck_at is not None and not self._is_scheduled(conversation_id, turn.created_at):
            self._scheduled.put(conversation_id, decision.recheck_at)
            self._send(tenant_id, conversation_id, "cold_cache", decision.recheck_at)

    async def close(self) -> None:
        """Wait for queueing that is in progress."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=_CLOSE_SECONDS)

    def _was_just_decided(self, source: PayloadSource, turn: ModelResponseTurn) -> bool:
        """Return whether the last decision still holds, because the buffer has hardly grown since, or the policy never
        moves anything.
        """
        kind = policy_of(source).kind
        if kind is PolicyKind.OFF:
            return True
        start_seq, turn_count, tokens = self._decided.get(source.conversation.id) or (0, 0, 0)
        if start_seq != source.conversation.buffer_start_seq or kind is not PolicyKind.COST:
            return False
        scheduled_at = self._scheduled.get(source.conversation.id)
        if scheduled_at is not None and scheduled_at <= turn.created_at:
            return False
        grown_turns = len(source.buffered) - turn_count
        grown_tokens = turn.usage.input_tokens - tokens
        return grown_turns * _GROWTH < len(source.buffered) and grown_tokens * _GROWTH <= turn.usage.input_tokens

    def _is_scheduled(self, conversation_id: str, now: datetime) -> bool:
        scheduled_at = self._scheduled.get(conversation_id)
        return scheduled_at is not None and scheduled_at > now

    def _report_obstacles(self, conversation_id: str, decision: CompactionDecision, size: int) -> bool:
        """Return whether a compaction is necessary and blocked."""
        is_needed = decision.window_short or size >= self._alarm_tokens
        if decision.plan is None and decision.skip_reason in _OBSTACLES and is_needed:
            self._observer.compaction_blocked(conversation_id, str(decision.skip_reason), size)
            return True
        if decision.skip_reason not in _OBSTACLES:
            self._observer.compaction_unblocked(conversation_id)
        return False

    async def _record_blocked(
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
            # The next turn records it again, and the observer has been notified.
            _log.warning(
                "compaction.alarm_not_recorded", extra={"conversation_id": conversation_id, "code": error.code}
            )

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
            # The next turn queues it again.
            _log.warning("compaction.not_queued", extra={"conversation_id": conversation_id, "code": error.code})
        else:
            self._observer.compaction_queued(conversation_id, reason)


def _with_answer(source: PayloadSource, turn: ModelResponseTurn, native_length: int) -> PayloadSource:
    """The conversation as the next load would return it, as far as the planner uses it."""
    answer = BufferedTurn(
        seq=turn.seq,
        kind=TurnKind.MODEL_RESPONSE,
        state=turn.state,
        # Only the length is used.
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
