"""The transport under both SDKs.

What differs from an ordinary one: a request that is made while a `ResponseCapture` is open is answered to the tap and
not to the SDK; the SDK sees an empty answer, which both of them take for a stream that has ended. An answer that is an
error goes to the SDK too, so that it raises what it would have raised. With a dry tap the request does not leave at
all.

Every call is timed here and not by the HTTP library, whose read timeout does not cover a broken transfer coding:
`WireLimits` bounds the wait for the head of the answer, the silence between two pieces of its body, and the whole call.

A request is sent a second time in one case only, on a fresh connection, and never a third time: it went out on a pooled
connection that had carried a request before, no byte of an answer came, and the provider closed or reset that
connection within `WireLimits.idle_close_seconds`. That is how it looks when a provider closes a connection that was
idle for too long while a request is on its way. Whatever fails on a fresh connection, after the first byte of an
answer, or later than that may have been processed, and so billed: it is not repeated here.
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
_OPEN_CAPTURE: ContextVar["ResponseCapture | None"] = ContextVar("strata_open_tap", default=None)
_ATTEMPT: ContextVar["_Attempt | None"] = ContextVar("strata_wire_attempt", default=None)

_log = logging.getLogger("strata.wire")


@dataclass(frozen=True, slots=True, kw_only=True)
class WireLimits:
    """How long the network may take."""

    connect_seconds: float = 10.0
    """For the resolution of the name, the connection and its TLS handshake."""
    silence_seconds: float = 120.0
    """For the head of the answer, from the connection on, and between two pieces of a streamed body. A model that
    thinks sends pings or thoughts; one that sends nothing for so long is gone. An answer that is not streamed, and the
    body of an error, have to be complete within this time."""
    call_seconds: float = 3600.0
    """For the whole of a streamed call, however lively it is."""
    idle_seconds: float = 15.0
    """How long a connection without a request is kept for the next one. Well below what providers keep, so that they
    are rarely the ones who close it."""
    idle_close_seconds: float = 5.0
    """How soon after a request its pooled connection has to break for the request to be sent again, see the module."""


class ResponseCapture:
    """Receives the answer to the one request that is made while it is open, instead of the SDK that makes it.

    `placeholders` are texts that the SDK was given in place of JSON that has to leave exactly as it is stored: the
    transport writes the bytes where the SDK wrote the text. So number formats, unknown fields and key order survive,
    and the SDK need not look at megabytes that it could only change.
    """

    def __init__(self, placeholders: dict[str, bytes], *, streamed: bool = True, dry_run: bool = False) -> None:
        """Unless `streamed`, the holes are filled and the answer goes to the SDK all the same.

        `dry_run`: the request is only recorded, and the SDK sees a stream that ends at once.
        """
        self._placeholders = placeholders
        self.streamed = streamed
        self.dry_run = dry_run
        self._token: Token[ResponseCapture | None] | None = None
        self.recording: Recording = begin_recording()
        self.answer: Exchange | None = None
        """The answer, once there is one that is no error."""

    def __enter__(self) -> Self:
        self._token = _OPEN_CAPTURE.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._token is not None:
            _OPEN_CAPTURE.reset(self._token)

    def fill(self, body: bytes) -> bytes:
        """The body with the stored bytes in their places. Raises `KeyError` for a hole that is not there."""
        places = sorted((_find_hole(body, placeholder), placeholder) for placeholder in self._placeholders)
        pieces, behind = [], 0
        for place, placeholder in places:
            pieces += [body[behind:place], self._placeholders[placeholder]]
            behind = place + len(_written(placeholder))
        return b"".join((*pieces, body[behind:]))


def _find_hole(body: bytes, placeholder: str) -> int:
    place = body.find(_written(placeholder))
    if place < 0:
        raise KeyError(placeholder)
    return place


def _written(placeholder: str) -> bytes:
    """As the SDK has written it."""
    return b'"' + placeholder.encode() + b'"'


class LiveAnswer:
    """An answer whose body is still coming. See `server.providers.wire.exchange.Exchange`."""

    def __init__(
        self,
        response: aiohttp.ClientResponse,
        recording: Recording,
        slots: CallSlots,
        *,
        silence_seconds: float,
        deadline: float,
    ) -> None:
        """`slots`: where the call's slot goes back to. `deadline`: when the body has to be complete, by the clock of
        the event loop.
        """
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
                # Runs only while this waits for the provider, not while whoever takes the pieces is busy.
                async with asyncio.timeout_at(min(loop.time() + self._silence_seconds, self._deadline)):
                    piece = await content.readany()
                if not piece:
                    return
                self.recording.append(piece)
                yield piece
        except TimeoutError as error:
            raise WireTimedOut(self._describe_timeout(loop.time())) from error
        except (aiohttp.ClientError, OSError) as error:
            raise WireCut("The connection ended in the middle.") from error
        finally:
            await self.close()

    async def close(self) -> None:
        """Not `release`: that would read on, and a model that is not listened to any more would go on being paid."""
        self.recording.end()
        if self._closed:
            return
        self._closed = True
        self._slots.release()
        connection = self._response.connection
        transport = None if connection is None else connection.transport
        self._response.close()
        if transport is not None:
            # A close alone would wait for a peer that takes nothing more.
            transport.abort()

    def _describe_timeout(self, now: float) -> str:
        if now >= self._deadline:
            return "The answer was not complete in time."
        return "Nothing came for too long."


async def take_request(request: httpx2.Request) -> tuple[ResponseCapture | None, Recording]:
    """The open tap, if there is one, and the recording with the body as it leaves."""
    capture = _OPEN_CAPTURE.get()
    body = await request.aread()
    recording = begin_recording() if capture is None else capture.recording
    recording.leave(body if capture is None else capture.fill(body))
    return capture, recording


async def answer_sdk(capture: ResponseCapture | None, answer: Exchange, status: int) -> httpx2.Response:
    """What the SDK gets to see: all of the answer, or nothing of it where it belongs to a tap."""
    if capture is not None and capture.streamed and status < _ERRORS:
        capture.answer = answer
        return empty_stream(status)
    content = b"".join([piece async for piece in answer.pieces()])
    return httpx2.Response(status, headers=list(answer.recording.headers.items()), content=content)


def empty_stream(status: int = _OK) -> httpx2.Response:
    """A stream that has ended, as both SDKs take it."""
    return httpx2.Response(status, headers={"content-type": "text/event-stream"}, content=b"")


@dataclass(slots=True)
class _Attempt:
    """What is known about one request on the wire."""

    connection: "_PooledConnection | None" = None
    """None until there is one."""
    transport: asyncio.BaseTransport | None = None
    sent_at: float = 0.0
    silence_seconds: float = 0.0
    limit: asyncio.Timeout | None = None
    """How long the head of the answer may take. Shortened when there is a connection."""

    def begin(self, connection: "_PooledConnection") -> None:
        """The request goes out on this connection now."""
        self.connection, self.transport = connection, connection.transport
        self.sent_at = asyncio.get_running_loop().time()
        if self.limit is not None:
            self.limit.reschedule(self.sent_at + self.silence_seconds)


class _PooledConnection(ResponseHandler):
    """A connection that counts the requests that it carried, and the bytes of the answer to the present one."""

    request_count = 0
    answer_bytes = 0

    def set_response_params(self, **options: Any) -> None:
        """Called by aiohttp when it gives the connection to a request."""
        self.request_count += 1
        self.answer_bytes = 0
        attempt = _ATTEMPT.get()
        if attempt is not None:
            attempt.begin(self)
        super().set_response_params(**options)

    def data_received(self, data: bytes) -> None:
        """Passes a broken transfer coding on to whoever reads the body, whom aiohttp leaves waiting."""
        self.answer_bytes += len(data)
        payload = self._payload
        super().data_received(data)
        if payload is not None and isinstance(self.exception(), HttpProcessingError) and not payload.is_eof():
            payload.set_exception(aiohttp.ClientPayloadError("The transfer coding is broken."))


class _Connector(aiohttp.TCPConnector):
    """Makes connections that count. aiohttp has no public way to choose their class."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._factory = partial(_PooledConnection, loop=self._loop)  # type: ignore[assignment]  # reason: a subclass


