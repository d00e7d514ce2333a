"""The transport under both SDKs.

What differs from an ordinary one: a request that is made while a `Tap` is open is answered to the tap and not to the
SDK; the SDK sees an empty answer, which both of them take for a stream that has ended. An answer that is an error goes
to the SDK too, so that it raises what it would have raised. With a dry tap the request does not leave at all.
"""

from collections.abc import AsyncIterator
from contextvars import ContextVar, Token
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

import aiohttp
import httpx2

from server.wire.exchange import Exchange, Recording, WireCut, WireTimedOut, WireUnreachable, begin_recording

_OMITTED_HEADERS: Final = frozenset({"accept-encoding", "connection", "content-length", "host", "transfer-encoding"})
_OK: Final = 200
_ERRORS: Final = 400
_OPEN_TAP: ContextVar["Tap | None"] = ContextVar("strata_open_tap", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class WireLimits:
    """How long the network may take, and how much of it there is."""

    connect_seconds: float = 10.0
    silence_seconds: float = 120.0
    """Between two reads. A model that thinks sends pings or thoughts; one that sends nothing for so long is gone."""
    connections: int = 256


class Tap:
    """Receives the answer to the one request that is made while it is open, instead of the SDK that makes it.

    `holes` are texts that the SDK was given in place of JSON that has to leave exactly as it is stored: the transport
    writes the bytes where the SDK wrote the text. So number formats, unknown fields and key order survive, and the SDK
    need not look at megabytes that it could only change.
    """

    def __init__(self, holes: dict[str, bytes], *, streamed: bool = True, dry: bool = False) -> None:
        """Unless `streamed`, the holes are filled and the answer goes to the SDK all the same.

        `dry`: the request is only recorded, and the SDK sees a stream that ends at once.
        """
        self._holes = holes
        self.streamed = streamed
        self.dry = dry
        self._token: Token[Tap | None] | None = None
        self.recording: Recording = begin_recording()
        self.answer: Exchange | None = None
        """The answer, once there is one that is no error."""

    def __enter__(self) -> Self:
        self._token = _OPEN_TAP.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._token is not None:
            _OPEN_TAP.reset(self._token)

    def fill(self, body: bytes) -> bytes:
        """The body with the stored bytes in their places. Raises `KeyError` for a hole that is not there."""
        places = sorted((_find_hole(body, hole), hole) for hole in self._holes)
        pieces, behind = [], 0
        for place, hole in places:
            pieces += [body[behind:place], self._holes[hole]]
            behind = place + len(_written(hole))
        return b"".join((*pieces, body[behind:]))


def _find_hole(body: bytes, hole: str) -> int:
    place = body.find(_written(hole))
    if place < 0:
        raise KeyError(hole)
    return place


def _written(hole: str) -> bytes:
    """As the SDK has written it."""
    return b'"' + hole.encode() + b'"'


class LiveAnswer:
    """An answer whose body is still coming. See `server.wire.exchange.Exchange`."""

    def __init__(self, response: aiohttp.ClientResponse, recording: Recording) -> None:
        self._response = response
        self.recording = recording

    async def pieces(self) -> AsyncIterator[bytes]:
        try:
            async for piece in self._response.content.iter_any():
                self.recording.append(piece)
                yield piece
        except TimeoutError as error:
            raise WireTimedOut("Nothing came for too long.") from error
        except (aiohttp.ClientError, OSError) as error:
            raise WireCut("The connection ended in the middle.") from error
        finally:
            await self.close()

    async def close(self) -> None:
        """Not `release`: that would read on, and a model that is not listened to any more would go on being paid."""
        self.recording.end()
        self._response.close()


async def take_request(request: httpx2.Request) -> tuple[Tap | None, Recording]:
    """The open tap, if there is one, and the recording with the body as it leaves."""
    tap = _OPEN_TAP.get()
    body = await request.aread()
    recording = begin_recording() if tap is None else tap.recording
    recording.leave(body if tap is None else tap.fill(body))
    return tap, recording


async def answer_sdk(tap: Tap | None, answer: Exchange, status: int) -> httpx2.Response:
    """What the SDK gets to see: all of the answer, or nothing of it where it belongs to a tap."""
    if tap is not None and tap.streamed and status < _ERRORS:
        tap.answer = answer
        return empty_stream(status)
    content = b"".join([piece async for piece in answer.pieces()])
    return httpx2.Response(status, headers=list(answer.recording.headers.items()), content=content)


def empty_stream(status: int = _OK) -> httpx2.Response:
    """A stream that has ended, as both SDKs take it."""
    return httpx2.Response(status, headers={"content-type": "text/event-stream"}, content=b"")


class WireTransport(httpx2.AsyncBaseTransport):
    """One per process and provider; opens its connections on first use."""

    def __init__(self, limits: WireLimits) -> None:
        self._limits = limits
        self._session: aiohttp.ClientSession | None = None

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        tap, recording = await take_request(request)
        if tap is not None and tap.dry:
            return empty_stream()
        response = await self._send(request, recording)
        return await answer_sdk(tap, LiveAnswer(response, recording), response.status)

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _send(self, request: httpx2.Request, recording: Recording) -> aiohttp.ClientResponse:
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in _OMITTED_HEADERS]
        try:
            response = await self._opened().request(
                request.method,
                str(request.url),
                data=recording.request_body or None,
                # What is stored is what was sent: no compression in between.
                headers=[*headers, ("accept-encoding", "identity")],
                allow_redirects=False,
            )
        except (TimeoutError, aiohttp.ServerTimeoutError) as error:
            recording.end()
            raise WireTimedOut("No answer came in time.") from error
        except aiohttp.ClientConnectorError as error:
            recording.end()
            raise WireUnreachable("No connection could be made.") from error
        except (aiohttp.ClientError, OSError) as error:
            recording.end()
            raise WireCut("The connection ended before an answer.") from error
        recording.answer(response.status, {name.lower(): value for name, value in response.headers.items()})
        return response

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            limits = self._limits
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=limits.connections),
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=limits.connect_seconds, sock_read=limits.silence_seconds
                ),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("content-type", "user-agent"),
            )
        return self._session
