"""The events of one turn, whatever happens to the connection."""

from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Self

import httpx2

from server.conversation.event import TurnStarted
from server.conversation.turn import TurnState
from server.web.client.answers import TurnEnded
from server.web.client.connection import Ask, Connection
from server.web.client.decoding import event_from_frame
from server.web.client.errors import AnswerMalformed, ClientError, ServerUnreachable, TurnFailed
from server.web.client.event import ClientEvent
from server.web.client.frames import Frame, FrameReader


class TurnStream:
    """Gives every event of a turn once and in order.

    A connection that breaks, or says nothing for too long, is made again: before the first event by sending the same
    request under the same idempotency key, after it by asking for the events behind the last one that came. The turn
    belongs to the server, so leaving a stream does not end it; `StrataClient.cancel` does.

    Opening it raises what the server refuses. Iterating raises `ServerUnreachable` when patience is over; the turn can
    then still be followed later, with `seq` and `last_event_id`.
    """

    def __init__(self, connection: Connection, ask: Ask, *, seq: int | None = None, last_event_id: int = 0) -> None:
        """`seq` is known where a turn is followed; of a new one the first event tells it."""
        self.seq = seq
        self.last_event_id = last_event_id
        self.replayed = False
        """The server knew the request: it was sent before, under the same key."""
        self._connection = connection
        self._first_ask = ask
        self._waiting = connection.waiting()
        self._answer: httpx2.Response | None = None
        self._pieces: AsyncIterator[bytes] | None = None
        self._reader = FrameReader()
        self._events: deque[ClientEvent] = deque()
        self._ended: TurnEnded | None = None

    async def __aenter__(self) -> Self:
        try:
            await self._open()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ClientEvent:
        while not self._events:
            if self._ended is not None:
                await self.close()
                raise StopAsyncIteration
            await self._read()
        return self._events.popleft()

    async def result(self) -> TurnEnded:
        """Reads to the end and gives how the turn ended. Raises `TurnFailed` where it failed or was interrupted."""
        async for _ in self:
            pass
        if self._ended is None:  # cannot be: iteration ends with this event alone
            raise AnswerMalformed("The stream ended without saying how the turn did.")
        if self._ended.turn.state in {TurnState.FAILED, TurnState.INTERRUPTED}:
            raise TurnFailed(self._ended)
        return self._ended

    async def close(self) -> None:
        """Leaves the stream. The turn goes on."""
        answer, self._answer, self._pieces = self._answer, None, None
        if answer is not None:
            with suppress(httpx2.TransportError):  # it is given up anyway
                await answer.aclose()

    async def _open(self) -> None:
        """A connection, after as many attempts as it takes. One that is there stays."""
        while self._answer is None:
            try:
                self._answer = await self._connection.open_stream(self._next_ask())
            except ClientError as error:
                await self._waiting.wait_after(error, repeatable=True)
                continue
            self.replayed = self.replayed or "idempotency-replayed" in self._answer.headers
            self._pieces = self._answer.aiter_raw()
            self._reader = FrameReader()

    def _next_ask(self) -> Ask:
        if self.seq is None or self._first_ask.method == "GET":
            return self._with_place(self._first_ask)
        return self._with_place(Ask(method="GET", path=f"{self._first_ask.path}/{self.seq}/events"))

    def _with_place(self, ask: Ask) -> Ask:
        if ask.method != "GET" or not self.last_event_id:
            return ask
        return replace(ask, headers={**ask.headers, "last-event-id": str(self.last_event_id)})

    async def _read(self) -> None:
        """One piece off the wire; a connection that has ended is made again."""
        await self._open()
        comments = self._reader.comment_count
        try:
            piece = await anext(self._pieces, None) if self._pieces is not None else None
        except httpx2.TransportError as error:
            await self._reopen_after(self._connection.unreachable(error))
            return
        if piece is None:
            await self._reopen_after(ServerUnreachable("The stream of events ended before the turn did.", sent=True))
            return
        for frame in self._reader.feed(piece):
            self._take(frame)
        if self._reader.comment_count > comments:
            self._waiting.progressed()

    async def _reopen_after(self, error: ServerUnreachable) -> None:
        await self.close()
        await self._waiting.wait_after(error, repeatable=True)

    def _take(self, frame: Frame) -> None:
        number = int(frame.id) if frame.id.isdecimal() else None
        if self._ended is not None or (number is not None and number <= self.last_event_id):
            return  # heard before the connection broke
        event = event_from_frame(frame)
        self._waiting.progressed()
        if number is not None:
            self.last_event_id = number
        match event:
            case TurnStarted():
                self.seq = event.seq
            case TurnEnded():
                self._ended = event
            case _:
                pass
        self._events.append(event)
