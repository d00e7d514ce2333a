"""A turn that runs in this process, as its listeners see it.

There is one list of events per turn, however many listen: each listener has a place in it and takes what is behind that
place when it is ready. A slow one costs the turn nothing and no memory but the list, which is as long as the answer.
The events as they go over the wire are kept beside it for the same reason: no listener has a copy of its own.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from server.conversation.errors import StrataError
from server.conversation.event import TurnEnded, TurnEvent, TurnStarted
from server.turns.handle import MAX_BATCH


class LiveTurn:
    """The events of a running turn so far."""

    def __init__(self, *, tenant_id: str, conversation_id: str, input_seq: int, seq: int) -> None:
        self.tenant_id = tenant_id
        self.conversation_id = conversation_id
        self.input_seq = input_seq
        self.seq = seq
        self.cancel_requested = asyncio.Event()
        self.ended: TurnEnded | None = None
        self.lost: StrataError | None = None
        """Why the end cannot be heard here."""
        self.events: list[TurnEvent] = [TurnStarted(conversation_id=conversation_id, input_seq=input_seq, seq=seq)]
        self.encodings: dict[int, bytes] = {}
        """See `server.turns.handle.EventReader`."""
        self._news = asyncio.Event()

    @property
    def answer_event_count(self) -> int:
        """How many events of the model were given out."""
        return len(self.events) - 1

    def append(self, events: Iterable[TurnEvent]) -> None:
        """Adds events and wakes the readers."""
        self.events.extend(events)
        self._wake()

    def end(self, ended: TurnEnded) -> None:
        """The answer is durable."""
        self.ended = ended
        self.append((ended,))

    def lose(self, error: StrataError) -> None:
        """Nothing more will be heard here, and the end neither."""
        self.lost = error
        self._wake()

    async def wait_for_news(self, limit_seconds: float | None) -> bool:
        """Until something is told, or the time is over. Whether something was."""
        news = self._news
        try:
            async with asyncio.timeout(limit_seconds):
                await news.wait()
        except TimeoutError:
            return False
        return True

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


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
        while self.live.ended is None:
            if self.live.lost is not None:
                raise self.live.lost
            await self.live.wait_for_news(None)
        return self.live.ended


class LiveReader:
    """Implements `server.turns.handle.EventReader`."""

    def __init__(self, live: LiveTurn, after: int) -> None:
        self._live = live
        self._place = max(after, 0)

    @property
    def encodings(self) -> dict[int, bytes]:
        return self._live.encodings

    async def next(self, limit_seconds: float) -> Sequence[tuple[int, TurnEvent]] | None:
        live = self._live
        while self._place >= len(live.events):
            if live.ended is not None:
                return None
            if live.lost is not None:
                raise live.lost
            if not await live.wait_for_news(limit_seconds):
                return ()
        first, self._place = self._place, min(self._place + MAX_BATCH, len(live.events))
        return list(enumerate(live.events[first : self._place], start=first + 1))

    def close(self) -> None:
        """Nothing is held."""
