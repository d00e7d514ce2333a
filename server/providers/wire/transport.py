"""The HTTP transport of both SDKs.

It carries two kinds of requests. Streamed calls use `open` directly: the head and the body are there already
(`request_template`), and the response is read as bytes. The other calls of an SDK arrive as its requests and get their
whole response. While an `SdkCall` is open, its parts are filled in; in a dry run the request is kept and not sent.

Timeouts are enforced here and not by the HTTP library, whose read timeout does not cover a broken transfer coding:
`WireLimits` bounds the wait for the head of the response, the silence between two pieces of its body, and the whole
call.

A request is sent a second time in one case only, on a fresh connection, and never a third time: it was sent on a pooled
connection that had carried a request before, no byte of a response arrived, and the provider closed or reset that
connection within `WireLimits.idle_close_seconds`. This is the case when a provider closes an idle connection while a
request is on its way. A request that fails on a fresh connection, later, or after the first byte of a response may have
been processed, and billed: it is not repeated here.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextvars import ContextVar, Token
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

import aiohttp
import httpx2
from aiohttp.abc import AbstractStreamWriter
from aiohttp.client_proto import ResponseHandler
from aiohttp.http_exceptions import HttpProcessingError
from multidict import CIMultiDict
from yarl import URL

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

OK: Final = 200
"""The only status of a response that is not an error: neither API has another one, and redirects are not followed."""
_OMITTED_HEADERS: Final = frozenset({"accept-encoding", "connection", "content-length", "host", "transfer-encoding"})
_LARGE_BODY_BYTES: Final = 512 * 1024
_WRITE_BYTES: Final = 256 * 1024
_NO_AUTO_HEADERS: Final[CIMultiDict[None]] = CIMultiDict([("content-type", None), ("user-agent", None)])
_SDK_CALL: ContextVar["SdkCall | None"] = ContextVar("strata_sdk_call", default=None)

_log = logging.getLogger("strata.wire")


@dataclass(frozen=True, slots=True, kw_only=True)
class WireLimits:
    """Limits on the time that the network may take."""

    connect_seconds: float = 10.0
    """Limit for name resolution, connection and TLS handshake."""
    silence_seconds: float = 120.0
    """Limit for the head of the response, from the connection on, and between two pieces of a streamed body. A model
    that thinks sends pings or thoughts, so this much silence means a failure. A response that is not streamed, and the
    body of an error, must be complete within this time."""
    call_seconds: float = 3600.0
    """Limit for a whole streamed call, however active it is."""
    idle_seconds: float = 15.0
    """How long an idle connection is kept. Well below the providers' own limits, so that they rarely close it first."""
    idle_close_seconds: float = 5.0
    """A request is sent again only if its pooled connection breaks within this time; see the module."""


class ResponseWait:
    """The wait of the current task for the head of a response. It has a limit, and another task can end it.

    Used once, as a context that raises `WireTimedOut` when the wait has ended.
    """

    def __init__(self) -> None:
        self._timeout = asyncio.timeout(None)
        self._is_ended = False

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_ended = True
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError:
            raise WireTimedOut("No response arrived in time.") from error

    def limit(self, seconds: float) -> None:
        """Set the time that is left. Has no effect after the end."""
        if not self._is_ended and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time() + seconds)

    def end(self) -> None:
        """End the wait now, if it has not ended."""
        self.limit(0)
        self._is_ended = True


class SdkCall:
    """What the transport does with the request that an SDK sends while this is open in its context."""

    def __init__(self, *, fill: Callable[[bytes], bytes] | None = None, dry_run: bool = False) -> None:
        """`fill` returns the body to be sent for the one that the SDK has encoded.

        `dry_run`: the request is kept and not sent, and the SDK gets a stream that ends at once.
        """
        self.fill = fill
        self.dry_run = dry_run
        self.recording = begin_recording()
        self._request: tuple[RequestHead, bytes] | None = None
        self._token: Token[SdkCall | None] | None = None

    @property
    def request(self) -> tuple[RequestHead, bytes]:
        """The request of a dry run, with the body that the SDK has encoded."""
        if self._request is None:
            raise LookupError("The SDK sent no request.")
        return self._request

    def keep(self, head: RequestHead, body: bytes) -> None:
        """Keep the request of a dry run."""
        self._request = head, body

    def __enter__(self) -> Self:
        self._token = _SDK_CALL.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._token is not None:
            _SDK_CALL.reset(self._token)


