"""The transport records every byte, and sends exactly what it is given."""

import asyncio
import gzip
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx2
import pytest
import uvloop
from multidict import CIMultiDict
from yarl import URL

from server.emulator.exchange import ASGIApp
from server.emulator.server import emulating
from server.providers.call_slots import CallSlots
from server.providers.wire.exchange import (
    Exchange,
    Recording,
    RequestHead,
    WireCut,
    WireTimedOut,
    WireUnreachable,
    begin_recording,
)
from server.providers.wire.transport import ResponseWait, SdkCall, WireLimits, WireTransport
from tests.contracts.provider_harness import WAIT_SECONDS, Watch
from tests.recordings.replay import Replay
from tests.support.fakes.raw_server import RawConnection, open_raw_server

LIMITS = WireLimits(connect_seconds=1, silence_seconds=1)
NO_PARTS: dict[str, bytes] = {}
PIECES = [b"data: 1\n\n", b"data: 2\n\n", b"data: 3\n\n"]


@asynccontextmanager
async def client_of(app: ASGIApp) -> AsyncIterator[httpx2.AsyncClient]:
    async with emulating(app) as url, httpx2.AsyncClient(transport=WireTransport(LIMITS), base_url=url) as client:
        yield client


@dataclass(slots=True)
class Wire:
    """A transport and the address of its peer."""

    transport: WireTransport
    url: str
    slots: CallSlots = field(default_factory=CallSlots)

    async def open(self, body: bytes = b"{}", *, streamed: bool = True) -> tuple[Exchange, Recording]:
        recording = begin_recording()
        head = RequestHead(method="POST", url=URL(f"{self.url}/call"), headers=CIMultiDict({"x-one": "1"}))
        async with ResponseWait() as wait:
            exchange = await self.transport.open(head, body, recording, wait, streamed=streamed)
        return exchange, recording


@asynccontextmanager
async def wire_to(app: ASGIApp) -> AsyncIterator[Wire]:
    slots = CallSlots()
    async with emulating(app) as url, WireTransport(LIMITS, slots) as transport:
        yield Wire(transport, url, slots)


async def read(exchange: Exchange) -> list[bytes]:
    return [piece async for piece in _pieces(exchange)]


async def _pieces(exchange: Exchange) -> AsyncIterator[bytes]:
    while piece := await exchange.read():
        yield piece


async def test_the_answer_is_read_and_recorded() -> None:
    async with wire_to(Replay(pieces=PIECES)) as wire:
        exchange, recording = await wire.open()
        assert (recording.status, recording.body, wire.slots.in_use) == (200, b"", 1)
        assert b"".join(await read(exchange)) == b"".join(PIECES)
        assert recording.body == recording.body == b"".join(PIECES)
        assert recording.headers["content-type"] == "text/event-stream"
        assert recording.ended_at is not None
        exchange.close()
        assert wire.slots.in_use == 0


async def test_an_sdk_gets_everything() -> None:
    async with client_of(Replay(pieces=PIECES)) as client:
        assert (await client.get("/")).content == b"".join(PIECES)


async def test_the_body_of_an_sdk_is_filled_in_and_the_answer_recorded() -> None:
    app = Replay(pieces=[b'{"n":1}'])
    async with client_of(app) as client:
        with SdkCall(fill=lambda body: body.replace(b'"placeholder"', b"1.0")) as call:
            response = await client.post("/call", json={"a": ["placeholder"]})
        assert response.content == b'{"n":1}' == call.recording.body
        assert app.requests[0].body == b'{"a":[1.0]}' == call.recording.request_body


async def test_an_error_of_an_sdk_is_recorded() -> None:
    app = Replay(status=429, pieces=[b'{"error":', b'"no"}'], content_type="application/json")
    async with client_of(app) as client:
        with SdkCall() as call:
            response = await client.post("/call")
        assert (response.status_code, response.json()) == (429, {"error": "no"})
        assert (call.recording.status, call.recording.body) == (429, b'{"error":"no"}')
        assert call.recording.ended_at is not None


