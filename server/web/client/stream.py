"""The events of one turn, over as many connections as needed.

Events come in this order: `TurnStarted` once, then those of `conversation.event` while the model writes, then
`TurnEnded` once. An event that this release does not know is an `UnknownEvent` in its place.
"""

import json
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final, Self, TypeAlias

import httpx2

from server.conversation.block import JsonValue
from server.conversation.event import (
    ProviderEvent,
    TextDelta,
    ThinkingDelta,
    ToolCallBegin,
    ToolCallDelta,
    ToolCallEnd,
    TurnStarted,
    UsageReported,
)
from server.conversation.turn import TurnState
from server.web.client.answers import Json, TurnEnded, turn_ended_from_json, usage_from_json
from server.web.client.connection import Connection, Request, decoding
from server.web.client.errors import AnswerMalformed, ClientError, ServerUnreachable, TurnFailed

_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownEvent:
    """An event of a kind that this release does not know."""

    name: str
    data: JsonValue
    """Its JSON, or its text if it is not JSON."""


ClientEvent: TypeAlias = TurnStarted | ProviderEvent | TurnEnded | UnknownEvent


class TurnStream:
    """An iterator over the events of a turn, each once and in order.

    If the connection breaks or is silent for too long, a new one is opened: before the first event by sending the same
    request with the same idempotency key, afterwards by requesting the events after the last one received. The turn
    belongs to the server, so closing the stream does not end it; `StrataClient.cancel` does.

    Opening it raises the error that the server answers with. Iterating raises `ServerUnreachable` when the retry budget
    is used up; the turn can be followed later, with `seq` and `last_event_id`.
    """

    def __init__(
        self, connection: Connection, request: Request, *, seq: int | None = None, last_event_id: int = 0
    ) -> None:
        """`seq` is given when an existing turn is followed; that of a new turn is in its first event."""
        self.seq = seq
        self.last_event_id = last_event_id
        self.replayed = False
        """The server had received the same request before, with the same idempotency key."""
        self._connection = connection
        self._request = request
        self._retries = connection.new_retries()
        self._response: httpx2.Response | None = None
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
        """Read to the end and return how the turn ended. Raises `TurnFailed` if it failed or was interrupted."""
        async for _ in self:
            pass
        return check_ended(self._ended)

    async def close(self) -> None:
        """Close the connection. The turn goes on."""
        response, self._response, self._pieces = self._response, None, None
        if response is not None:
            with suppress(httpx2.TransportError):  # the connection is discarded in any case
                await response.aclose()

    async def _open(self) -> None:
        """Open a connection unless there is one, retrying within the budget."""
        while self._response is None:
            try:
                self._response = await self._connection.open_stream(self._next_request())
            except ClientError as error:
                await self._retries.wait_after(error, repeatable=True)
                continue
            self.replayed = self.replayed or "idempotency-replayed" in self._response.headers
            self._pieces = self._response.aiter_raw()
            self._reader = FrameReader()

    def _next_request(self) -> Request:
        request = self._request
        if self.seq is not None and request.method != "GET":
            request = Request(method="GET", path=f"{request.path}/{self.seq}/events")
        if request.method != "GET" or not self.last_event_id:
            return request
        return replace(request, headers={**request.headers, "last-event-id": str(self.last_event_id)})

    async def _read(self) -> None:
        """Read one piece of the body; open a new connection if this one has ended."""
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
            self._retries.reset()

    async def _reopen_after(self, error: ServerUnreachable) -> None:
        await self.close()
        await self._retries.wait_after(error, repeatable=True)

    def _take(self, frame: "Frame") -> None:
        number = int(frame.id) if frame.id.isdecimal() else None
        if self._ended is not None or (number is not None and number <= self.last_event_id):
            return  # received before the connection broke
        event = event_from_frame(frame)
        self._retries.reset()
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


