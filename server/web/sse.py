"""The events of a turn as server-sent events.

Each event has an `id`, its number in the turn; an `event`, its name; and `data`, one line of JSON. In this order:

| event             | data                                                                                        |
|-------------------|---------------------------------------------------------------------------------------------|
| `turn.started`    | conversation_id, input_seq, seq                                                             |
| `thinking.delta`  | text                                                                                        |
| `text.delta`      | text                                                                                        |
| `tool_call.begin` | id, name                                                                                    |
| `tool_call.delta` | id, arguments_json                                                                          |
| `tool_call.end`   | id, name, arguments                                                                         |
| `usage`           | the five token counts                                                                       |
| `turn.completed`  | turn, conversation: the last event of a turn that completed                                 |
| `turn.failed`     | turn, conversation, error: the last event of one that failed or was interrupted             |
| `turn.cancelled`  | turn, conversation: the last event of one that was cancelled                                |

`TurnStream` replaces Litestar's own response, which passes every event through a generator, a task group and a queue.
Available events are written together, in writes of `MAX_WRITE_BYTES`. A slow reader delays only its own response, and a
reader that disconnects ends only its own response.

Each event is encoded once for all readers of its turn, so a reader that does not read costs the memory of two writes. A
reader that takes nothing for `StreamOptions.stall_seconds` is disconnected; it can resume with `last-event-id`.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Any, Final, assert_never

from litestar import Response
from litestar.types import ASGIApp, Receive, Scope, Send

from server.conversation.event import (
    TextDelta,
    ThinkingDelta,
    ToolCallBegin,
    ToolCallDelta,
    ToolCallEnd,
    TurnEnded,
    TurnEvent,
    TurnStarted,
    UsageReported,
)
from server.conversation.turn import TurnState
from server.turns.handle import EventReader
from server.web.api.views import ModelTurnView, StatusView, UsageView
from server.web.asgi_extensions import ABORT_CONNECTION
from server.web.json_text import encode_json

EVENT_STREAM: Final = "text/event-stream"
MAX_WRITE_BYTES: Final = 64 * 1024
"""The HTTP server buffers this much for a connection before a write waits for the reader."""
KEEP_ALIVE: Final = b": keep-alive\n\n"
EVENTS: Final[Mapping[str, str]] = {
    "turn.started": "`conversation_id`, `input_seq`, `seq`. The input is stored; `seq` is the number of the answer.",
    "thinking.delta": "`text`. A piece of the thinking.",
    "text.delta": "`text`. A piece of the answer.",
    "tool_call.begin": "`id`, `name`. A tool call begins.",
    "tool_call.delta": "`id`, `arguments_json`. A piece of its arguments, as JSON text. Not all providers send these.",
    "tool_call.end": "`id`, `name`, `arguments`. The call is complete.",
    "usage": "`fresh_input_tokens`, `cache_read_tokens`, `cache_write_tokens`, `output_tokens`, `reasoning_tokens`. "
    "The usage so far; the last one is final.",
    "turn.completed": "`turn`, `conversation`. The answer is stored and complete; `turn.stop_details` are the "
    "provider's own details of the stop, beyond its reason.",
    "turn.failed": "`turn`, `conversation`, `error` (`code`, `message`, `hint`, `source`, `provider_message`, "
    "`provider_status`, `retry_after_seconds`). The turn failed or was interrupted (`turn_interrupted`); "
    "`turn` has the part that arrived.",
    "turn.cancelled": "`turn`, `conversation`. The turn was cancelled; `turn` has the part that arrived.",
}
"""All events in their order, with their data. Exactly one of the last three ends a stream."""

_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


_log = logging.getLogger("strata.web")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """Options of all streams of a server."""

    keep_alive_seconds: float
    """Time without events after which a stream sends a comment."""
    stall_seconds: float = 30.0
    """How long a reader may leave a write unread."""
    count_stalled: Callable[[], None] = lambda: None
    """Called for each reader that is disconnected because it stalled."""


class TurnStream(Response[bytes]):
    """The response that writes the events of one reader."""

    def __init__(self, reader: EventReader, options: StreamOptions, *, headers: Mapping[str, str]) -> None:
        super().__init__(content=b"", media_type=EVENT_STREAM)
        self._reader = reader
        self._options = options
        self._own_headers = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._write_began_at: float | None = None
        """When the present write began, by the clock of the event loop; None between writes."""

    def to_asgi_response(self, *_arguments: Any, **_options: Any) -> ASGIApp:  # type: ignore[override]  # reason: Litestar only calls it
        """Replace Litestar's response: its additions do not apply to a stream."""
        return self._serve

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write until the last event, a disconnect, or a stall of the reader."""
        writing = asyncio.ensure_future(self._write(send))
        leaving = asyncio.ensure_future(_disconnect(receive))
        try:
            if await self._is_stalled(writing, leaving):
                self._options.count_stalled()
                _log.info("stream.reader_stalled", extra={"limit_seconds": self._options.stall_seconds})
                if not _abort_connection(scope):
                    raise _ReaderStalled
                await leaving
                return
        finally:
            self._reader.close()
            leaving.cancel()
            if not writing.done():
                writing.cancel()
            await asyncio.gather(writing, leaving, return_exceptions=True)
        if not writing.cancelled():
            writing.result()

    async def _is_stalled(self, writing: "asyncio.Future[None]", leaving: "asyncio.Future[None]") -> bool:
        """Wait until one of both is done, and return False, or until a write takes too long, and return True.

        Most writes take no time, so they have no timer of their own.
        """
        loop, limit = asyncio.get_running_loop(), self._options.stall_seconds
        left = limit
        while left > 0:
            done, _ = await asyncio.wait({writing, leaving}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return False
            began_at = self._write_began_at
            left = limit if began_at is None else began_at + limit - loop.time()
        return True

    async def _write(self, send: Send) -> None:
        events = await self._reader.next(0)
        if events is None:
            # An EventSource reconnects after any other answer.
            await send({"type": "http.response.start", "status": 204, "headers": self._own_headers})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        await send({"type": "http.response.start", "status": 200, "headers": [*_HEADERS, *self._own_headers]})
        while events is not None:
            for body, is_last in self._join(events) if events else ((KEEP_ALIVE, False),):
                await self._send(send, body, is_last=is_last)
                if is_last:
                    return
            events = await self._reader.next(self._options.keep_alive_seconds)
        await self._send(send, b"", is_last=True)

    async def _send(self, send: Send, body: bytes, *, is_last: bool) -> None:
        """Send a body. The HTTP server waits until the reader has taken most of the earlier writes."""
        self._write_began_at = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": body, "more_body": not is_last})
        self._write_began_at = None

    def _join(self, events: Sequence[tuple[int, TurnEvent]]) -> Iterator[tuple[bytes, bool]]:
        """Yield the events as writes, each with whether it is known to be the last one of the stream.

        Small events are joined, and a large event is split.
        """
        encodings = self._reader.encodings
        pieces: list[bytes] = []
        size = 0
        for number, event in events:
            encoded = encodings.get(number)
            if encoded is None:
                encoded = encodings[number] = encode_event(number, event)
            if size + len(encoded) > MAX_WRITE_BYTES and pieces:
                yield b"".join(pieces), False
                pieces, size = [], 0
            if len(encoded) > MAX_WRITE_BYTES:
                for start in range(0, len(encoded), MAX_WRITE_BYTES):
                    yield encoded[start : start + MAX_WRITE_BYTES], False
                continue
            pieces.append(encoded)
            size += len(encoded)
        if pieces:
            yield b"".join(pieces), isinstance(events[-1][1], TurnEnded)


class _ReaderStalled(Exception):
    """The reader has not read for too long."""


def _abort_connection(scope: Scope) -> bool:
    """Close the connection without waiting for the reader. Returns False if the server lacks the extension."""
    extension: Any = (scope.get("extensions") or {}).get(ABORT_CONNECTION)
    if extension is None:
        return False
    extension["abort"]()
    return True


def encode_event(number: int, event: TurnEvent) -> bytes:
    """Encode one event. JSON has no raw line breaks, so its data is always one line."""
    if type(event) is TextDelta or type(event) is ThinkingDelta:
        name = "text.delta" if type(event) is TextDelta else "thinking.delta"
        try:
            return f'id: {number}\nevent: {name}\ndata: {{"text":{encode_basestring(event.text)}}}\n\n'.encode()
        except UnicodeEncodeError:
            pass  # An unpaired surrogate, which is escaped below.
    name, data = describe_event(event)
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (number, name.encode(), encode_json(data))


def describe_event(event: TurnEvent) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the data of an event."""
    match event:
        case TextDelta():
            return "text.delta", {"text": event.text}
        case ThinkingDelta():
            return "thinking.delta", {"text": event.text}
        case ToolCallBegin():
            return "tool_call.begin", {"id": event.call_id, "name": event.name}
        case ToolCallDelta():
            return "tool_call.delta", {"id": event.call_id, "arguments_json": event.arguments_json}
        case ToolCallEnd():
            return "tool_call.end", {"id": event.call_id, "name": event.name, "arguments": event.arguments}
        case UsageReported():
            return "usage", UsageView.of(event.usage).model_dump()
        case TurnStarted():
            return "turn.started", {
                "conversation_id": event.conversation_id,
                "input_seq": event.input_seq,
                "seq": event.seq,
            }
        case TurnEnded():
            return _describe_end(event)
        case _:
            assert_never(event)


def _describe_end(event: TurnEnded) -> tuple[str, Mapping[str, Any]]:
    turn = ModelTurnView.of(event.turn).model_dump()
    data = {"turn": turn, "conversation": StatusView.of(event.conversation).model_dump()}
    match event.turn.state:
        case TurnState.COMPLETE:
            return "turn.completed", data
        case TurnState.CANCELLED:
            return "turn.cancelled", data
        case TurnState.FAILED | TurnState.INTERRUPTED:
            return "turn.failed", {**data, "error": turn["error"]}
        case _:
            assert_never(event.turn.state)


async def _disconnect(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