async def test_a_dry_run_keeps_the_request_and_sends_nothing() -> None:
    app = Replay(pieces=PIECES)
    async with client_of(app) as client:
        with SdkCall(dry_run=True) as call:
            response = await client.post("/call?q=%20a%2Fb", json={"a": 1}, headers={"x-one": "1"})
        assert (response.status_code, response.content) == (200, b"")
        head, body = call.request
        assert (head.method, head.url.raw_path_qs, body) == ("POST", "/call?q=%20a%2Fb", b'{"a":1}')
        assert (head.headers["x-one"], head.headers["accept-encoding"]) == ("1", "identity")
        assert not {"content-length", "host", "connection"} & {name.lower() for name in head.headers}
        assert app.requests == []


def test_an_sdk_that_sends_nothing_in_a_dry_run_is_an_error() -> None:
    with pytest.raises(LookupError), SdkCall(dry_run=True) as call:
        _ = call.request


async def test_a_cut_leaves_what_had_come() -> None:
    async with wire_to(Replay(pieces=PIECES, cut=True)) as wire:
        exchange, recording = await wire.open()
        with pytest.raises(WireCut):
            await read(exchange)
        assert recording.body == b"".join(PIECES)
        assert recording.ended_at is not None
        assert wire.slots.in_use == 0


async def test_silence_is_a_timeout_and_leaves_what_had_arrived() -> None:
    watch = Watch(Replay(pieces=PIECES[:1], hold=True))
    async with wire_to(watch) as wire:
        exchange, recording = await wire.open()
        with pytest.raises(WireTimedOut, match="sent nothing"):
            await read(exchange)
        assert recording.body == PIECES[0]
        assert wire.slots.in_use == 0
        await asyncio.wait_for((await watch.next_visit()).wait(), WAIT_SECONDS)


async def test_closing_leaves_what_had_arrived_and_disconnects_from_the_peer() -> None:
    watch = Watch(Replay(pieces=PIECES[:1], hold=True))
    async with wire_to(watch) as wire:
        exchange, recording = await wire.open()
        assert await exchange.read() == PIECES[0]
        exchange.close()
        exchange.close()
        assert wire.slots.in_use == 0
        await asyncio.wait_for((await watch.next_visit()).wait(), WAIT_SECONDS)
        assert recording.body == PIECES[0]
        assert recording.ended_at is not None


async def test_a_reader_is_woken_when_another_task_closes() -> None:
    async with wire_to(Replay(pieces=PIECES[:1], hold=True)) as wire:
        exchange, _ = await wire.open()
        assert await exchange.read() == PIECES[0]
        reading = asyncio.create_task(read(exchange))
        await asyncio.sleep(0)
        exchange.close()
        with pytest.raises(WireCut):
            await asyncio.wait_for(reading, WAIT_SECONDS)


async def test_the_connection_is_reused_after_a_complete_answer() -> None:
    app = Replay(pieces=PIECES)
    async with wire_to(app) as wire:
        for _ in range(3):
            exchange, _ = await wire.open()
            assert await read(exchange)
        assert len(app.ports) == 3
        assert len(set(app.ports)) == 1


async def test_the_connection_is_not_reused_after_a_close() -> None:
    app = Replay(pieces=PIECES, hold=True)
    async with wire_to(app) as wire:
        for _ in range(2):
            exchange, _ = await wire.open()
            exchange.close()
        assert len(set(app.ports)) == 2


async def test_a_reader_that_is_slower_than_its_peer_gets_everything() -> None:
    """Reading is paused and resumed many times."""
    pieces = [bytes([number]) * 50_000 for number in range(40)]
    async with wire_to(Replay(pieces=pieces)) as wire:
        exchange, recording = await wire.open()
        async for _ in _pieces(exchange):
            await asyncio.sleep(0.005)
        assert recording.body == b"".join(pieces)


async def test_a_wait_that_another_task_ends_closes_the_connection_and_gives_the_slot_back() -> None:
    asked, left = asyncio.Event(), asyncio.Event()

    async def answer_nothing(connection: RawConnection) -> None:
        await connection.read_request()
        asked.set()
        await connection.closed_by_client()
        left.set()

    slots, recording, wait = CallSlots(), begin_recording(), ResponseWait()
    async with open_raw_server(answer_nothing) as server, WireTransport(LIMITS, slots) as transport:
        head = RequestHead(method="POST", url=URL(server.url), headers=CIMultiDict())

        async def open_and_wait() -> None:
            async with wait:
                await transport.open(head, b"{}", recording, wait, streamed=True)

        opening = asyncio.create_task(open_and_wait())
        await asyncio.wait_for(asked.wait(), WAIT_SECONDS)
        wait.end()
        wait.end()
        wait.limit(60)
        with pytest.raises(WireTimedOut):
            await asyncio.wait_for(opening, WAIT_SECONDS)
        wait.end()
        assert (slots.in_use, recording.status) == (0, None)
        assert recording.ended_at is not None
        await asyncio.wait_for(left.wait(), WAIT_SECONDS)


