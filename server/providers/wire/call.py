"""One call to a provider, as both vendors make it.

A vendor supplies the template of its request with the parts, a fold of the response bytes, and the translation of
errors.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, TypeVar

import httpx2

from server.conversation.block import JsonValue
from server.conversation.errors import (
    CallLimitReached,
    ProviderDisconnected,
    ProviderFailed,
    ProviderMalformed,
    ProviderTimedOut,
    ProviderUnavailable,
    ValidationFailed,
)
from server.conversation.event import ProviderEvent
from server.providers.provider import CallRecord, Fold, ProviderAnswer, StreamState
from server.providers.wire.exchange import (
    Exchange,
    Recording,
    RequestHead,
    WireCut,
    WireError,
    WireTimedOut,
    WireUnreachable,
    begin_recording,
)
from server.providers.wire.request_template import NewTemplate, Placeholders, RequestTemplate
from server.providers.wire.transport import OK, ResponseWait, SdkCall, SdkTransport, read_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class VendorCall:
    """One streamed call as a vendor prepares it."""

    template: RequestTemplate | NewTemplate
    parts: Mapping[str, bytes]
    """What is spliced into the template."""
    warnings: Sequence[Mapping[str, JsonValue]] = ()

    async def encode(self) -> tuple[RequestHead, bytes]:
        """Return the request."""
        template = self.template
        if isinstance(template, NewTemplate):
            template = await template.build()
        return template.head, template.body.fill(self.parts)


Result = TypeVar("Result")

_UNREADABLE: Final = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""What an SDK raises for a response that is not what it expects: no JSON, no text, an object without its members."""
_RUNNING: Final = frozenset({StreamState.NEW, StreamState.WAITING, StreamState.STREAMING})


