import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from decimal import Decimal
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.app.http_server import HttpServer, bind, serving_beside
from server.conversation.block import TextBlock, ToolCallBlock
from server.conversation.conversation import ConversationState, ConversationStatus
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
from server.conversation.turn import ModelResponseTurn, StopReason, TurnState
from server.conversation.usage import Usage
from server.turns.handle import MAX_BATCH, EventReader
from server.turns.live import LiveHandle, LiveTurn
from server.web.json_text import encode_json
from server.web.sse import EVENTS, KEEP_ALIVE, MAX_WRITE_BYTES, StreamOptions, TurnStream, describe_event, encode_event
from tests.contracts.provider_harness import WAIT_SECONDS
from tests.support.builders import A_TIME
from tests.support.strategies import any_text, blocks, json_objects

USAGE = Usage(fresh_input_tokens=7, cache_read_tokens=5, cache_write_tokens=3, output_tokens=2, reasoning_tokens=1)
CALL = ToolCallBlock(id="call_1", name="get_weather", arguments={"city": "Oslo"})
TURN = ModelResponseTurn(
    seq=2,
    created_at=A_TIME,
    blocks=(TextBlock(text="It rains."), CALL),
    state=TurnState.COMPLETE,
    stop_reason=StopReason.TOOL_USE,
    error_code=None,
    provider="gemini",
    model="gemini-3.1-pro-preview",
    usage=USAGE,
    cost_usd=Decimal("0.0012"),
    attempt=1,
    revision=2,
)
STATUS = ConversationStatus(id="conv_1", revision=2, state=ConversationState.AWAITING_TOOLS, pending_calls=(CALL,))
STARTED = TurnStarted(conversation_id="conv_1", input_seq=1, seq=2)

events: st.SearchStrategy[TurnEvent] = st.one_of(
    st.builds(TextDelta, text=any_text),
    st.builds(ThinkingDelta, text=any_text),
    st.builds(ToolCallBegin, call_id=any_text, name=any_text),
    st.builds(ToolCallDelta, call_id=any_text, arguments_json=any_text),
    st.builds(ToolCallEnd, call_id=any_text, name=any_text, arguments=json_objects),
    st.builds(UsageReported, usage=st.builds(Usage)),
    st.builds(
        TurnEnded,
        turn=st.builds(
            lambda made, state: replace(TURN, blocks=tuple(made), state=state),
            st.lists(blocks, max_size=3),
            st.sampled_from(TurnState),
        ),
        conversation=st.just(STATUS),
    ),
)


def read(wire: bytes) -> list[tuple[int, str, Any]]:
    """Parse records as a client does."""
    found = []
    for record in wire.decode().split("\n\n")[:-1]:
        if record.startswith(":"):
            continue
        number, name, data = record.split("\n")
        found.append((int(number.removeprefix("id: ")), name.removeprefix("event: "), data.removeprefix("data: ")))
    return [(number, name, json.loads(data)) for number, name, data in found]


@given(events)
def test_every_event_is_encoded_as_its_description(event: TurnEvent) -> None:
    name, data = describe_event(event)
    assert encode_event(7, event) == b"id: 7\nevent: %s\ndata: %s\n\n" % (name.encode(), encode_json(data))


@given(st.lists(events, max_size=5))
def test_any_event_can_be_read_back(expected: list[TurnEvent]) -> None:
    wire = b"".join(encode_event(number, event) for number, event in enumerate(expected, start=1))
    found = read(wire)
    assert [number for number, _, _ in found] == list(range(1, len(expected) + 1))
    for event, (_, name, data) in zip(expected, found, strict=True):
        assert name in EVENTS
        match event:
            case TextDelta() | ThinkingDelta():
                assert data == {"text": json.loads(json.dumps(event.text))}
            case ToolCallEnd():
                assert data["arguments"] == json.loads(json.dumps(event.arguments))
            case _:
                pass


