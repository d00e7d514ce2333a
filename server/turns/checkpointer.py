"""Checkpoints of a running turn: its calls and bytes are stored, its lease is renewed, a cancellation is noticed.

All of it runs concurrently with the turn and not on its path: a turn that ends before its first checkpoint costs one
statement here, which records its call. The checkpoints are what remains after a crash, and what readers in other
processes follow.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

from server.conversation.block import JsonValue
from server.conversation.call import CallEnd, CallStart, Chunk
from server.conversation.conversation import Lease
from server.conversation.errors import DatabaseUnavailable, LeaseLost, TurnStalled
from server.conversation.notifications import Notification, Watch
from server.conversation.outages import keep_lease
from server.payload.call_records import build_bare_call_end, build_call_end, build_call_start
from server.payload.preparation import PreparedPayload
from server.providers.calls import Attempt, RetryingCall
from server.turns.live import LiveTurn
from server.turns.tools import TurnTools

_OK: Final = 200
_STOP_SECONDS: Final = 10.0
"""How long the end of a turn waits until its checkpoints have stopped: longer than the wait for a connection."""
_WATCH_SECONDS: Final = 1.0
"""The interval of the watchdog."""
_log = logging.getLogger("strata.turn")


class TurnCheckpointer:
    """Stores the progress of one turn."""

    def __init__(self, tools: TurnTools, lease: Lease, live: LiveTurn) -> None:
        self._tools = tools
        self._lease = lease
        self._live = live
        self._prepared: list[tuple[int, PreparedPayload]] = []
        """The prepared payloads, each with the number of its first attempt."""
        self._call: RetryingCall | None = None
        self._stopped = False
        """Nothing is written any more: the turn is ending, or was given up."""
        self._beginning = asyncio.Lock()
        self._begun: dict[int, CallStart] = {}
        """The attempts whose beginning is durable."""
        self._ended_count = 0
        """How many attempts have a durable end."""
        self._written = (0, 0)
        """Attempt and offset up to which the bytes are durable."""
        self._renewed_at = time.monotonic()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timers: list[asyncio.TimerHandle] = []
        self._is_checkpointing = False
        self._ended_at: float | None = None
        """When the provider was first seen to have ended."""

    def attend(self, prepared: PreparedPayload, call: RetryingCall) -> None:
        """From now on the call is checkpointed and can be cancelled. Its next attempt is made with `prepared`."""
        self._prepared.append((call.next_number, prepared))
        self._call = call

    def call_sent(self) -> None:
        """The request of an attempt was sent: its call is recorded now, while the provider works on it."""
        self._start(self._record_sent_call(), "turn call")

    def prepared_for(self, attempt: Attempt) -> PreparedPayload:
        """The prepared payload that an attempt was made with."""
        return next(prepared for first, prepared in reversed(self._prepared) if first <= attempt.number)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Checkpoints the turn while the block runs.

        Raises `TurnStalled` in the block if the provider has ended and the block has not, for longer than the limit.
        """
        limits = self._tools.limits
        # The lease must not expire between two checkpoints, however long the interval is.
        interval = min(limits.flush_seconds, limits.lease_seconds / 4 or limits.flush_seconds)
        try:
            async with asyncio.timeout(None) as deadline:
                with self._tools.notifications.watch(self._lease.conversation_id, Notification.CANCELLING) as watch:
                    self._live.call_when_cancelled(lambda: self._start(self._cancel_call(), "turn cancellation"))
                    # Most turns end before their first checkpoint is due, and take no task for it.
                    self._call_later(interval, lambda: self._start_checkpoints(watch, interval))
                    watch.call_when_notified(lambda: self._start_checkpoints(watch, interval))
                    self._call_later(self._watch_interval, lambda: self._watch_ending(deadline))
                    try:
                        yield
                    finally:
                        await self._stop()
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise TurnStalled from error

    async def record_followed_attempts(self) -> None:
        """Stores the ends of all attempts but the last. Raises `LeaseLost`, `DatabaseUnavailable`."""
        if self._call is not None:
            await self.record_ends(self._call.attempts[:-1])

    async def record_ends(self, attempts: Sequence[Attempt]) -> list[CallEnd]:
        """Stores the ends of these attempts, the first ones of the call, and returns those that were not stored before.

        Raises `LeaseLost`, `DatabaseUnavailable`.
        """
        ends: list[CallEnd] = []
        for count, attempt in enumerate(attempts[self._ended_count :], start=self._ended_count + 1):
            prepared = self.prepared_for(attempt)
            start = self.start_of(attempt)
            try:
                end = build_call_end(prepared, attempt.stream, attempt.payload, attempt.failure_code)
                await self._tools.store.end_call(self._lease, start, end)
            except (LeaseLost, DatabaseUnavailable):
                raise
            # Hostile bytes of a provider must not keep the turn from ending.
            except Exception:  # noqa: BLE001  reason: logged with its traceback, and the call's bytes are stored
                _log.exception("turn.attempt_unstorable", extra=self._facts(attempt=attempt.number))
                end = build_bare_call_end(attempt.stream, attempt.failure_code)
                await self._tools.store.end_call(self._lease, start, end)
            self._tools.observer.call_ended(self._lease, start, end, assistant_id=prepared.assistant_id)
            self._ended_count = count
            ends.append(end)
        return ends

    def start_of(self, attempt: Attempt, container: Mapping[str, JsonValue] | None = None) -> CallStart:
        """The record of an attempt. `container` is the one that the answer names, if known."""
        return build_call_start(
            self.prepared_for(attempt),
            attempt.number,
            attempt.stream,
            attempt.payload,
            container,
            earlier=self._begun.get(attempt.number),
        )

    def is_recorded(self, attempt: Attempt) -> bool:
        """Whether the beginning of an attempt is durable."""
        return attempt.number in self._begun

    async def record_begin(self, attempt: Attempt, request: bytes) -> None:
        """Stores that an attempt begins, before its request is sent. Raises `LeaseLost`, `DatabaseUnavailable`."""
        start = replace(
            self.start_of(attempt), started_at=datetime.now(UTC), request_hash=hashlib.sha256(request).digest()
        )
        await self._tools.store.begin_call(self._lease, start)
        self._begun[attempt.number] = start

    async def _record_sent_call(self) -> None:
        """Records a call when its request was sent, so that it is known after a crash."""
        try:
            await self._record_running_call()
        except (LeaseLost, DatabaseUnavailable) as error:
            # The next checkpoint tries again.
            _log.info("turn.call_not_recorded", extra=self._facts(code=error.code))
        # The boundary of a task that is not awaited.
        except Exception:  # noqa: BLE001  reason: logged with its traceback; the turn's end records the call
            _log.exception("turn.call_not_recorded", extra=self._facts())

    async def _record_running_call(self) -> None:
        """Stores once that the running attempt was sent. Raises `LeaseLost`, `DatabaseUnavailable`."""
        async with self._beginning:
            if self._call is None or not self._call.attempts:
                return
            attempt = self._call.attempts[-1]
            if attempt.number in self._begun or not attempt.stream.record.request_body:
                return
            # Before the ends of earlier attempts: this one may be billed.
            start = self.start_of(attempt)
            await self._tools.store.begin_call(self._lease, start)
            self._begun[attempt.number] = start
            await self.record_followed_attempts()

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)

    def _start_checkpoints(self, watch: Watch, interval: float) -> None:
        """Starts to write checkpoints: when the first is due, or when a cancellation is announced before."""
        if not self._is_checkpointing and not self._stopped:
            self._is_checkpointing = True
            self._start(self._write_checkpoints(watch, interval), "turn checkpoints")

    def _call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(seconds, callback))

    async def _stop(self) -> None:
        """Ends the tasks. A task that does not end in time is abandoned; it no longer renews the lease."""
        self._stopped = True
        for timer in self._timers:
            timer.cancel()
        if self._beginning.locked():
            # Cancelling a statement takes longer than letting it end.
            with suppress(TimeoutError):
                async with asyncio.timeout(_STOP_SECONDS), self._beginning:
                    pass
        for task in self._tasks:
            task.cancel()
        if not self._tasks:
            return
        done, pending = await asyncio.wait(self._tasks, timeout=_STOP_SECONDS)
        for task in done:
            if not task.cancelled() and task.exception() is not None:
                _log.error(
                    "turn.checkpointer_crashed", extra=self._facts(task=task.get_name()), exc_info=task.exception()
                )
        for task in pending:
            _log.error("turn.checkpointer_stuck", extra=self._facts(task=task.get_name()))

    @property
    def _watch_interval(self) -> float:
        return min(_WATCH_SECONDS, self._tools.limits.ending_seconds / 4)

    def _watch_ending(self, deadline: asyncio.Timeout) -> None:
        """Ends a turn that makes no progress after its provider has ended. Calls itself again and again."""
        now, limit = time.monotonic(), self._tools.limits.ending_seconds
        if self._call is None or not self._call.is_ending:
            self._ended_at = None
        elif self._ended_at is None:
            self._ended_at = now
        elif now - self._ended_at >= limit:
            _log.error("turn.stalled", extra=self._facts(seconds=limit))
            self._tools.observer.turn_stalled(self._lease)
            deadline.reschedule(asyncio.get_running_loop().time())
            self._call_later(limit, self._give_up)
            return
        self._call_later(self._watch_interval, lambda: self._watch_ending(deadline))

    def _give_up(self) -> None:
        """The turn's task does not react to its cancellation. Without a heartbeat the lease expires, and any process
        can end the turn.
        """
        _log.error("turn.given_up", extra=self._facts(seconds=2 * self._tools.limits.ending_seconds))
        self._stopped = True
        self._tools.observer.turn_lost(self._lease, TurnStalled.code)
        self._live.lose(TurnStalled())

    async def _cancel_call(self) -> None:
        if self._call is not None:
            await self._call.cancel()

    async def _write_checkpoints(self, watch: Watch, interval: float) -> None:
        """Stores the bytes that have arrived and renews the lease, until the turn ends or the lease is lost."""
        lease_seconds = self._tools.limits.lease_seconds
        waits = False

        async def beat() -> bool:
            nonlocal waits
            # The first one is due when the task begins.
            is_cancelling = await watch.wait(interval if waits else 0)
            waits = True
            is_due = time.monotonic() - self._renewed_at >= lease_seconds / 3
            await self._write_checkpoint(renews=is_cancelling or is_due)
            # A library that swallows the cancellation of this task must not keep the turn alive.
            return not self._stopped

        await keep_lease(beat, self._facts())
        if not self._stopped:
            # Another process has ended the turn, so the rest of the answer could not be stored.
            self._live.request_cancel()

    async def _write_checkpoint(self, *, renews: bool) -> None:
        """Stores new bytes and renews the lease. If there are none, the lease is renewed only if `renews` is set."""
        try:
            chunks = await self._collect()
        except (LeaseLost, DatabaseUnavailable):
            raise
        # Without its heartbeat another process would take a living turn for dead.
        except Exception:  # noqa: BLE001  reason: logged with its traceback; the turn's end stores the bytes
            _log.exception("turn.checkpoint_failed", extra=self._facts())
            chunks = []
        if self._stopped or (not chunks and not renews):
            return
        is_cancelled = await self._tools.store.append_chunks(
            self._lease, chunks, lease_seconds=self._tools.limits.lease_seconds
        )
        self._renewed_at = time.monotonic()
        if chunks:
            self._written = (chunks[-1].attempt, chunks[-1].offset + len(chunks[-1].data))
        if is_cancelled:
            self._live.request_cancel()

    async def _collect(self) -> list[Chunk]:
        """The bytes of the running attempt that are not durable yet. Its call is recorded first."""
        if self._call is None or not self._call.attempts:
            return []
        attempt = self._call.attempts[-1]
        record = attempt.stream.record
        if not record.request_body:
            return []
        await self._record_running_call()
        if record.status != _OK:
            # No byte yet, or an error, which is short and is stored with the end of the call.
            return []
        offset = self._written[1] if self._written[0] == attempt.number else 0
        data = record.body[offset:]
        return [Chunk(attempt=attempt.number, offset=offset, data=data)] if data else []

    def _facts(self, **more: object) -> dict[str, object]:
        return {"conversation_id": self._lease.conversation_id, "turn_seq": self._lease.turn_seq, **more}
