"""A transport that feeds stored responses to the same SDKs and folds, without a connection."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from server.providers.wire.exchange import Exchange, Recording, RequestHead, WireUnreachable
from server.providers.wire.transport import ResponseWait, SdkTransport


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAnswer:
    """A response as a call stored it."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    pieces: Sequence[bytes] = ()
    """The body, in the pieces in which it arrives."""


class ReplayedExchange:
    """Implements `server.providers.wire.exchange.Exchange` on stored bytes."""

    def __init__(self, stored: StoredAnswer, recording: Recording) -> None:
        self._pieces = deque(stored.pieces)
        self._recording = recording

    async def read(self) -> bytes:
        if not self._pieces:
            self.close()
            return b""
        self._recording.append(self._pieces[0])
        return self._pieces.popleft()

    def close(self) -> None:
        self._pieces.clear()
        self._recording.end()


class ReplayingTransport(SdkTransport):
    """Answers each request with the next stored response. Raises `WireUnreachable` when none is left."""

    def __init__(self, answers: Iterable[StoredAnswer]) -> None:
        self._answers = deque(answers)
        self.requests: list[bytes] = []
        """The bodies of the requests."""

    async def open(
        self,
        head: RequestHead,  # noqa: ARG002  reason: the signature of every transport
        body: bytes,
        recording: Recording,
        wait: ResponseWait,  # noqa: ARG002  reason: as above
        *,
        streamed: bool,  # noqa: ARG002  reason: as above
    ) -> Exchange:
        recording.begin(body)
        self.requests.append(body)
        if not self._answers:
            recording.end()
            raise WireUnreachable("There is no stored response left.")
        stored = self._answers.popleft()
        recording.answer(stored.status, stored.headers)
        return ReplayedExchange(stored, recording)