class WireStream:
    """Implements `server.providers.provider.ProviderStream`."""

    def __init__(
        self,
        call: VendorCall,
        fold: Fold,
        transport: SdkTransport,
        read_error: Callable[[Recording], ProviderFailed],
    ) -> None:
        """`read_error` translates a recorded error response."""
        self._call: VendorCall | None = call
        self._call_warnings = call.warnings
        self._fold = fold
        self._transport = transport
        self._read_error = read_error
        self._recording = begin_recording()
        self._wait = ResponseWait()
        self._opened = asyncio.Event()
        """Set when the wait for a response has ended, in whichever way."""
        self._exchange: Exchange | None = None
        self._final: ProviderAnswer | None = None
        self.state = StreamState.NEW

    @property
    def answer(self) -> ProviderAnswer:
        """Built on each read while the stream runs, and once after it has ended."""
        if self.state in _RUNNING:
            return self._fold.answer
        if self._final is None:
            self._final = self._fold.answer
        return self._final

    @property
    def warnings(self) -> Sequence[Mapping[str, JsonValue]]:
        resent = ({"kind": "request_resent"},) if self._recording.resent else ()
        return (*self._call_warnings, *resent, *self.answer.warnings)

    @property
    def record(self) -> CallRecord:
        recording = self._recording
        return CallRecord(
            started_at=recording.started_at,
            request_body=recording.request_body,
            status=recording.status,
            headers=recording.headers,
            first_byte_at=recording.first_byte_at,
            ended_at=recording.ended_at,
            body=recording.body,
        )

    async def events(self) -> AsyncGenerator[ProviderEvent, None]:
        async with aclosing(self.event_batches()) as batches:
            async for batch in batches:
                for event in batch:
                    if self.state is not StreamState.STREAMING:
                        return
                    yield event

    async def event_batches(self) -> AsyncGenerator[list[ProviderEvent], None]:
        if self.state is not StreamState.NEW:
            return
        self.state = StreamState.WAITING
        try:
            exchange = await self._open()
            while self.state is StreamState.STREAMING:
                piece = await exchange.read()
                # A stream that was cancelled meanwhile has no more events.
                if self.state is not StreamState.STREAMING:
                    return
                if not piece:
                    self._fold.finish()
                    self._move_to(StreamState.COMPLETE)
                    return
                # A piece is folded before any of its events is yielded, so that `answer` matches the recorded bytes.
                batch, failure = self._fold_piece(piece)
                if batch:
                    yield batch
                if failure is not None and self.state is StreamState.STREAMING:
                    raise failure  # noqa: TRY301  reason: the handlers below set the state
        except WireError as error:
            if self.state is StreamState.CANCELLED:
                return
            self._move_to(StreamState.FAILED)
            raise translate_wire(error) or error from error
        except Exception:
            self._move_to(StreamState.FAILED)
            raise
        finally:
            self._move_to(StreamState.CANCELLED)
            self._close()

    def call_when_sent(self, callback: Callable[[], None]) -> None:
        self._recording.on_sent = callback

    async def cancel(self) -> None:
        if self.state is StreamState.WAITING:
            self._wait.end()
        self._move_to(StreamState.CANCELLED)
        if self._call is None:
            # Another task waits for the response, or has waited for it.
            await self._opened.wait()
        self._close()

    async def _open(self) -> Exchange:
        """Send the request and wait for the response. Raises `ProviderFailed` for an error response."""
        call, self._call = self._call, None
        if call is None:
            raise LookupError("The request has been sent.")
        try:
            async with self._wait:
                head, body = await call.encode()
                self._exchange = await self._transport.open(head, body, self._recording, self._wait, streamed=True)
        finally:
            self._opened.set()
        if self._recording.status != OK:
            await read_whole(self._exchange)
            raise self._read_error(self._recording)
        self._move_to(StreamState.STREAMING)
        return self._exchange

    def _fold_piece(self, piece: bytes) -> tuple[list[ProviderEvent], ProviderFailed | None]:
        events: list[ProviderEvent] = []
        try:
            events.extend(self._fold.feed(piece))
        except ProviderFailed as failure:
            return events, failure
        return events, None

    def _move_to(self, state: StreamState) -> None:
        """Change the state, unless the stream has ended."""
        if self.state in _RUNNING:
            self.state = state

    def _close(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
        self._recording.end()


async def encode_request(call: VendorCall) -> bytes:
    """Return the body that the call would send. Nothing is sent.

    Raises `ValidationFailed` for a model name that cannot be part of a URL.
    """
    try:
        _, body = await call.encode()
    except httpx2.InvalidURL as error:
        raise ValidationFailed("The name of the model cannot be part of a URL.") from error
    return body


async def call_through(
    send: Callable[[], Awaitable[Result]],
    *,
    translate: Callable[[Exception, Recording], ProviderFailed | None],
    placeholders: Placeholders | None = None,
    parts: Mapping[str, bytes] | None = None,
) -> Result:
    """Make a call whose response is not streamed, and return what the SDK makes of it. Raises `ProviderFailed`.

    `translate` translates an error of the SDK, and returns None for a bug. `parts` replace the placeholders.
    """
    held = Placeholders() if placeholders is None else placeholders
    with SdkCall(fill=lambda body: held.split(body).fill(parts or {})) as call:
        try:
            return await send()
        except Exception as error:
            failure = translate_wire(error) or translate(error, call.recording)
            if failure is None and call.recording.status is not None and isinstance(error, _UNREADABLE):
                failure = ProviderMalformed()
            if failure is None:
                raise
            raise failure from error


def translate_wire(error: BaseException | None) -> ProviderFailed | None:
    """Translate an error of the network, however deep an SDK has wrapped it; None if there is none."""
    while error is not None:
        if isinstance(error, CallLimitReached):
            return error
        if isinstance(error, WireTimedOut):
            return ProviderTimedOut(str(error))
        if isinstance(error, WireUnreachable):
            return ProviderUnavailable("The provider cannot be reached.")
        if isinstance(error, WireCut):
            return ProviderDisconnected()
        error = error.__cause__ or error.__context__
    return None