def test_events_have_the_documented_names_and_fields() -> None:
    expected: list[TurnEvent] = [
        STARTED,
        ThinkingDelta(text="Rain?"),
        TextDelta(text="It"),
        ToolCallBegin(call_id="call_1", name="get_weather"),
        ToolCallDelta(call_id="call_1", arguments_json='{"city"'),
        ToolCallEnd(call_id="call_1", name="get_weather", arguments={"city": "Oslo"}),
        UsageReported(usage=USAGE),
        TurnEnded(turn=TURN, conversation=STATUS),
        TurnEnded(turn=replace(TURN, state=TurnState.FAILED, error_code="provider_disconnected"), conversation=STATUS),
        TurnEnded(turn=replace(TURN, state=TurnState.CANCELLED), conversation=STATUS),
    ]
    found = read(b"".join(encode_event(number, event) for number, event in enumerate(expected)))
    assert [name for _, name, _ in found] == list(EVENTS)
    for _, name, data in found:
        for field in data:
            assert f"`{field}`" in EVENTS[name], (name, field)
    assert found[0][2] == {"conversation_id": "conv_1", "input_seq": 1, "seq": 2}
    assert found[5][2] == {"id": "call_1", "name": "get_weather", "arguments": {"city": "Oslo"}}
    assert found[6][2] == {
        "fresh_input_tokens": 7, "cache_read_tokens": 5, "cache_write_tokens": 3, "output_tokens": 2,
        "reasoning_tokens": 1,
    }  # fmt: skip
    assert found[7][2]["conversation"] == {
        "id": "conv_1",
        "revision": 2,
        "state": "awaiting_tools",
        "pending_tool_calls": [{"id": "call_1", "name": "get_weather", "arguments": {"city": "Oslo"}}],
    }
    assert found[8][2]["error"] == found[8][2]["turn"]["error"]
    assert found[8][2]["error"]["code"] == "provider_disconnected"


def test_an_interrupted_turn_is_sent_as_failed() -> None:
    ended = TurnEnded(turn=replace(TURN, state=TurnState.INTERRUPTED), conversation=STATUS)
    ((_, name, data),) = read(encode_event(1, ended))
    assert (name, data["error"]["code"], data["turn"]["state"]) == ("turn.failed", "turn_interrupted", "interrupted")


class Scripted:
    """A reader that returns given events and then waits or ends."""

    def __init__(self, *batches: Sequence[tuple[int, TurnEvent]] | None) -> None:
        self.batches = list(batches)
        self.waiting = asyncio.Event()
        self.closed = False
        self.encodings: dict[int, bytes] = {}

    async def next(self, _limit_seconds: float) -> Sequence[tuple[int, TurnEvent]] | None:
        if self.batches:
            return self.batches.pop(0)
        self.waiting.set()
        await asyncio.Event().wait()
        return None

    def close(self) -> None:
        self.closed = True