async def test_no_compression_is_asked_for_and_what_comes_is_kept_as_it_comes() -> None:
    app = Replay(pieces=[gzip.compress(b"data: 1\n\n")])
    async with client_of(app) as client:
        with SdkCall() as call:
            await client.post("/call")
        assert app.requests[0].headers["accept-encoding"] == "identity"
        assert gzip.decompress(call.recording.body) == b"data: 1\n\n"


async def test_headers_of_the_caller_arrive_and_none_is_added() -> None:
    app = Replay(pieces=PIECES)
    async with client_of(app) as client:
        await client.post("/call?alt=sse&q=%20a%2Fb", content=b"{}", headers={"x-one": "1", "user-agent": "u"})
        (request,) = app.requests
        assert (request.path, request.query) == ("/call", {"alt": "sse", "q": " a/b"})
        assert set(request.headers) == {"accept", "accept-encoding", "content-length", "host", "user-agent", "x-one"}
        assert (request.headers["x-one"], request.headers["user-agent"], request.body) == ("1", "u", b"{}")


async def test_a_large_body_arrives_whole_with_its_length_and_no_header_is_added() -> None:
    app = Replay(pieces=PIECES)
    body = bytes(range(256)) * 20_000
    async with client_of(app) as client:
        await client.post("/call", content=body, headers={"user-agent": "u"})
        (request,) = app.requests
        assert request.body == body
        assert set(request.headers) == {"accept", "accept-encoding", "content-length", "host", "user-agent"}


async def test_a_request_without_a_body_has_none() -> None:
    app = Replay(pieces=PIECES)
    async with client_of(app) as client:
        await client.get("/")
        await client.delete("/")
        assert not any("content-type" in request.headers for request in app.requests)
        assert app.requests[0].body == b""


async def test_a_host_without_a_listener_is_unreachable() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        async with httpx2.AsyncClient(transport=WireTransport(LIMITS)) as client:
            with pytest.raises(WireUnreachable), SdkCall() as call:
                await client.post(f"http://127.0.0.1:{free.getsockname()[1]}/")
            assert call.recording.ended_at is not None


async def test_a_body_that_cannot_be_filled_in_is_an_error_before_anything_is_sent() -> None:
    app = Replay(pieces=PIECES)
    async with client_of(app) as client:
        with pytest.raises(KeyError, match="placeholder"), SdkCall(fill=lambda _: NO_PARTS["placeholder"]):
            await client.post("/call", json={"a": "no placeholder"})
        assert app.requests == []


async def test_two_requests_at_once_keep_their_answers_apart() -> None:
    app = Replay(pieces=PIECES)
    async with wire_to(app) as wire:
        opened = await asyncio.gather(*(wire.open(str(number).encode()) for number in range(10)))
        for exchange, recording in opened:
            assert b"".join(await read(exchange)) == recording.body
        assert {recording.request_body for _, recording in opened} == {str(n).encode() for n in range(10)}
        assert {request.body for request in app.requests} == {str(n).encode() for n in range(10)}


async def test_a_redirect_is_not_followed() -> None:
    app = Replay(status=307, pieces=[b"elsewhere"])
    async with client_of(app) as client:
        await client.post("/call")
        assert len(app.requests) == 1


def test_the_transport_works_on_the_event_loop_of_the_server() -> None:
    """Servers and commands run on uvloop, whose transports are of other classes than those of asyncio."""

    async def exchange_and_close() -> tuple[bytes, bool]:
        async with wire_to(Replay(pieces=PIECES)) as wire:
            exchange, recording = await wire.open()
            body = b"".join(await read(exchange))
            cut, _ = await wire.open()
            cut.close()
            return body, recording.body == body

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(exchange_and_close()) == (b"".join(PIECES), True)
