"""No provider can keep a call open for ever, and a connection that it has closed while idle costs nothing."""

import asyncio
import resource
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp.client_proto import ResponseHandler

from server.conversation.block import TextBlock
from server.conversation.errors import ProviderDisconnected, ProviderFailed, ProviderTimedOut
from server.conversation.payload import Payload
from server.providers.anthropic.provider import AnthropicProvider
from server.providers.gemini.provider import GeminiProvider
from server.providers.provider import Provider
from server.providers.wire.transport import WireLimits, _PooledConnection
from tests.contracts.provider_harness import WAIT_SECONDS, BuildProvider, build_payload, consume
from tests.recordings.catalogue import load
from tests.support.fakes.raw_server import STREAM_HEAD, RawConnection, RawServer, chunk, open_raw_server

MODELS = {"gemini": "gemini-3.8-flash", "anthropic": "claude-fable-5-2"}
BUILDERS: dict[str, BuildProvider] = {"gemini": GeminiProvider, "anthropic": AnthropicProvider}
RECORDING = "parallel_calls"
SILENT = WireLimits(silence_seconds=0.3)
"""For a server that sends nothing more."""
SHORT = WireLimits(silence_seconds=60, call_seconds=0.5)
"""For a server that never stops sending."""

vendors = pytest.mark.parametrize("vendor", ["gemini", "anthropic"])


def ask(provider: Provider) -> Payload:
    return build_payload(MODELS[provider.name], [provider.user_message([], {})])


@asynccontextmanager
async def open_wire(
    vendor: str, serve_connection: Callable[[RawConnection], Awaitable[None]], limits: WireLimits | None = None
) -> AsyncIterator[tuple[Provider, RawServer]]:
    async with open_raw_server(serve_connection) as server:
        provider = BUILDERS[vendor]("key", base_url=server.url, limits=limits)
        try:
            yield provider, server
        finally:
            await provider.close()


async def send_bad_chunk_header(connection: RawConnection) -> None:
    """Not together with the head: aiohttp notices it only when it waits for the body."""
    await connection.read_request()
    await connection.send(STREAM_HEAD + chunk(b": a comment\n\n"))
    await asyncio.sleep(0.1)
    await connection.send(b"zz\r\nnot a number of bytes\r\n")
    await connection.closed_by_client()


async def send_nothing(connection: RawConnection) -> None:
    await connection.read_request()
    await connection.closed_by_client()


async def send_head_only(connection: RawConnection) -> None:
    await connection.read_request()
    await connection.send(STREAM_HEAD)
    await connection.closed_by_client()


async def drip(connection: RawConnection, piece: bytes) -> None:
    while not connection.reader.at_eof():
        await connection.send(piece)
        await asyncio.sleep(0.01)


async def drip_head(connection: RawConnection) -> None:
    await connection.read_request()
    await connection.send(b"HTTP/1.1 200 OK\r\nx-endless: ")
    await drip(connection, b"a")


async def drip_chunk_header(connection: RawConnection) -> None:
    """Bytes arrive all the time, and none of them belongs to the body."""
    await connection.read_request()
    await connection.send(STREAM_HEAD + b"5;extension=")
    await drip(connection, b"a")


async def drip_comments(connection: RawConnection) -> None:
    await connection.read_request()
    await connection.send(STREAM_HEAD)
    await drip(connection, chunk(b": still here\n\n"))


async def read_nothing(_: RawConnection) -> None:
    await asyncio.sleep(3600)


ENDLESS = [
    (send_nothing, SILENT),
    (send_head_only, SILENT),
    (read_nothing, SILENT),
    (drip_head, SILENT),
    (drip_chunk_header, SILENT),
    (drip_comments, SHORT),
]


@vendors
@pytest.mark.parametrize(
    ("serve_connection", "limits"), ENDLESS, ids=[serve_connection.__name__ for serve_connection, _ in ENDLESS]
)
async def test_a_streamed_call_that_would_never_end_is_ended(
    vendor: str, serve_connection: Any, limits: WireLimits
) -> None:
    async with open_wire(vendor, serve_connection, limits) as (provider, server):
        stream = provider.open_stream(ask(provider))
        with pytest.raises(ProviderTimedOut):
            await asyncio.wait_for(consume(stream), WAIT_SECONDS)
        assert stream.record.ended_at is not None
        assert server.request_count <= 1


@vendors
@pytest.mark.parametrize(
    "serve_connection", [send_nothing, send_head_only, drip_head, drip_chunk_header, drip_comments]
)
async def test_counting_tokens_that_would_never_end_is_ended(vendor: str, serve_connection: Any) -> None:
    """An answer that is read as a whole has to be complete within the limit for silence, even if bytes arrive all
    the time.
    """
    async with open_wire(vendor, serve_connection, SILENT) as (provider, _):
        with pytest.raises(ProviderTimedOut):
            await asyncio.wait_for(provider.count_tokens(ask(provider)), WAIT_SECONDS)