class SdkTransport(httpx2.AsyncBaseTransport, ABC):
    """A transport for an SDK's client and for streamed calls."""

    @abstractmethod
    async def open(
        self, head: RequestHead, body: bytes, recording: Recording, wait: ResponseWait, *, streamed: bool
    ) -> Exchange:
        """Send a request, wait for the head of its response, and record both.

        A response that is not `streamed`, and every error, must be complete within the limit for silence. Raises
        `WireError` and `CallLimitReached`; if `wait` ends, or the task is cancelled, the connection is closed.
        """

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send the request of an SDK and return the whole response. See `SdkCall`."""
        call = _SDK_CALL.get()
        head, body = _read_head(request), await request.aread()
        if call is not None and call.dry_run:
            call.keep(head, body)
            # Both SDKs take it for a stream that has ended.
            return httpx2.Response(OK, headers={"content-type": "text/event-stream"}, content=b"")
        recording = begin_recording() if call is None else call.recording
        body = body if call is None or call.fill is None else call.fill(body)
        async with ResponseWait() as wait:
            exchange = await self.open(head, body, recording, wait, streamed=False)
        await read_whole(exchange)
        return httpx2.Response(recording.status or OK, headers=list(recording.headers.items()), content=recording.body)


def _read_head(request: httpx2.Request) -> RequestHead:
    """Read the head of an SDK's request. The URL stays as the SDK has quoted it."""
    headers = CIMultiDict(item for item in request.headers.items() if item[0].lower() not in _OMITTED_HEADERS)
    # No compression: the stored bytes are the sent ones.
    headers["accept-encoding"] = "identity"
    return RequestHead(method=request.method, url=URL(str(request.url), encoded=True), headers=headers)


async def read_whole(exchange: Exchange) -> None:
    """Read the body to its end; the recording has it."""
    try:
        while await exchange.read():
            pass
    finally:
        exchange.close()


class LiveExchange:
    """Implements `server.providers.wire.exchange.Exchange` on a connection."""

    def __init__(
        self,
        response: aiohttp.ClientResponse,
        recording: Recording,
        slots: CallSlots,
        *,
        silence_seconds: float,
        deadline: float,
    ) -> None:
        """`slots` gets the call's slot back. `deadline`: when the body must be complete, by the event loop's clock."""
        self._response = response
        self._recording = recording
        self._slots = slots
        self._closed = False
        self._silence_seconds = silence_seconds
        self._deadline = deadline
        self._loop = asyncio.get_running_loop()
        self._waits_since: float | None = None
        """None while the consumer is busy: its time does not count as silence of the provider."""
        self._timer: asyncio.TimerHandle | None = None

    async def read(self) -> bytes:
        self._waits_since = now = self._loop.time()
        if now >= self._deadline:
            self.close()
            raise self._timed_out()
        if self._timer is None:
            # One timer for the whole body; it is set again when it fires early.
            self._timer = self._loop.call_at(min(now + self._silence_seconds, self._deadline), self._check_time)
        try:
            piece = await self._response.content.readany()
        except BaseException as error:
            self.close()
            if isinstance(error, aiohttp.ClientError | OSError):
                raise WireCut("The connection ended before the response was complete.") from error
            raise
        self._waits_since = None
        if piece:
            self._recording.append(piece)
        else:
            self.close()
        return piece

    def close(self) -> None:
        """Close the connection. `release` would read on, and the provider would go on generating and billing."""
        self._recording.end()
        if self._closed:
            return
        self._closed = True
        self._slots.release()
        if self._timer is not None:
            self._timer.cancel()
        connection = self._response.connection
        transport = None if connection is None else connection.transport
        self._response.close()
        if transport is not None:
            # `close` alone would wait for a peer that reads nothing more.
            transport.abort()

    def _check_time(self) -> None:
        """End the wait for the next piece if it is over; else look again when it would be."""
        self._timer = None
        if self._waits_since is None:
            return
        due_at = min(self._waits_since + self._silence_seconds, self._deadline)
        if due_at > self._loop.time():
            self._timer = self._loop.call_at(due_at, self._check_time)
        else:
            self._response.content.set_exception(self._timed_out())

    def _timed_out(self) -> WireTimedOut:
        if self._loop.time() >= self._deadline:
            return WireTimedOut("The response was not complete in time.")
        return WireTimedOut("The provider sent nothing for too long.")


class _PooledConnection(ResponseHandler):
    """A connection that counts its requests, and the bytes of the response to the current one."""

    request_count = 0
    response_bytes = 0
    sent_at = 0.0

    def begin_request(self) -> None:
        """Prepare for the response to a request that is sent now."""
        self.request_count += 1
        self.response_bytes = 0
        self.sent_at = self._loop.time()
        self.set_response_params(read_until_eof=True, auto_decompress=False)

    def resume_reading(self, resume_parser: bool = True) -> None:  # noqa: FBT001, FBT002  reason: aiohttp's signature
        """Do nothing unless reading is paused. aiohttp calls this, and then its parser, for each chunk that is read."""
        if self._reading_paused:
            super().resume_reading(resume_parser)

    def data_received(self, data: bytes) -> None:
        """Report a broken transfer coding to the reader of the body, which aiohttp leaves waiting."""
        self.response_bytes += len(data)
        payload = self._payload
        super().data_received(data)
        if payload is not None and isinstance(self.exception(), HttpProcessingError) and not payload.is_eof():
            payload.set_exception(aiohttp.ClientPayloadError("The transfer coding is broken."))


