"""Limits that apply before the application is called, with real sockets and a trivial application."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from server.app.http_server import ConnectionLimits, HttpServer, Refusal, bind, refuse_plainly, serving_beside
from server.conversation.errors import StrataError

SHORT = 0.05
LONG = 600.0
"""A limit that no test reaches."""


class Served:
    """A server under test: its address, and what it refused."""

    def __init__(self, url: str, server: HttpServer) -> None:
        self.host, _, port = url.removeprefix("http://").partition(":")
        self.port = int(port)
        self.server = server
        self.refused: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.disconnected_count = 0
        self.release = asyncio.Event()

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.host, self.port)

    async def send(self, *pieces: bytes) -> bytes:
        """What the server answers until it closes; the pieces are sent while it reads them."""
        reader, writer = await self.open()
        with suppress(ConnectionError):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
        try:
            return await reader.read()
        finally:
            writer.close()


@asynccontextmanager
async def serving(limits: ConnectionLimits) -> AsyncIterator[Served]:
    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        served.requests.append(scope)
        if scope["path"] == "/watch":
            while (await receive())["type"] != "http.disconnect":
                pass
            served.disconnected_count += 1
        if scope["path"] == "/slow":
            await served.release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    def refuse(error: StrataError) -> Refusal:
        served.refused.append(error.code)
        return refuse_plainly(error)

    server = HttpServer(app, handle_signals=False, grace_seconds=1, loop="none", limits=limits, refuse=refuse)
    async with serving_beside(server, bind("127.0.0.1", 0)) as url:
        served = Served(url, server)
        await until(lambda: bool(server.started))
        yield served
        served.release.set()


async def until(is_true: Callable[[], bool]) -> None:
    while not is_true():  # noqa: ASYNC110  reason: the server has no event for it
        await asyncio.sleep(0.01)


def patient(**limits: Any) -> ConnectionLimits:
    return ConnectionLimits(**{"head_seconds": LONG, "idle_seconds": LONG, **limits})


def get(path: str = "/", *headers: str, close: bool = True) -> bytes:
    lines = [f"GET {path} HTTP/1.1", "host: strata.test", *headers, *(["connection: close"] if close else [])]
    return "\r\n".join([*lines, "", ""]).encode()


async def test_a_request_within_the_limits_is_served() -> None:
    async with serving(patient()) as served:
        answered = await served.send(get("/", *(f"x-{number}: {'v' * 100}" for number in range(90))))
        assert answered.startswith(b"HTTP/1.1 200")
        assert served.refused == []


@pytest.mark.parametrize(
    "request_bytes",
    [
        get("/", "x-large: " + "v" * 20_000),
        get("/", *(f"x-{number}: v" for number in range(101))),
        get("/", *(f"x-{number}: {'v' * 8000}" for number in range(10))),
        get("/" + "p" * 20_000),
    ],
    ids=["one line", "count", "total", "request line"],
)
async def test_a_head_above_a_limit_is_answered_with_431(request_bytes: bytes) -> None:
    async with serving(patient()) as served:
        answered = await served.send(request_bytes)
        assert answered.startswith(b"HTTP/1.1 431 Request Header Fields Too Large")
        assert b"connection: close" in answered
        assert served.refused == ["request_head_too_large"]
        assert served.requests == []


async def test_a_header_that_does_not_end_is_refused_long_before_its_memory_is_spent() -> None:
    """The parser keeps what has no end yet, so its bytes count before they are a header."""
    piece = b"v" * 65_536
    async with serving(patient()) as served:
        answered = await served.send(b"GET / HTTP/1.1\r\nhost: strata.test\r\nx-large: ", *[piece] * 100)
        assert answered.startswith(b"HTTP/1.1 431")
        assert served.requests == []


async def test_trailers_and_chunk_extensions_count_as_a_head() -> None:
    piece = b"v" * 65_536
    post = b"POST /slow HTTP/1.1\r\nhost: strata.test\r\ntransfer-encoding: chunked\r\n\r\n"
    async with serving(patient()) as served:
        for opening in (b"2\r\nok\r\n0\r\nx-trailer: ", b"2;extension="):
            # The application has the request already and has not answered: the connection is cut.
            with suppress(ConnectionError):
                assert await served.send(post + opening, *[piece] * 20) == b""
        assert served.refused == ["request_head_too_large"] * 2


async def test_a_head_that_is_not_sent_in_time_is_answered_with_408() -> None:
    async with serving(patient(head_seconds=SHORT)) as served:
        answered = await served.send(b"GET / HTTP/1.1\r\nhost: str")
        assert answered.startswith(b"HTTP/1.1 408 Request Timeout")
        assert served.refused == ["request_head_timed_out"]


async def test_a_connection_without_a_request_is_closed() -> None:
    async with serving(patient(head_seconds=SHORT)) as served:
        assert await served.send() == b""
        assert served.refused == []


async def test_white_space_does_not_keep_a_connection_open() -> None:
    """Line ends before a request are no request; uvicorn stops its timer for them."""
    async with serving(patient(idle_seconds=LONG, head_seconds=SHORT)) as served:
        reader, writer = await served.open()
        writer.write(get(close=False))
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        writer.write(b"\r\n")
        assert await reader.read() == b""
        writer.close()


async def test_an_idle_connection_is_closed() -> None:
    async with serving(patient(idle_seconds=SHORT)) as served:
        answered = await served.send(get(close=False))
        assert answered.startswith(b"HTTP/1.1 200")
        assert answered.endswith(b"ok")


async def test_a_body_that_comes_after_its_answer_does_not_keep_a_connection_open() -> None:
    async with serving(patient(head_seconds=SHORT)) as served:
        reader, writer = await served.open()
        writer.write(b"POST / HTTP/1.1\r\nhost: strata.test\r\ncontent-length: 1000000\r\n\r\n")
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        writer.write(b"v")
        assert await reader.read() == b""
        writer.close()


async def test_a_connection_is_idle_after_a_body_that_came_after_its_answer() -> None:
    """The connection must not be treated as waiting for a head: a proxy would find it closed long before the idle
    time is over.
    """
    async with serving(patient(idle_seconds=SHORT)) as served:
        reader, writer = await served.open()
        writer.write(b"POST / HTTP/1.1\r\nhost: strata.test\r\ncontent-length: 3\r\n\r\n")
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        writer.write(b"vvv")
        assert await reader.read() == b""
        writer.close()


async def test_a_request_after_a_late_body_is_served() -> None:
    async with serving(patient()) as served:
        reader, writer = await served.open()
        writer.write(b"POST / HTTP/1.1\r\nhost: strata.test\r\ncontent-length: 3\r\n\r\n")
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        writer.write(b"v")
        writer.write(b"vv" + get())
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        assert len(served.requests) == 2
        writer.close()


async def test_connections_above_the_limit_get_503_and_others_continue() -> None:
    async with serving(patient(max_connections=2)) as served:
        held = [await served.open() for _ in range(2)]
        for reader, writer in held:
            writer.write(get(close=False))
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        assert (await served.send(get())).startswith(b"HTTP/1.1 503 Service Unavailable")
        assert served.refused == ["connection_limit_reached"]
        # A refused connection does not count, and a closed one frees its place.
        reader, writer = held.pop()
        writer.write(get())
        await reader.read()
        writer.close()
        await until(lambda: served.server.connection_count <= 1)
        assert (await served.send(get())).startswith(b"HTTP/1.1 200")
        held[0][1].write(get())
        assert (await held[0][0].read()).startswith(b"HTTP/1.1 200")
        held[0][1].close()


async def test_a_second_request_within_a_running_answer_cannot_insert_an_error_into_it() -> None:
    async with serving(patient()) as served:
        reader, writer = await served.open()
        writer.write(get("/slow", close=False))
        await until(lambda: bool(served.requests))
        writer.write(b"this is no HTTP\r\n\r\n")
        try:
            answered = await reader.read()
        except ConnectionError:
            answered = b""
        assert answered == b""
        assert served.refused == ["request_malformed"]
        writer.close()


async def test_requests_that_wait_on_one_connection_are_bounded() -> None:
    async with serving(patient()) as served:
        reader, writer = await served.open()
        writer.write(get("/slow", close=False) * 1000)
        with suppress(ConnectionError):
            assert await reader.read() == b""
        assert served.refused == ["request_malformed"]
        writer.close()


async def test_a_running_request_gets_the_disconnect_if_others_are_pipelined() -> None:
    async with serving(patient()) as served:
        _, writer = await served.open()
        writer.write(get("/watch", close=False) + get("/", close=False) * 3)
        await until(lambda: bool(served.requests))
        writer.transport.abort()
        await until(lambda: served.disconnected_count == 1)
        await until(lambda: not served.server.server_state.tasks)
        assert [scope["path"] for scope in served.requests] == ["/watch"]


async def test_bytes_that_are_not_http_are_answered_with_400() -> None:
    async with serving(patient()) as served:
        assert (await served.send(b"\x16\x03\x01\x02\x00\x01\x00")).startswith(b"HTTP/1.1 400 Bad Request")
        assert served.refused == ["request_malformed"]


async def test_a_refused_connection_leaves_nothing() -> None:
    async with serving(patient()) as served:
        for _ in range(3):
            await served.send(get("/", "x-large: " + "v" * 20_000))
        await until(lambda: not served.server.config.lingering)  # type: ignore[attr-defined]  # reason: of our own configuration
        assert served.server.connection_count == 0