def _written_in_pieces(body: bytes) -> bytes | io.BytesIO:
    """A body that is not written in one go if it is large: that would hold up the other calls of the process."""
    return io.BytesIO(body) if len(body) > _LARGE_BODY_BYTES else body


class WireTransport(httpx2.AsyncBaseTransport):
    """One per process and provider; opens its connections on first use. `slots` are shared by all of a process."""

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
        recording.leave(recording.request_body)
        if self._fresh_session is None:
            self._fresh_session = self._open_session(force_close=True)
        return await self._send_once(
            self._fresh_session, request, recording, _Attempt(silence_seconds=attempt.silence_seconds)
        )

    def _may_send_again(self, attempt: _Attempt) -> bool:
        """Whether the pooled connection was closed as an idle one, see the module."""
        connection = attempt.connection
        if connection is None or connection.request_count == 1 or connection.answer_bytes > 0:
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
                    data=_written_in_pieces(recording.request_body) or None,
                    # What is stored is what was sent: no compression in between.
                    headers=[*headers, ("accept-encoding", "identity")],
                    allow_redirects=False,
                )
        except (TimeoutError, aiohttp.ServerTimeoutError) as error:
            recording.end()
            if attempt.transport is not None:
                # A close alone would wait for a peer that does not read the request.
                attempt.transport.abort()  # type: ignore[attr-defined]
            raise WireTimedOut("No answer came in time.") from error
        except aiohttp.ClientConnectorError as error:
            recording.end()
            raise WireUnreachable("No connection could be made.") from error
        except (aiohttp.ClientError, OSError) as error:
            recording.end()
            raise WireCut("The connection ended before an answer.") from error
        finally:
            _ATTEMPT.reset(token)
        recording.answer(response.status, {name.lower(): value for name, value in response.headers.items()})
        return response

    def _open_session(self, **options: Any) -> aiohttp.ClientSession:
        limits = self._limits
        return aiohttp.ClientSession(
            # `CallSlots` bounds the number of calls; a limit here would make them wait without being seen.
            connector=_Connector(limit=0, **options),
            # Only the connection is left to aiohttp; what comes after it is timed by us.
            timeout=aiohttp.ClientTimeout(total=None, connect=limits.connect_seconds),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("content-type", "user-agent"),
        )
