"""One call to a provider, as both vendors make it.

A vendor supplies three things: how its SDK sends the request, a fold of the response bytes, and the translation of its
SDK's errors.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
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
from server.providers.wire.exchange import Recording, WireCut, WireTimedOut, WireUnreachable
from server.providers.wire.transport import ResponseCapture


@dataclass(frozen=True, slots=True, kw_only=True)
class VendorCall:
    """One call as a vendor prepares it."""

    placeholders: dict[str, bytes] = field(default_factory=dict)
    send: Callable[[], Awaitable[object]]
    """Lets the SDK send the request; the open capture gets the response."""
    warnings: Sequence[Mapping[str, JsonValue]] = ()
    translate: Callable[[Exception, Recording], ProviderFailed | None]
    """Translates an error of the SDK; returns None for a bug."""


Result = TypeVar("Result")

_UNREADABLE: Final = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""What an SDK raises for a response that is not what it expects: no JSON, no text, an object without its members."""
_RUNNING: Final = frozenset({StreamState.NEW, StreamState.WAITING, StreamState.STREAMING})


class WireStream:
    """Implements `server.providers.provider.ProviderStream`."""

    def __init__(self, call: VendorCall, fold: Fold) -> None:
        self._call = call
        self._fold = fold
        self._capture = ResponseCapture(call.placeholders)
        self._sending: asyncio.Task[object] | None = None
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
        resent = ({"kind": "request_resent"},) if self._capture.recording.resent else ()
        return (*self._call.warnings, *resent, *self.answer.warnings)

    @property
    def record(self) -> CallRecord:
        recording = self._capture.recording
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
        if self.state is not StreamState.NEW:
            return
        self.state = StreamState.WAITING
        try:
            await self._open()
            if self._capture.answer is not None:
                async with aclosing(self._read(self._capture.answer.pieces())) as events:
                    async for event in events:
                        yield event
        except Exception:
            self._move_to(StreamState.FAILED)
            raise
        finally:
            self._move_to(StreamState.CANCELLED)
            await self._close()

    def call_when_sent(self, callback: Callable[[], None]) -> None:
        self._capture.recording.on_sent = callback

    async def cancel(self) -> None:
        self._move_to(StreamState.CANCELLED)
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.wait([self._sending])
        await self._close()

    async def _open(self) -> None:
        with self._capture:
            self._sending = asyncio.ensure_future(self._call.send())
        listener = asyncio.current_task()
        cancels = listener.cancelling() if listener is not None else 0
        try:
            await self._sending
        except asyncio.CancelledError:
            # If the stream was cancelled, it ends here. If the task that reads it was cancelled, the error is its own.
            if self.state is not StreamState.CANCELLED or (listener is not None and listener.cancelling() > cancels):
                raise
        except Exception as error:
            failure = translate_wire(error) or self._call.translate(error, self._capture.recording)
            if failure is None:
                raise
            raise failure from error

    async def _read(self, pieces: AsyncIterator[bytes]) -> AsyncGenerator[ProviderEvent, None]:
        self._move_to(StreamState.STREAMING)
        try:
            async for piece in pieces:
                events, failure = self._fold_whole(piece)
                for event in events:
                    if self.state is not StreamState.STREAMING:
                        return
                    yield event
                if failure is not None:
                    raise failure
                if self.state is not StreamState.STREAMING:
                    return
        except (WireCut, WireTimedOut) as error:
            if self.state is not StreamState.STREAMING:
                return
            raise translate_wire(error) or error from error
        if self.state is StreamState.STREAMING:
            self._fold.finish()
            self._move_to(StreamState.COMPLETE)

    def _fold_whole(self, piece: bytes) -> tuple[list[ProviderEvent], ProviderFailed | None]:
        """Fold a piece before any of its events is yielded, so that `answer` always matches the recorded bytes."""
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

    async def _close(self) -> None:
        if self._capture.answer is not None:
            await self._capture.answer.close()
        self._capture.recording.end()


async def encode_request(call: VendorCall) -> bytes:
    """Return the body that the call would send. The SDK encodes it as usual, and the transport does not send it.

    Raises `ValidationFailed` for a model name that cannot be part of a URL.
    """
    with ResponseCapture(call.placeholders, dry_run=True) as capture:
        try:
            await call.send()
        except httpx2.InvalidURL as error:
            raise ValidationFailed("The name of the model cannot be part of a URL.") from error
    return capture.recording.request_body


async def call_through(
    send: Callable[[], Awaitable[Result]],
    *,
    placeholders: dict[str, bytes],
    translate: Callable[[Exception, Recording], ProviderFailed | None],
) -> Result:
    """Make a call whose response is not streamed, and return what the SDK makes of it. Raises `ProviderFailed`."""
    with ResponseCapture(placeholders, streamed=False) as capture:
        try:
            return await send()
        except Exception as error:
            failure = translate_wire(error) or translate(error, capture.recording)
            if failure is None and capture.recording.status is not None and isinstance(error, _UNREADABLE):
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