def check_ended(ended: TurnEnded | None) -> TurnEnded:
    """Return how a turn ended. Raises `TurnFailed` if it failed or was interrupted, `AnswerMalformed` for None."""
    if ended is None:
        raise AnswerMalformed("The stream was closed before a turn had ended.")
    if ended.turn.state in {TurnState.FAILED, TurnState.INTERRUPTED}:
        raise TurnFailed(ended)
    return ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One record of server-sent events."""

    id: str
    """The newest id so far; empty before the first one."""
    event: str
    """Empty if the record does not name one."""
    data: str
    """The data lines, joined by newlines."""


class FrameReader:
    """Incremental parser of server-sent events, as specified by the HTML standard.

    The frames do not depend on how the bytes are split into pieces. Lines end with LF, CR LF or CR; a record without
    its blank line is ignored.
    """

    __slots__ = ("_after_cr", "_at_start", "_buffer", "_data", "_event", "_id", "comment_count")

    def __init__(self) -> None:
        self.comment_count = 0
        """A server sends comments to keep the connection alive."""
        self._buffer = bytearray()
        self._at_start = True
        self._after_cr = False
        self._id = ""
        self._event = ""
        self._data: list[str] = []

    def feed(self, piece: bytes) -> list[Frame]:
        """Return the frames that the piece completes."""
        if not piece:
            return []
        if self._after_cr and piece.startswith(b"\n"):
            piece = piece[1:]  # the second half of a CR LF whose first half has ended the line
        self._after_cr = False
        # Only new bytes are searched: a long line may come in many pieces.
        searched = len(self._buffer)
        self._buffer += piece
        frames = []
        start = 0
        for end in list(_LINE_END.finditer(self._buffer, searched)):
            self._after_cr = end.group() == b"\r" and end.end() == len(self._buffer)
            frame = self._take_line(bytes(self._buffer[start : end.start()]))
            start = end.end()
            if frame is not None:
                frames.append(frame)
        del self._buffer[:start]
        return frames

    def _take_line(self, line: bytes) -> Frame | None:
        if self._at_start:
            line = line.removeprefix(_BYTE_ORDER_MARK)
            self._at_start = False
        if not line:
            return self._finish()
        if line.startswith(b":"):
            self.comment_count += 1
            return None
        name, _, rest = line.partition(b":")
        value = rest.removeprefix(b" ").decode("utf-8", "replace")
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._event = value
        elif name == b"id" and "\0" not in value:
            self._id = value
        return None

    def _finish(self) -> Frame | None:
        event, data = self._event, self._data
        self._event, self._data = "", []
        return Frame(id=self._id, event=event, data="\n".join(data)) if data else None


def event_from_frame(frame: Frame) -> ClientEvent:
    """Decode an event. Raises `AnswerMalformed`."""
    decode = _EVENTS.get(frame.event)
    if decode is None:
        return UnknownEvent(name=frame.event, data=_json_or_text(frame.data))
    with decoding(f"event {frame.event}"):
        return decode(json.loads(frame.data))


_EVENTS: Final[Mapping[str, Callable[[Json], ClientEvent]]] = {
    "turn.started": lambda data: TurnStarted(
        conversation_id=data["conversation_id"], input_seq=data["input_seq"], seq=data["seq"]
    ),
    "thinking.delta": lambda data: ThinkingDelta(text=data["text"]),
    "text.delta": lambda data: TextDelta(text=data["text"]),
    "tool_call.begin": lambda data: ToolCallBegin(call_id=data["id"], name=data["name"]),
    "tool_call.delta": lambda data: ToolCallDelta(call_id=data["id"], arguments_json=data["arguments_json"]),
    "tool_call.end": lambda data: ToolCallEnd(call_id=data["id"], name=data["name"], arguments=data["arguments"]),
    "usage": lambda data: UsageReported(usage=usage_from_json(data)),
    "turn.completed": turn_ended_from_json,
    "turn.failed": turn_ended_from_json,
    "turn.cancelled": turn_ended_from_json,
}


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
