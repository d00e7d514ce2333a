"""The keeper of a running turn: writes down what has arrived, shows that the turn is alive, hears a wish to stop.

It runs beside the turn and off its path: a turn that is over before the first look costs nothing here. What it writes
is what a crash leaves behind, and what other processes follow.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final

from server.conversation.call import Chunk
from server.conversation.conversation import Lease
from server.conversation.errors import DatabaseUnavailable, LeaseLost, TurnStalled
from server.conversation.notifications import Notification
from server.payload.call_records import build_bare_call_end, build_call_end, build_call_start
from server.payload.preparation import PreparedPayload
from server.providers.calls import RetryingCall
from server.providers.provider import ProviderStream
from server.turns.live import LiveTurn
from server.turns.tools import TurnTools

_OK: Final = 200
_STOP_SECONDS: Final = 10.0
"""How long the end of a turn waits for its checkpointing to stop: longer than a connection is waited for."""
_WATCH_SECONDS: Final = 1.0
"""How often the watchdog looks."""
_log = logging.getLogger("strata.turn")


class TurnCheckpointer:
    """Keeps one turn."""

    def __init__(self, tools: TurnTools, lease: Lease, live: LiveTurn) -> None:
        self._tools = tools
        self._lease = lease
        self._live = live
        self._prepared: list[tuple[int, PreparedPayload]] = []
        """What was prepared, with the first attempt that it was for."""
        self._call: RetryingCall | None = None
        self._stopped = False
        """Nothing is written from now on: the turn is at its end, or was given up."""
        self._sent = asyncio.Event()
        """The request of an attempt has gone out."""
        self._beginning = asyncio.Lock()
        self._begun_attempt = 0
        self._ended_attempts = 0
        self._written = (0, 0)
        """Attempt and offset up to which the bytes are durable."""

    def attend(self, prepared: PreparedPayload, call: RetryingCall) -> None:
        """From now on there is something to write down, and to stop. The next attempt is made with `prepared`."""
        self._prepared.append((len(call.attempts) + 1, prepared))
        self._call = call
        call.on_sent = self._sent.set

    def prepared_for(self, attempt: int) -> PreparedPayload:
        """What an attempt was made with, counted from 1."""
        return next(prepared for first, prepared in reversed(self._prepared) if first <= attempt)

    @asynccontextmanager
    async def keeping(self) -> AsyncIterator[None]:
        """Keeps the turn while the block runs.

        Raises `TurnStalled` in the block when the provider has ended and the block has not, for longer than the limit.
        """
        try:
            async with asyncio.timeout(None) as deadline:
                tasks = [
                    asyncio.create_task(self._keep(), name="turn keeper"),
                    asyncio.create_task(self._begin_calls(), name="call recorder"),
                    asyncio.create_task(self._watch_cancel(), name="turn stopper"),
                    asyncio.create_task(self._watch_ending(deadline), name="turn watchdog"),
                ]
                try:
                    yield
                finally:
                    await self._stop(tasks)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise TurnStalled from error

    async def record_failed_attempts(self) -> None:
        """Makes the calls durable that another one has followed. Raises `LeaseLost`, `DatabaseUnavailable`."""
        if self._call is None:
            return
        attempts: Sequence[ProviderStream] = self._call.attempts[:-1]
        for number, stream in enumerate(attempts[self._ended_attempts :], start=self._ended_attempts + 1):
            payload, code = self._call.payloads[number - 1], self._call.failure_codes[number - 1]
            prepared = self.prepared_for(number)
            start = build_call_start(prepared, number, stream, payload)
            try:
                end = build_call_end(prepared, stream, payload, code)
                await self._tools.store.end_call(self._lease, start, end)
            except (LeaseLost, DatabaseUnavailable):
                raise
            # What a provider sent must not keep the turn from ending.
            except Exception:  # noqa: BLE001  reason: logged with its traceback, and the call's bytes are stored
                _log.exception("turn.attempt_unstorable", extra=self._facts(attempt=number))
                end = build_bare_call_end(stream, code)
                await self._tools.store.end_call(self._lease, start, end)
            self._tools.observer.call_ended(self._lease, start, end, assistant_id=prepared.assistant_id)
            self._ended_attempts = number

    async def _begin_calls(self) -> None:
        """Records each call when its request goes out, while the provider works on it.

        What a killed process leaves behind tells then whom it has asked, and what.
        """
        while not self._stopped:
            await self._sent.wait()
            self._sent.clear()
            try:
                await self._begin_call()
            except (LeaseLost, DatabaseUnavailable) as error:
                # The next checkpoint tries again, and sees to the lease.
                _log.info("turn.call_not_recorded", extra=self._facts(code=error.code))
            # The boundary of a task that nobody awaits.
            except Exception:  # noqa: BLE001  reason: logged with its traceback; the turn's end records the call
                _log.exception("turn.call_not_recorded", extra=self._facts())

    async def _begin_call(self) -> None:
        """Makes it durable that the running attempt was asked, once. Raises `LeaseLost`, `DatabaseUnavailable`."""
        async with self._beginning:
            if self._call is None or not self._call.attempts:
                return
            attempt, stream = len(self._call.attempts), self._call.stream
            if self._begun_attempt >= attempt or not stream.record.request_body:
                return
            # First: this one may be billed, and the ones before it have failed.
            start = build_call_start(self.prepared_for(attempt), attempt, stream, self._call.payloads[attempt - 1])
            await self._tools.store.begin_call(self._lease, start)
            self._begun_attempt = attempt
            await self.record_failed_attempts()

    async def _stop(self, tasks: "list[asyncio.Task[None]]") -> None:
        """Ends the tasks. One that does not end in time is left behind: it cannot renew the lease any more."""
        self._stopped = True
        if self._beginning.locked():
            # Cancelling a statement takes longer than letting it end.
            with suppress(TimeoutError):
                async with asyncio.timeout(_STOP_SECONDS), self._beginning:
                    pass
        for task in tasks:
            task.cancel()
        done, pending = await asyncio.wait(tasks, timeout=_STOP_SECONDS)
        for task in done:
            if not task.cancelled() and task.exception() is not None:
                _log.error("turn.keeper_crashed", extra=self._facts(task=task.get_name()), exc_info=task.exception())
        for task in pending:
            _log.error("turn.keeper_stuck", extra=self._facts(task=task.get_name()))

    async def _watch_ending(self, deadline: asyncio.Timeout) -> None:
        """Ends a turn that makes no progress after its provider has ended."""
        limit = self._tools.limits.ending_seconds
        ended_at: float | None = None
        while ended_at is None or time.monotonic() - ended_at < limit:
            await asyncio.sleep(min(_WATCH_SECONDS, limit / 4))
            if self._call is None or not self._call.is_ending:
                ended_at = None
            elif ended_at is None:
                ended_at = time.monotonic()
        _log.error("turn.stalled", extra=self._facts(seconds=limit))
        self._tools.observer.turn_stalled(self._lease)
        deadline.reschedule(asyncio.get_running_loop().time())
        await asyncio.sleep(limit)
        # Something in the turn's task does not let itself be cancelled. Without a heartbeat the lease runs out, and
        # any process can end the turn.
        _log.error("turn.given_up", extra=self._facts(seconds=2 * limit))
        self._stopped = True
        self._tools.observer.turn_lost(self._lease, TurnStalled.code)
        self._live.lose(TurnStalled())

    async def _watch_cancel(self) -> None:
        """Ends the call when somebody wants that."""
        await self._live.cancel_asked.wait()
        if self._call is not None:
            await self._call.cancel()

    async def _keep(self) -> None:
        limits = self._tools.limits
        shown_at = time.monotonic()
        with self._tools.notifications.watch(self._lease.conversation_id, Notification.CANCELLING) as watch:
            # Not for ever: a library that swallows the cancellation of this task must not keep the turn alive.
            while not self._stopped:
                # However seldom bytes are written down, the lease must not run out over it.
                called = await watch.wait(min(limits.flush_seconds, limits.lease_seconds / 4))
                due = time.monotonic() - shown_at >= limits.lease_seconds / 3
                try:
                    if await self._write(called or due):
                        shown_at = time.monotonic()
                except DatabaseUnavailable as error:
                    # No reason to stop: the bytes are here, and the database may be back before the turn ends.
                    _log.warning("turn.flush_failed", extra=self._facts(code=error.code))
                except LeaseLost:
                    # Another process has ended the turn. What still comes could not be written, so it need not come.
                    _log.warning("turn.lease_lost", extra=self._facts())
                    self._live.cancel_asked.set()
                    return
                # The boundary of a task that nobody awaits. If it ended here, a living turn would be taken for dead.
                except Exception:  # noqa: BLE001  reason: logged with its traceback, and the next look comes
                    _log.exception("turn.keeper_crashed", extra=self._facts())

    async def _write(self, must_show: bool) -> bool:  # noqa: FBT001  reason: one caller, right above
        """Writes what has arrived; with nothing new, only that the turn is alive, where that is due."""
        try:
            chunks = await self._collect()
        except (LeaseLost, DatabaseUnavailable):
            raise
        # Without its heartbeat a living turn would be taken for dead.
        except Exception:  # noqa: BLE001  reason: logged with its traceback; the turn's end stores the bytes
            _log.exception("turn.checkpoint_failed", extra=self._facts())
            chunks = []
        if self._stopped or (not chunks and not must_show):
            return False
        stop_wanted = await self._tools.store.append_chunks(
            self._lease, chunks, lease_seconds=self._tools.limits.lease_seconds
        )
        if chunks:
            self._written = (chunks[-1].attempt, chunks[-1].offset + len(chunks[-1].data))
        if stop_wanted:
            self._live.cancel_asked.set()
        return True

    async def _collect(self) -> list[Chunk]:
        """The bytes of the running attempt that are not durable yet. The attempt itself is recorded first."""
        if self._call is None or not self._call.attempts:
            return []
        attempt, stream = len(self._call.attempts), self._call.stream
        record = stream.record
        if not record.request_body:
            return []
        await self._begin_call()
        if record.status != _OK:
            # Nothing came yet, or an error, which is short and is written when it is whole.
            return []
        offset = self._written[1] if self._written[0] == attempt else 0
        data = record.body[offset:]
        return [Chunk(attempt=attempt, offset=offset, data=data)] if data else []

    def _facts(self, **more: object) -> dict[str, object]:
        return {"conversation_id": self._lease.conversation_id, "turn_seq": self._lease.turn_seq, **more}
