"""A transport that feeds stored responses to the same SDKs and folds, without a connection."""

from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import httpx2

from server.providers.wire.exchange import Recording, WireUnreachable
from server.providers.wire.transport import answer_sdk, empty_stream, take_request


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAnswer:
    """A response as a call stored it."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    pieces: Sequence[bytes] = ()
    """The body, in the pieces in which it arrives."""


class ReplayedAnswer:
    """Implements `server.providers.wire.exchange.Exchange` on stored bytes."""

    def __init__(self, stored: StoredAnswer, recording: Recording) -> None:
        self._stored = stored
        self._closed = False
        self.recording = recording

    async def pieces(self) -> AsyncIterator[bytes]:
        for piece in self._stored.pieces:
            if self._closed:
                return
            self.recording.append(piece)
            yield piece
        await self.close()

    async def close(self) -> None:
        self._closed = True
        self.recording.end()


class ReplayingTransport(httpx2.AsyncBaseTransport):
    """Answers each request with the next stored response. Raises `WireUnreachable` when none is left."""

    def __init__(self, answers: Iterable[StoredAnswer]) -> None:
        self._answers = deque(answers)
        self.requests: list[bytes] = []
        """The bodies of the requests."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        capture, recording = await take_request(request)
        if capture is not None and capture.dry_run:
            return empty_stream()
        self.requests.append(recording.request_body)
        if not self._answers:
            recording.end()
            raise WireUnreachable("There is no stored response left.")
        stored = self._answers.popleft()
        recording.answer(stored.status, stored.headers)
        return await answer_sdk(capture, ReplayedAnswer(stored, recording), stored.status)
