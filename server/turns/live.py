"""A turn that runs in this process, as its listeners read it.

All listeners of a turn share one list of events. Each listener has an index into it and takes the events after that
index when it is ready. A slow listener delays neither the turn nor other listeners, and needs no memory besides the
list, which is as long as the answer. The encoded events are shared in the same way.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from server.conversation.errors import Internal, StrataError
from server.conversation.event import TurnEnded, TurnEvent, TurnStarted
from server.turns.handle import MAX_BATCH


class LiveTurn:
    """The events of a running turn so far."""

    def __init__(self, *, tenant_id: str, conversation_id: str, input_seq: int, seq: int) -> None:
        self.tenant_id = tenant_id
        self.conversation_id = conversation_id
        self.input_seq = input_seq
        self.seq = seq
        self.is_cancelled = False
        """Whether a cancellation was requested."""
        self._on_cancel: Callable[[], None] | None = None
        self.ended: TurnEnded | None = None
        self.lost: StrataError | None = None
        """Why this process cannot report the end."""
        self.events: list[TurnEvent] = [TurnStarted(conversation_id=conversation_id, input_seq=input_seq, seq=seq)]
        self.encodings: dict[int, bytes] = {}
        """See `server.turns.handle.EventReader`."""
        self._waiters: set[asyncio.Future[bool]] = set()
        self._over = asyncio.Event()

    @property
    def answer_event_count(self) -> int:
        """The number of events of the model."""
        return len(self.events) - 1

    def call_when_cancelled(self, callback: Callable[[], None]) -> None:
        """Set the callback for a requested cancellation. It is called at once if there was one."""
        self._on_cancel = callback
        if self.is_cancelled:
            callback()

    def request_cancel(self) -> None:
        """Request that the turn ends with what has arrived."""
        if not self.is_cancelled:
            self.is_cancelled = True
            if self._on_cancel is not None:
                self._on_cancel()

    def append(self, events: Iterable[TurnEvent]) -> None:
        """Add events and wake the readers. Readers run later, so events that are added without a wait in between are
        read together.
        """
        self.events.extend(events)
        self._wake()

    def end(self, ended: TurnEnded) -> None:
        """Add the last event: the answer is durable."""
        self.ended = ended
        self.append((ended,))
        self._over.set()

    def lose(self, error: StrataError) -> None:
        """Make readers and waiters raise the error, because this process cannot report the end."""
        self.lost = error
        self._wake()
        self._over.set()

    async def wait_for_end(self) -> TurnEnded:
        """Wait until the answer is durable. Events do not wake the caller. Raises the error of `lose`."""
        await self._over.wait()
        if self.ended is None:
            raise self.lost or Internal()
        return self.ended

    async def wait_for_events(self, limit_seconds: float) -> bool:
        """Wait for events or the loss of the turn. Return False if there are none within the limit."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        self._waiters.add(waiter)
        # `asyncio.timeout` costs several times as much, and this runs for every write to every listener.
        timer = loop.call_later(limit_seconds, _resolve, waiter, False)  # noqa: FBT003  reason: the result of a future
        try:
            return await waiter
        finally:
            self._waiters.discard(waiter)
            timer.cancel()

    def _wake(self) -> None:
        if not self._waiters:
            return
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            _resolve(waiter, True)  # noqa: FBT003  reason: the result of a future


def _resolve(waiter: "asyncio.Future[bool]", result: bool) -> None:  # noqa: FBT001  reason: the result of a future
    if not waiter.done():
        waiter.set_result(result)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveHandle:
    """Implements `server.turns.handle.TurnHandle`."""

    live: LiveTurn
    duplicate: bool = False

    @property
    def conversation_id(self) -> str:
        return self.live.conversation_id

    @property
    def input_seq(self) -> int:
        return self.live.input_seq

    @property
    def seq(self) -> int:
        return self.live.seq

    def read(self, after: int = 0) -> "LiveReader":
        return LiveReader(self.live, after)

    async def wait(self) -> TurnEnded:
        return await self.live.wait_for_end()


class LiveReader:
    """Implements `server.turns.handle.EventReader`."""

    def __init__(self, live: LiveTurn, after: int) -> None:
        self._live = live
        self._index = max(after, 0)

    @property
    def encodings(self) -> dict[int, bytes]:
        return self._live.encodings

    async def next(self, limit_seconds: float) -> Sequence[tuple[int, TurnEvent]] | None:
        live = self._live
        while self._index >= len(live.events):
            if live.ended is not None:
                return None
            if live.lost is not None:
                raise live.lost
            if not await live.wait_for_events(limit_seconds):
                return ()
        first, self._index = self._index, min(self._index + MAX_BATCH, len(live.events))
        return list(enumerate(live.events[first : self._index], start=first + 1))

    def close(self) -> None:
        """Do nothing: the reader owns no resource."""
