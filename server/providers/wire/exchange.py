"""One answer on the wire, and what was recorded of it."""

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Protocol


@dataclass(slots=True, kw_only=True)
class Recording:
    """Everything that came back, complete up to the moment it is read: also after a cut, also after a cancel."""

    started_at: datetime
    request_body: bytes = b""
    status: int | None = None
    """None until an answer begins."""
    headers: Mapping[str, str] = field(default_factory=dict)
    first_byte_at: datetime | None = None
    ended_at: datetime | None = None
    """None while bytes may still come."""
    pieces: list[bytes] = field(default_factory=list)
    resent: bool = False
    """Whether it was sent again because a pooled connection was closed, see `server.providers.wire.transport`."""
    on_leave: Callable[[], None] | None = None
    """Called when the request goes out and is recorded. It must neither raise nor wait."""

    @property
    def body(self) -> bytes:
        """All bytes so far."""
        return b"".join(self.pieces)

    def leave(self, request_body: bytes) -> None:
        """Notes that the request goes out now."""
        self.started_at = datetime.now(UTC)
        self.ended_at = None
        self.request_body = request_body
        if self.on_leave is not None:
            self.on_leave()

    def answer(self, status: int, headers: Mapping[str, str]) -> None:
        """Notes the head of the answer."""
        self.status = status
        self.headers = dict(headers)

    def append(self, piece: bytes) -> None:
        """Notes some bytes of the body."""
        if self.first_byte_at is None:
            self.first_byte_at = datetime.now(UTC)
        self.pieces.append(piece)

    def end(self) -> None:
        """Notes that no byte will come any more."""
        if self.ended_at is None:
            self.ended_at = datetime.now(UTC)


def begin_recording() -> Recording:
    """A recording of a request that leaves now."""
    return Recording(started_at=datetime.now(UTC))


class Exchange(Protocol):
    """An answer whose body is still coming."""

    @property
    def recording(self) -> Recording:
        """What has come so far."""
        ...

    def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes; each piece is recorded before it is given out.

        Raises `WireCut` where the connection breaks, and `WireTimedOut` where it falls silent.
        """
        ...

    async def close(self) -> None:
        """Lets go of the connection at once, whether or not the body has ended."""
        ...


class WireError(Exception):
    """The network failed, not the provider."""


class WireUnreachable(WireError):
    """No connection could be made."""


class WireCut(WireError):
    """The connection ended in the middle."""


class WireTimedOut(WireError):
    """Nothing came for too long."""
