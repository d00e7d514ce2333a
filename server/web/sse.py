"""A turn as server-sent events.

Each event is `id`, its number in the turn; `event`, its name; `data`, one line of JSON. In this order:

| event             | data                                                                                        |
|-------------------|---------------------------------------------------------------------------------------------|
| `turn.started`    | conversation_id, input_seq, seq                                                             |
| `thinking.delta`  | text                                                                                        |
| `text.delta`      | text                                                                                        |
| `tool_call.begin` | id, name                                                                                    |
| `tool_call.delta` | id, arguments_json                                                                          |
| `tool_call.end`   | id, name, arguments                                                                         |
| `usage`           | the five buckets                                                                            |
| `turn.completed`  | turn, conversation: the last event of a turn that completed                                 |
| `turn.failed`     | turn, conversation, error: the last event of one that failed or was interrupted             |
| `turn.cancelled`  | turn, conversation: the last event of one that was cancelled                                |

The response is one of our own: Litestar's goes through a generator, a task group and a queue for every event. All
events that are there leave in one write. A reader that is slow is waited for here, by nobody else; one that goes away
ends this response and nothing more.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Final, assert_never

from litestar import Response
from litestar.types import ASGIApp, Receive, Scope, Send

from server.event import TextDelta, ThinkingDelta, ToolCallBegin, ToolCallDelta, ToolCallEnd, UsageReported
from server.turn import TurnState
from server.turn_event import TurnEnded, TurnEvent, TurnStarted
from server.turn_handle import EventReader
from server.web.json_text import encode_json
from server.web.views import ModelTurnView, StatusView, UsageView

EVENT_STREAM: Final = "text/event-stream"
KEEP_ALIVE: Final = b": keep-alive\n\n"
EVENTS: Final[Mapping[str, str]] = {
    "turn.started": "`conversation_id`, `input_seq`, `seq`. The input is durable; `seq` is the answer's number.",
    "thinking.delta": "`text`. Some reasoning.",
    "text.delta": "`text`. Some of the answer.",
    "tool_call.begin": "`id`, `name`. A tool call begins.",
    "tool_call.delta": "`id`, `arguments_json`. Some of its arguments, as JSON text. Not every provider sends these.",
    "tool_call.end": "`id`, `name`, `arguments`. The call is whole.",
    "usage": "`fresh_input_tokens`, `cache_read_tokens`, `cache_write_tokens`, `output_tokens`, `reasoning_tokens`. "
    "What it took so far; the last one counts.",
    "turn.completed": "`turn`, `conversation`. The answer is durable and whole.",
    "turn.failed": "`turn`, `conversation`, `error` (`code`, `message`, `hint`). The turn failed or was interrupted "
    "(`turn_interrupted`); what had arrived is in `turn`.",
    "turn.cancelled": "`turn`, `conversation`. The turn was cancelled; what had arrived is in `turn`.",
}
"""All events in their order, with their data. Exactly one of the last three ends a stream."""

_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class TurnStream(Response[bytes]):
    """The events of one reader as a response."""

    def __init__(self, reader: EventReader, *, keep_alive_seconds: float, headers: Mapping[str, str]) -> None:
        super().__init__(content=b"", media_type=EVENT_STREAM)
        self._reader = reader
        self._keep_alive_seconds = keep_alive_seconds
        self._own_headers = [(name.encode(), value.encode()) for name, value in headers.items()]

    def to_asgi_response(self, *_arguments: Any, **_options: Any) -> ASGIApp:  # type: ignore[override]  # reason: Litestar only calls it
        """Nothing of what Litestar would add applies to a stream."""
        return self._serve

    async def _serve(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Until the last event has left, or the reader has."""
        writing = asyncio.ensure_future(self._write(send))
        leaving = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._reader.close()
            leaving.cancel()
            if not writing.done():
                writing.cancel()
            await asyncio.gather(writing, leaving, return_exceptions=True)
        if not writing.cancelled():
            writing.result()

    async def _write(self, send: Send) -> None:
        events = await self._reader.next(0)
        if events is None:
            # A browser that listens takes this, and nothing else, as a reason not to come back.
            await send({"type": "http.response.start", "status": 204, "headers": self._own_headers})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        await send({"type": "http.response.start", "status": 200, "headers": [*_HEADERS, *self._own_headers]})
        while events is not None:
            body = b"".join([encode_event(number, event) for number, event in events]) or KEEP_ALIVE
            await send({"type": "http.response.body", "body": body, "more_body": True})
            events = await self._reader.next(self._keep_alive_seconds)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def encode_event(number: int, event: TurnEvent) -> bytes:
    """One event as it goes over the wire. JSON has no raw line breaks, so its data is one line whatever it holds."""
    name, data = describe_event(event)
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (number, name.encode(), encode_json(data))


def describe_event(event: TurnEvent) -> tuple[str, Mapping[str, Any]]:
    """An event's name and data."""
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
    """Until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