async def serve(reader: EventReader, *, leaves: asyncio.Event | None = None) -> list[dict[str, Any]]:
    """The bytes that are sent until the reader ends or the client disconnects."""
    sent: list[dict[str, Any]] = []

    async def receive() -> Any:
        await (leaves or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    stream = TurnStream(reader, StreamOptions(keep_alive_seconds=1), headers={"idempotency-replayed": "true"})
    application: Any = stream.to_asgi_response(None, None)
    await application({"type": "http"}, receive, send)
    return sent


async def test_all_available_events_are_sent_in_one_write() -> None:
    reader = Scripted([(1, STARTED)], [(2, TextDelta(text="a")), (3, TextDelta(text="b"))], [], None)
    start, first, second, silence, last = await serve(reader)
    assert dict(start["headers"]) == {
        b"content-type": b"text/event-stream; charset=utf-8",
        b"cache-control": b"no-cache",
        b"x-accel-buffering": b"no",
        b"idempotency-replayed": b"true",
    }
    assert [name for _, name, _ in read(first["body"])] == ["turn.started"]
    assert [data for _, _, data in read(second["body"])] == [{"text": "a"}, {"text": "b"}]
    assert silence["body"] == KEEP_ALIVE
    assert (last["body"], last["more_body"]) == (b"", False)
    assert reader.closed


async def test_the_last_event_ends_the_response_with_its_own_write() -> None:
    ended = TurnEnded(turn=TURN, conversation=STATUS)
    _, first, last = await serve(Scripted([(1, STARTED)], [(2, TextDelta(text="a")), (3, ended)]))
    assert first["more_body"]
    assert [name for _, name, _ in read(last["body"])] == ["text.delta", "turn.completed"]
    assert not last["more_body"]


async def test_a_last_event_that_is_larger_than_a_write_is_followed_by_the_end_of_the_response() -> None:
    ended = TurnEnded(turn=replace(TURN, blocks=(TextBlock(text="x" * MAX_WRITE_BYTES),)), conversation=STATUS)
    *_, large, last = await serve(Scripted([(1, STARTED)], [(2, ended)], None))
    assert large["more_body"]
    assert (last["body"], last["more_body"]) == (b"", False)


async def test_a_client_that_leaves_ends_the_response_and_nothing_else() -> None:
    reader, leaves = Scripted([(1, STARTED)]), asyncio.Event()
    serving = asyncio.create_task(serve(reader, leaves=leaves))
    await reader.waiting.wait()
    leaves.set()
    sent = await serving
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert reader.closed


async def test_a_failing_reader_aborts_the_response() -> None:
    class Broken(Scripted):
        async def next(self, limit_seconds: float) -> Sequence[tuple[int, TurnEvent]] | None:
            if not self.batches:
                raise ConnectionError
            return await super().next(limit_seconds)

    reader = Broken([(1, STARTED)])
    with pytest.raises(ConnectionError):
        await serve(reader)
    assert reader.closed


texts = st.lists(st.text(max_size=50).map(lambda text: text * 3000), max_size=6)


@given(texts)
async def test_no_write_exceeds_its_limit_and_nothing_is_lost(expected: list[str]) -> None:
    numbered: list[tuple[int, TurnEvent]] = [(at, TextDelta(text=text)) for at, text in enumerate(expected, start=1)]
    sent = await serve(Scripted([(0, STARTED)], numbered, None))
    bodies = [message["body"] for message in sent if message["type"] == "http.response.body"]
    assert all(len(body) <= MAX_WRITE_BYTES for body in bodies)
    whole = b"".join(encode_event(number, event) for number, event in [(0, STARTED), *numbered])
    assert b"".join(bodies) == (whole if expected else whole + KEEP_ALIVE)


async def test_an_event_is_encoded_once_for_all_listeners(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []

    def count(number: int, event: TurnEvent) -> bytes:
        encoded.append(number)
        return encode_event(number, event)

    monkeypatch.setattr("server.web.sse.encode_event", count)
    live = big_turn(MAX_BATCH + 10)
    streams = [await serve(LiveHandle(live=live).read(after)) for after in (0, 0, 5)]
    assert encoded == list(range(1, len(live.events) + 1))
    assert streams[0] == streams[1]


class Crowd:
    """An application in which every request streams the same turn."""

    def __init__(self, live: LiveTurn, stall_seconds: float) -> None:
        self._live = live
        self._options = StreamOptions(
            keep_alive_seconds=60, stall_seconds=stall_seconds, count_stalled=lambda: self.stalled.append(None)
        )
        self.stalled: list[None] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        place = int(dict(scope["headers"]).get(b"last-event-id", b"0"))
        stream = TurnStream(LiveHandle(live=self._live).read(place), self._options, headers={})
        application: Any = stream.to_asgi_response(None, None)
        await application(scope, receive, send)


def big_turn(count: int, text: str = "word") -> LiveTurn:
    live = LiveTurn(tenant_id="t", conversation_id="conv_1", input_seq=1, seq=2)
    live.append([TextDelta(text=text) for _ in range(count)])
    live.end(TurnEnded(turn=replace(TURN, blocks=(TextBlock(text=text * count),)), conversation=STATUS))
    return live


@asynccontextmanager
async def connect(url: str, after: int = 0) -> AsyncIterator[socket.socket]:
    """A client that has requested the stream and reads nothing."""
    port = int(url.rpartition(":")[2])
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)  # noqa: FBT003  reason: the library's signature
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", port))
        await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nhost: x\r\nlast-event-id: %d\r\n\r\n" % after)
        yield client


async def read_until_closed(client: socket.socket) -> bytes:
    loop, received = asyncio.get_running_loop(), b""
    with suppress(ConnectionResetError):
        while piece := await loop.sock_recv(client, 65536):
            received += piece
    return received


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not holds():  # noqa: ASYNC110  reason: there is no event to wait for
            await asyncio.sleep(0.01)


READERS = 20


async def test_stalled_readers_buffer_two_writes_each_and_share_the_rest() -> None:
    """Buffering the whole answer would take 8 MiB for each of them."""
    live = big_turn(8192, "x" * 1024)
    server = HttpServer(Crowd(live, 3600), handle_signals=False, grace_seconds=0)
    async with serving_beside(server, bind("127.0.0.1", 0)) as url, AsyncExitStack() as clients:
        for _ in range(READERS):
            await clients.enter_async_context(connect(url))
        connections: set[Any] = server.server_state.connections
        await until(
            lambda: len(connections) == READERS and all(connection.flow.write_paused for connection in connections)
        )
        # Two writes: one in the transport, and the next one, which waits for it. A chunk of HTTP adds a few bytes.
        buffered = [each.transport.get_write_buffer_size() for each in connections]
        assert max(buffered) <= 2 * (MAX_WRITE_BYTES + 100)
        for each in list(connections):
            each.transport.abort()


async def test_a_stalled_reader_is_disconnected_and_can_resume() -> None:
    live = big_turn(8192, "x" * 1024)
    crowd = Crowd(live, 0.2)
    server = HttpServer(crowd, handle_signals=False, grace_seconds=1)
    async with serving_beside(server, bind("127.0.0.1", 0)) as url:
        async with connect(url) as client, asyncio.timeout(WAIT_SECONDS):
            await until(lambda: bool(crowd.stalled))
            received = await read_until_closed(client)
        assert len(crowd.stalled) == 1
        assert b"turn.completed" not in received
        last = int(re.findall(rb"id: (\d+)\nevent: text.delta\ndata: [^\n]+\n\n", received)[-1])
        async with httpx2.AsyncClient() as reading:
            rest = await reading.get(url, headers={"last-event-id": str(last)})
        numbers = [int(number) for number in re.findall(r"^id: (\d+)$", rest.text, re.MULTILINE)]
        assert numbers == list(range(last + 1, len(live.events) + 1))
        assert len(crowd.stalled) == 1


async def test_an_idle_stream_is_not_stalled() -> None:
    """Nothing is written, so nothing can be left unread."""
    live = LiveTurn(tenant_id="t", conversation_id="conv_1", input_seq=1, seq=2)
    crowd = Crowd(live, 0.05)
    server = HttpServer(crowd, handle_signals=False, grace_seconds=1)
    async with serving_beside(server, bind("127.0.0.1", 0)) as url, connect(url) as client:
        await asyncio.sleep(0.3)
        live.end(TurnEnded(turn=TURN, conversation=STATUS))
        async with asyncio.timeout(WAIT_SECONDS):
            received = b""
            while b"turn.completed" not in received:
                received += await asyncio.get_running_loop().sock_recv(client, 65536)
        assert not crowd.stalled
