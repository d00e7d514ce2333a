"""The HTTP transport of both SDKs.

It differs from an ordinary transport in one way: the response to a request that is sent while a `ResponseCapture` is
open goes to the capture and not to the SDK. The SDK gets an empty response, which both SDKs take for a stream that has
ended. An error response goes to the SDK as well, so that it raises its usual error. In a dry run the request is not
sent.

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
import io
import logging
from collections.abc import AsyncIterator
from contextvars import ContextVar, Token
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

import aiohttp
import httpx2
from aiohttp.client_proto import ResponseHandler
from aiohttp.http_exceptions import HttpProcessingError

from server.providers.call_slots import CallSlots
from server.providers.wire.exchange import Exchange, Recording, WireCut, WireTimedOut, WireUnreachable, begin_recording

_OMITTED_HEADERS: Final = frozenset({"accept-encoding", "connection", "content-length", "host", "transfer-encoding"})
_OK: Final = 200
_LARGE_BODY_BYTES: Final = 1024 * 1024
_ERRORS: Final = 400
_OPEN_CAPTURE: ContextVar["ResponseCapture | None"] = ContextVar("strata_open_capture", default=None)
_ATTEMPT: ContextVar["_Attempt | None"] = ContextVar("strata_wire_attempt", default=None)

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


class ResponseCapture:
    """Receives the response to the request that is sent while it is open, in place of the SDK that sends it.

    `placeholders` are texts that the SDK encodes in place of JSON that must be sent exactly as it is stored: the
    transport replaces the texts by the bytes. Number formats, unknown fields and key order are kept, and the SDK does
    not spend time on megabytes that it could only change.
    """

    def __init__(self, placeholders: dict[str, bytes], *, streamed: bool = True, dry_run: bool = False) -> None:
        """If not `streamed`, the placeholders are replaced and the response goes to the SDK.

        `dry_run`: the request is recorded and not sent, and the SDK gets a stream that ends at once.
        """
        self._placeholders = placeholders
        self.streamed = streamed
        self.dry_run = dry_run
        self._token: Token[ResponseCapture | None] | None = None
        self.recording: Recording = begin_recording()
        self.answer: Exchange | None = None
        """The response, after it has begun and if it is not an error."""

    def __enter__(self) -> Self:
        self._token = _OPEN_CAPTURE.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._token is not None:
            _OPEN_CAPTURE.reset(self._token)

    def fill(self, body: bytes) -> bytes:
        """Return the body with the placeholders replaced. Raises `KeyError` if one is missing."""
        offsets = sorted((_find_offset(body, placeholder), placeholder) for placeholder in self._placeholders)
        pieces, end = [], 0
        for offset, placeholder in offsets:
            pieces += [body[end:offset], self._placeholders[placeholder]]
            end = offset + len(_as_json(placeholder))
        return b"".join((*pieces, body[end:]))


def _find_offset(body: bytes, placeholder: str) -> int:
    offset = body.find(_as_json(placeholder))
    if offset < 0:
        raise KeyError(placeholder)
    return offset


def _as_json(placeholder: str) -> bytes:
    return b'"' + placeholder.encode() + b'"'


class LiveAnswer:
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
        self._slots = slots
        self._closed = False
        self._silence_seconds = silence_seconds
        self._deadline = deadline
        self.recording = recording

    async def pieces(self) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        content = self._response.content
        try:
            while True:
                # The time counts only while this waits for the provider, not while the consumer of the pieces is busy.
                async with asyncio.timeout_at(min(loop.time() + self._silence_seconds, self._deadline)):
                    piece = await content.readany()
                if not piece:
                    return
                self.recording.append(piece)
                yield piece
        except TimeoutError as error:
            raise WireTimedOut(self._describe_timeout(loop.time())) from error
        except (aiohttp.ClientError, OSError) as error:
            raise WireCut("The connection ended before the response was complete.") from error
        finally:
            await self.close()

    async def close(self) -> None:
        """Close the connection. `release` would read on, and the provider would go on generating and billing."""
        self.recording.end()
        if self._closed:
            return
        self._closed = True
        self._slots.release()
        connection = self._response.connection
        transport = None if connection is None else connection.transport
        self._response.close()
        if transport is not None:
            # `close` alone would wait for a peer that reads nothing more.
            transport.abort()

    def _describe_timeout(self, now: float) -> str:
        if now >= self._deadline:
            return "The response was not complete in time."
        return "The provider sent nothing for too long."


async def take_request(request: httpx2.Request) -> tuple[ResponseCapture | None, Recording]:
    """Return the open capture, if there is one, and the recording with the body as it is sent."""
    capture = _OPEN_CAPTURE.get()
    body = await request.aread()
    recording = begin_recording() if capture is None else capture.recording
    recording.begin(body if capture is None else capture.fill(body))
    return capture, recording


async def answer_sdk(capture: ResponseCapture | None, answer: Exchange, status: int) -> httpx2.Response:
    """Build the response for the SDK: the whole one, or an empty one if a capture gets it."""
    if capture is not None and capture.streamed and status < _ERRORS:
        capture.answer = answer
        return empty_stream(status)
    content = b"".join([piece async for piece in answer.pieces()])
    return httpx2.Response(status, headers=list(answer.recording.headers.items()), content=content)


def empty_stream(status: int = _OK) -> httpx2.Response:
    """Build a response that both SDKs take for a stream that has ended."""
    return httpx2.Response(status, headers={"content-type": "text/event-stream"}, content=b"")


@dataclass(slots=True)
class _Attempt:
    """The state of one request that is being sent."""

    connection: "_PooledConnection | None" = None
    """None until the request has one."""
    transport: asyncio.BaseTransport | None = None
    sent_at: float = 0.0
    silence_seconds: float = 0.0
    limit: asyncio.Timeout | None = None
    """The timeout for the head of the response. It is shortened when there is a connection."""

    def begin(self, connection: "_PooledConnection") -> None:
        """Record that the request is sent on this connection now."""
        self.connection, self.transport = connection, connection.transport
        self.sent_at = asyncio.get_running_loop().time()
        if self.limit is not None:
            self.limit.reschedule(self.sent_at + self.silence_seconds)


class _PooledConnection(ResponseHandler):
    """A connection that counts its requests, and the bytes of the response to the current one."""

    request_count = 0
    response_bytes = 0

    def set_response_params(self, **options: Any) -> None:
        """Called by aiohttp when it assigns the connection to a request."""
        self.request_count += 1
        self.response_bytes = 0
        attempt = _ATTEMPT.get()
        if attempt is not None:
            attempt.begin(self)
        super().set_response_params(**options)

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
        super().__init__(**options)
        self._factory = partial(_PooledConnection, loop=self._loop)  # type: ignore[assignment]  # reason: a subclass


def _as_stream(body: bytes) -> bytes | io.BytesIO:
    """Return a large body as a stream: one large write would block the other calls of the process."""
    return io.BytesIO(body) if len(body) > _LARGE_BODY_BYTES else body


class WireTransport(httpx2.AsyncBaseTransport):
    """One per process and provider. Opens its connections on first use. All transports of a process share `slots`."""

    def __init__(self, limits: WireLimits, slots: CallSlots | None = None) -> None:
        self._limits = limits
        self._slots = slots or CallSlots()
        self._session: aiohttp.ClientSession | None = None
        self._fresh_session: aiohttp.ClientSession | None = None

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        capture, recording = await take_request(request)
        if capture is not None and capture.dry_run:
            return empty_stream()
        await self._slots.take()
        try:
            deadline = asyncio.get_running_loop().time() + self._limits.call_seconds
            response = await self._send(request, recording)
        except BaseException:
            self._slots.release()
            raise
        if capture is None or not capture.streamed or response.status >= _ERRORS:
            deadline = min(deadline, asyncio.get_running_loop().time() + self._limits.silence_seconds)
        answer = LiveAnswer(
            response, recording, self._slots, silence_seconds=self._limits.silence_seconds, deadline=deadline
        )
        return await answer_sdk(capture, answer, response.status)

    async def aclose(self) -> None:
        for session in (self._session, self._fresh_session):
            if session is not None:
                await session.close()

    async def _send(self, request: httpx2.Request, recording: Recording) -> aiohttp.ClientResponse:
        if self._session is None:
            self._session = self._open_session(keepalive_timeout=self._limits.idle_seconds)
        attempt = _Attempt(silence_seconds=self._limits.silence_seconds)
        try:
            return await self._send_once(self._session, request, recording, attempt)
        except WireCut:
            if not self._may_send_again(attempt):
                raise
        _log.info("provider.request_resent", extra={"host": request.url.host})
        recording.resent = True
        recording.begin(recording.request_body)
        if self._fresh_session is None:
            self._fresh_session = self._open_session(force_close=True)
        return await self._send_once(
            self._fresh_session, request, recording, _Attempt(silence_seconds=attempt.silence_seconds)
        )

    def _may_send_again(self, attempt: _Attempt) -> bool:
        """Whether the pooled connection was closed because it was idle; see the module."""
        connection = attempt.connection
        if connection is None or connection.request_count == 1 or connection.response_bytes > 0:
            return False
        return asyncio.get_running_loop().time() - attempt.sent_at <= self._limits.idle_close_seconds

    async def _send_once(
        self, session: aiohttp.ClientSession, request: httpx2.Request, recording: Recording, attempt: _Attempt
    ) -> aiohttp.ClientResponse:
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in _OMITTED_HEADERS]
        token = _ATTEMPT.set(attempt)
        try:
            async with asyncio.timeout(self._limits.connect_seconds + self._limits.silence_seconds) as attempt.limit:
                response = await session.request(
                    request.method,
                    str(request.url),
                    data=_as_stream(recording.request_body) or None,
                    # No compression: the stored bytes are the sent ones.
                    headers=[*headers, ("accept-encoding", "identity")],
                    allow_redirects=False,
                )
        except (TimeoutError, aiohttp.ServerTimeoutError) as error:
            recording.end()
            if attempt.transport is not None:
                # `close` alone would wait for a peer that does not read the request.
                attempt.transport.abort()  # type: ignore[attr-defined]
            raise WireTimedOut("No response arrived in time.") from error
        except aiohttp.ClientConnectorError as error:
            recording.end()
            raise WireUnreachable("No connection could be established.") from error
        except (aiohttp.ClientError, OSError) as error:
            recording.end()
            raise WireCut("The connection ended before a response.") from error
        finally:
            _ATTEMPT.reset(token)
        recording.answer(response.status, {name.lower(): value for name, value in response.headers.items()})
        return response

    def _open_session(self, **options: Any) -> aiohttp.ClientSession:
        limits = self._limits
        return aiohttp.ClientSession(
            # `CallSlots` limits the number of calls; a limit here would make them wait unseen.
            connector=_Connector(limit=0, **options),
            # aiohttp limits the connection only; the other limits are enforced by this class.
            timeout=aiohttp.ClientTimeout(total=None, connect=limits.connect_seconds),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("content-type", "user-agent"),
        )