class _Connector(aiohttp.TCPConnector):
    """Makes connections of our class. aiohttp has no public way to choose it."""

    def __init__(self, **options: Any) -> None:
        # `CallSlots` limits the number of calls; a limit here would make them wait unseen.
        super().__init__(limit=0, **options)
        self._factory = partial(_PooledConnection, loop=self._loop)  # type: ignore[assignment]  # reason: a subclass


class _Request(aiohttp.ClientRequest):
    """Gets no headers from aiohttp except those of the connection and the body."""

    def update_auto_headers(self, skip_auto_headers: object) -> None:  # noqa: ARG002  reason: aiohttp's signature
        self._skip_auto_headers = _NO_AUTO_HEADERS


class _ClosedWhenIdle(WireCut):
    """The provider had closed a pooled connection before the request arrived."""


class _LargeBody(aiohttp.payload.Payload):
    """A body that is written in parts: one large write would block the other calls of the process."""

    _autoclose = True

    def __init__(self, body: bytes) -> None:
        super().__init__(body)
        self._size = len(body)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return bytes(self._value).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        view = memoryview(self._value)
        for offset in range(0, len(view), _WRITE_BYTES):
            await writer.write(view[offset : offset + _WRITE_BYTES])


class WireTransport(SdkTransport):
    """One per process and provider. Opens its connections on first use. All transports of a process share `slots`.

    It uses aiohttp's connections, and not its session: a session repeats some requests by itself, and does much for
    each request that is of no use here.
    """

    def __init__(self, limits: WireLimits, slots: CallSlots | None = None) -> None:
        self._limits = limits
        self._slots = slots or CallSlots()
        # aiohttp limits the connection only; the other limits are enforced by this class.
        self._timeout = aiohttp.ClientTimeout(total=None, connect=limits.connect_seconds)
        self._pool: _Connector | None = None
        self._fresh: _Connector | None = None

    async def open(
        self, head: RequestHead, body: bytes, recording: Recording, wait: ResponseWait, *, streamed: bool
    ) -> Exchange:
        limits = self._limits
        recording.begin(body)
        await self._slots.take()
        try:
            deadline = asyncio.get_running_loop().time() + limits.call_seconds
            response = await self._send(head, recording, wait)
        except BaseException:
            recording.end()
            self._slots.release()
            raise
        recording.answer(response.status, {name.lower(): value for name, value in response.headers.items()})
        if not streamed or response.status != OK:
            deadline = min(deadline, asyncio.get_running_loop().time() + limits.silence_seconds)
        return LiveExchange(response, recording, self._slots, silence_seconds=limits.silence_seconds, deadline=deadline)

    async def aclose(self) -> None:
        for connector in (self._pool, self._fresh):
            if connector is not None:
                await connector.close()

    async def _send(self, head: RequestHead, recording: Recording, wait: ResponseWait) -> aiohttp.ClientResponse:
        if self._pool is None:
            self._pool = _Connector(keepalive_timeout=self._limits.idle_seconds)
        try:
            return await self._send_once(self._pool, head, recording.request_body, wait)
        except _ClosedWhenIdle:
            _log.info("provider.request_resent", extra={"host": head.url.host})
        recording.resent = True
        recording.begin(recording.request_body)
        if self._fresh is None:
            self._fresh = _Connector(force_close=True)
        return await self._send_once(self._fresh, head, recording.request_body, wait)

    async def _send_once(
        self, connector: _Connector, head: RequestHead, body: bytes, wait: ResponseWait
    ) -> aiohttp.ClientResponse:
        wait.limit(self._limits.connect_seconds + self._limits.silence_seconds)
        loop = asyncio.get_running_loop()
        data = _LargeBody(body) if len(body) > _LARGE_BODY_BYTES else body or None
        request = _Request(head.method, head.url, headers=head.headers, data=data, loop=loop)
        try:
            connection = await connector.connect(request, [], self._timeout)
        except TimeoutError as error:
            raise WireTimedOut("No response arrived in time.") from error
        except (aiohttp.ClientError, OSError) as error:
            raise WireUnreachable("No connection could be established.") from error
        protocol, transport = connection.protocol, connection.transport
        # Transports of uvloop are no subclass of asyncio's.
        if not isinstance(protocol, _PooledConnection) or transport is None:
            raise TypeError("The connection is not one of ours.")
        wait.limit(self._limits.silence_seconds)
        response = None
        try:
            protocol.begin_request()
            response = await request.send(connection)
            return await response.start(connection)
        except BaseException as error:
            if response is not None:
                response.close()
            connection.close()
            # `close` alone would wait for a peer that does not read the request.
            transport.abort()
            if isinstance(error, aiohttp.ClientError | OSError):
                raise self._cut(protocol) from error
            raise

    def _cut(self, connection: _PooledConnection) -> WireCut:
        """Return the error of a connection that broke before a response; see the module."""
        is_early = connection.sent_at + self._limits.idle_close_seconds >= asyncio.get_running_loop().time()
        if is_early and connection.request_count > 1 and not connection.response_bytes:
            return _ClosedWhenIdle("The provider had closed the connection.")
        return WireCut("The connection ended before a response.")