@pytest.mark.parametrize("serve_connection", [send_nothing, drip_comments])
async def test_a_call_for_caches_that_would_never_end_is_ended(serve_connection: Any) -> None:
    async with open_wire("gemini", serve_connection, SILENT) as (provider, _):
        assert provider.caches is not None
        for call in (
            provider.caches.find("label"),
            provider.caches.create(ask(provider), lifetime_seconds=60, label="label"),
            provider.caches.prolong("cachedContents/x", lifetime_seconds=60),
            provider.caches.delete("cachedContents/x"),
        ):
            with pytest.raises(ProviderTimedOut):
                await asyncio.wait_for(call, WAIT_SECONDS)


@vendors
async def test_a_chunk_header_that_is_no_number_ends_the_call_at_once(vendor: str) -> None:
    async with open_wire(vendor, send_bad_chunk_header) as (provider, _):
        stream = provider.open_stream(ask(provider))
        with pytest.raises(ProviderDisconnected):
            await asyncio.wait_for(consume(stream), WAIT_SECONDS)
        assert stream.record.body == b": a comment\n\n"
        with pytest.raises(ProviderDisconnected):
            await asyncio.wait_for(provider.count_tokens(ask(provider)), WAIT_SECONDS)


@vendors
async def test_the_watchdog_does_not_depend_on_the_http_library(vendor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, with an HTTP library that lets the reader of the body wait, as aiohttp 3.14 does."""
    monkeypatch.setattr(_PooledConnection, "data_received", ResponseHandler.data_received)
    async with open_wire(vendor, send_bad_chunk_header, SILENT) as (provider, _):
        stream = provider.open_stream(ask(provider))
        with pytest.raises(ProviderTimedOut):
            await asyncio.wait_for(consume(stream), WAIT_SECONDS)
        with pytest.raises(ProviderTimedOut):
            await asyncio.wait_for(provider.count_tokens(ask(provider)), WAIT_SECONDS)


@vendors
async def test_an_error_page_that_never_ends_is_ended(vendor: str) -> None:
    async def refuse(connection: RawConnection) -> None:
        await connection.read_request()
        await connection.send(b"HTTP/1.1 500 Oh\r\ntransfer-encoding: chunked\r\n\r\n")
        await drip(connection, chunk(b"a"))

    async with open_wire(vendor, refuse, SILENT) as (provider, _):
        stream = provider.open_stream(ask(provider))
        with pytest.raises(ProviderTimedOut):
            await asyncio.wait_for(consume(stream), WAIT_SECONDS)
        assert stream.record.status == 500


@vendors
async def test_a_slow_listener_does_not_count_as_silence_of_the_provider(vendor: str) -> None:
    """The time that the application takes between two events does not count."""
    body = load(vendor, RECORDING)
    half = len(body) // 2
    more = asyncio.Event()

    async def halve(connection: RawConnection) -> None:
        await connection.read_request()
        await connection.send(STREAM_HEAD + chunk(body[:half]))
        await more.wait()
        await connection.send(chunk(body[half:]) + b"0\r\n\r\n")
        await connection.closed_by_client()

    async with open_wire(vendor, halve, SILENT) as (provider, _):
        stream = provider.open_stream(ask(provider))
        events = stream.events()
        await anext(events)
        await asyncio.sleep(2 * SILENT.silence_seconds)
        more.set()
        assert [event async for event in events]
        assert stream.record.body == body


async def answer_then_close_on_the_next(connection: RawConnection, body: bytes, farewell: bytes = b"") -> None:
    """Answers one request and closes the connection when the next one arrives, like an idle connection that times out
    at that moment. A connection after the first is served normally.
    """
    while await connection.read_request() is not None:
        if connection.number == 1 and connection.request_count > 1:
            if farewell:
                await connection.send(farewell)
            return
        await connection.send_whole(body)


@vendors
async def test_a_pooled_connection_that_the_provider_has_closed_costs_nothing(
    vendor: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "strata.wire")
    body = load(vendor, RECORDING)
    async with open_wire(vendor, lambda connection: answer_then_close_on_the_next(connection, body)) as wire:
        provider, server = wire
        await consume(provider.open_stream(ask(provider)))
        second = provider.open_stream(ask(provider))
        await consume(second)
        assert second.record.body == body
        assert [connection.request_count for connection in server.connections] == [2, 1]
        assert [entry.message for entry in caplog.records] == ["provider.request_resent"]
        assert {"kind": "request_resent"} in second.warnings


@vendors
async def test_a_pooled_connection_that_is_reset_while_the_request_is_written_costs_nothing(vendor: str) -> None:
    body = load(vendor, RECORDING)

    async def reset_the_next(connection: RawConnection) -> None:
        while await connection.read_request() is not None:
            await connection.send_whole(body)
            if connection.number == 1:
                await connection.reader.read(1)
                sock = connection.writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.writer.transport.abort()
                return

    async with open_wire(vendor, reset_the_next) as (provider, server):
        await consume(provider.open_stream(ask(provider)))
        message = provider.user_message([TextBlock(text="x" * 4_000_000)], {})
        second = provider.open_stream(build_payload(MODELS[vendor], [message]))
        await consume(second)
        assert second.record.body == body
        assert [connection.request_count for connection in server.connections] == [1, 1]


@vendors
async def test_counting_tokens_survives_a_closed_connection_too(vendor: str) -> None:
    body = {"gemini": b'{"totalTokens": 7}', "anthropic": b'{"input_tokens": 7}'}[vendor]

    async def count(connection: RawConnection) -> None:
        while await connection.read_request() is not None:
            if connection.number == 1 and connection.request_count > 1:
                return
            await connection.send_whole(body, "application/json")

    async with open_wire(vendor, count) as (provider, server):
        for _ in range(2):
            assert await provider.count_tokens(ask(provider)) == 7
        assert server.request_count == 3


@vendors
async def test_a_request_is_repeated_only_once(vendor: str) -> None:
    body = load(vendor, RECORDING)

    async def close_all_but_the_first(connection: RawConnection) -> None:
        while await connection.read_request() is not None:
            if connection.number > 1 or connection.request_count > 1:
                return
            await connection.send_whole(body)

    async with open_wire(vendor, close_all_but_the_first) as (provider, server):
        await consume(provider.open_stream(ask(provider)))
        with pytest.raises(ProviderDisconnected):
            await consume(provider.open_stream(ask(provider)))
        assert [connection.request_count for connection in server.connections] == [2, 1]


@vendors
async def test_a_fresh_connection_that_breaks_may_have_been_billed_and_is_not_repeated(vendor: str) -> None:
    async def slam(connection: RawConnection) -> None:
        await connection.read_request()

    async with open_wire(vendor, slam) as (provider, server):
        with pytest.raises(ProviderDisconnected):
            await consume(provider.open_stream(ask(provider)))
        assert server.request_count == 1


@vendors
@pytest.mark.parametrize("farewell", [b"H", b"HTTP/1.1 200 OK\r\n", STREAM_HEAD, STREAM_HEAD + b"5"])
async def test_a_request_that_got_a_byte_of_an_answer_is_not_repeated(vendor: str, farewell: bytes) -> None:
    body = load(vendor, RECORDING)
    async with open_wire(vendor, lambda connection: answer_then_close_on_the_next(connection, body, farewell)) as wire:
        provider, server = wire
        await consume(provider.open_stream(ask(provider)))
        with pytest.raises(ProviderFailed):
            await consume(provider.open_stream(ask(provider)))
        assert server.request_count == 2


@vendors
async def test_a_request_that_took_long_is_not_repeated(vendor: str) -> None:
    """A provider that closes seconds after the request has worked on it: the connection was not idle any more."""
    body = load(vendor, RECORDING)

    async def think_then_close(connection: RawConnection) -> None:
        while await connection.read_request() is not None:
            if connection.request_count > 1:
                await asyncio.sleep(0.3)
                return
            await connection.send_whole(body)

    async with open_wire(vendor, think_then_close, WireLimits(idle_close_seconds=0.1)) as (provider, server):
        await consume(provider.open_stream(ask(provider)))
        with pytest.raises(ProviderDisconnected):
            await consume(provider.open_stream(ask(provider)))
        assert server.request_count == 2


@vendors
async def test_a_thousand_streams_receive_their_first_word_while_none_has_ended(vendor: str) -> None:
    """Nothing between a turn and its provider makes one stream wait for the end of another."""
    body = load(vendor, RECORDING)
    half = len(body) // 2
    all_heard = asyncio.Event()

    async def halve(connection: RawConnection) -> None:
        await connection.read_request()
        await connection.send(STREAM_HEAD + chunk(body[:half]))
        await all_heard.wait()
        await connection.send(chunk(body[half:]) + b"0\r\n\r\n")

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(1000, (hard - 500) // 2)
    received: set[int] = set()

    async def listen(provider: Provider, number: int) -> None:
        async for _ in provider.open_stream(ask(provider)).events():
            received.add(number)
            if len(received) == count:
                all_heard.set()

    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        async with open_wire(vendor, halve, WireLimits(connect_seconds=60)) as (provider, server):
            await asyncio.gather(*(listen(provider, number) for number in range(count)))
            assert len(server.connections) == count
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
