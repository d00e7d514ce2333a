"""The transport records every byte, and sends exactly what it is given."""

import asyncio
import gzip
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
import pytest

from server.emulator.exchange import ASGIApp
from server.emulator.server import emulating
from server.providers.wire.exchange import Exchange, WireCut, WireTimedOut, WireUnreachable
from server.providers.wire.transport import ResponseCapture, WireLimits, WireTransport
from tests.contracts.provider_harness import WAIT_SECONDS, Watch
from tests.recordings.replay import Replay

LIMITS = WireLimits(connect_seconds=1, silence_seconds=1)
PIECES = [b"data: 1\n\n", b"data: 2\n\n", b"data: 3\n\n"]


@asynccontextmanager
async def client_of(app: ASGIApp) -> AsyncIterator[httpx2.AsyncClient]:
    async with emulating(app) as url, httpx2.AsyncClient(transport=WireTransport(LIMITS), base_url=url) as client:
        yield client


async def captured(
    client: httpx2.AsyncClient, capture: ResponseCapture, body: object = None
) -> tuple[httpx2.Response, Exchange]:
    with capture:
        response = await client.post("/call", json=body)
    assert capture.answer is not None
    return response, capture.answer


async def test_the_answer_goes_to_the_capture_and_the_caller_gets_an_empty_one() -> None:
    async with client_of(Replay(pieces=PIECES)) as client:
        capture = ResponseCapture({})
        response, answer = await captured(client, capture)
        assert (response.status_code, response.content) == (200, b"")
        assert b"".join([piece async for piece in answer.pieces()]) == b"".join(PIECES)
        assert capture.recording.body == b"".join(PIECES)
        assert capture.recording.status == 200
        assert capture.recording.headers["content-type"] == "text/event-stream"
        assert capture.recording.ended_at is not None


async def test_without_a_capture_the_caller_gets_everything() -> None:
    async with client_of(Replay(pieces=PIECES)) as client:
        assert (await client.get("/")).content == b"".join(PIECES)


async def test_a_capture_without_streaming_fills_placeholders_and_passes_the_answer_on() -> None:
    app = Replay(pieces=[b'{"n":1}'])
    async with client_of(app) as client:
        with ResponseCapture({"placeholder": b"1.0"}, streamed=False) as capture:
            response = await client.post("/call", json={"a": ["placeholder"]})
        assert response.content == b'{"n":1}'
        assert app.requests[0].body == b'{"a":[1.0]}' == capture.recording.request_body


async def test_an_error_goes_to_both() -> None:
    app = Replay(status=429, pieces=[b'{"error":', b'"no"}'], content_type="application/json")
    async with client_of(app) as client:
        with ResponseCapture({}) as capture:
            response = await client.post("/call")
        assert (response.status_code, response.json()) == (429, {"error": "no"})
        assert capture.answer is None
        assert (capture.recording.status, capture.recording.body) == (429, b'{"error":"no"}')
        assert capture.recording.ended_at is not None


async def test_a_cut_leaves_what_had_arrived() -> None:
    async with client_of(Replay(pieces=PIECES, cut=True)) as client:
        _, answer = await captured(client, capture := ResponseCapture({}))
        with pytest.raises(WireCut):
            [piece async for piece in answer.pieces()]
        assert capture.recording.body == b"".join(PIECES)
        assert capture.recording.ended_at is not None


async def test_silence_is_a_timeout_and_leaves_what_had_arrived() -> None:
    watch = Watch(Replay(pieces=PIECES[:1], hold=True))
    async with client_of(watch) as client:
        _, answer = await captured(client, capture := ResponseCapture({}))
        with pytest.raises(WireTimedOut):
            [piece async for piece in answer.pieces()]
        assert capture.recording.body == PIECES[0]
        await asyncio.wait_for((await watch.next_visit()).wait(), WAIT_SECONDS)


async def test_closing_leaves_what_had_arrived_and_disconnects_from_the_peer() -> None:
    watch = Watch(Replay(pieces=PIECES[:1], hold=True))
    async with client_of(watch) as client:
        _, answer = await captured(client, capture := ResponseCapture({}))
        assert await anext(answer.pieces()) == PIECES[0]
        await answer.close()
        await answer.close()
        await asyncio.wait_for((await watch.next_visit()).wait(), WAIT_SECONDS)
        assert capture.recording.body == PIECES[0]
        assert capture.recording.ended_at is not None


async def test_the_connection_is_reused_after_a_complete_answer() -> None:
    app = Replay(pieces=PIECES)
    async with client_of(app) as client:
        for _ in range(3):
            _, answer = await captured(client, ResponseCapture({}))
            assert [piece async for piece in answer.pieces()]
        assert len(app.ports) == 3
        assert len(set(app.ports)) == 1


async def test_the_connection_is_not_reused_after_a_close() -> None:
    app = Replay(pieces=PIECES, hold=True)
    async with client_of(app) as client:
        for _ in range(2):
            _, answer = await captured(client, ResponseCapture({}))
            await answer.close()
        assert len(set(app.ports)) == 2


async def test_no_compression_is_requested_and_the_answer_is_recorded_as_received() -> None:
    app = Replay(pieces=[gzip.compress(b"data: 1\n\n")])
    async with client_of(app) as client:
        _, answer = await captured(client, capture := ResponseCapture({}))
        assert [piece async for piece in answer.pieces()]
        assert app.requests[0].headers["accept-encoding"] == "identity"
        assert gzip.decompress(capture.recording.body) == b"data: 1\n\n"


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
            with pytest.raises(WireUnreachable), ResponseCapture({}) as capture:
                await client.post(f"http://127.0.0.1:{free.getsockname()[1]}/")
            assert capture.recording.ended_at is not None


async def test_a_missing_placeholder_is_an_error_before_anything_is_sent() -> None:
    app = Replay(pieces=PIECES)
    async with client_of(app) as client:
        with pytest.raises(KeyError, match="placeholder"), ResponseCapture({"placeholder": b"1"}):
            await client.post("/call", json={"a": "no h0le"})
        assert app.requests == []


def test_placeholders_are_filled_with_unchanged_bytes() -> None:
    capture = ResponseCapture({"@a:1": b'{"n":1.0} , {"t":"@b:2"}', "@c:3": b""})
    body = json.dumps({"user": '@a:1 and "@a:1"', "x": ["@a:1"], "y": ["@c:3"]}).encode()
    filled = capture.fill(body)
    assert b'["@a:1"]' not in filled
    assert b'[{"n":1.0} , {"t":"@b:2"}]' in filled
    assert b'"y": []' in filled
    assert b"@a:1 and" in filled


async def test_two_requests_at_once_keep_their_answers_apart() -> None:
    app = Replay(pieces=PIECES)
    async with client_of(app) as client:
        taps = [ResponseCapture({"placeholder": str(number).encode()}) for number in range(10)]
        answers = await asyncio.gather(*(captured(client, capture, {"a": "placeholder"}) for capture in taps))
        for _, answer in answers:
            assert [piece async for piece in answer.pieces()]
        assert {capture.recording.request_body for capture in taps} == {f'{{"a":{n}}}'.encode() for n in range(10)}


async def test_a_redirect_is_not_followed() -> None:
    app = Replay(status=307, pieces=[b"elsewhere"])
    async with client_of(app) as client:
        await client.post("/call")
        assert len(app.requests) == 1
