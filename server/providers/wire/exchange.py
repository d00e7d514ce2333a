"""One HTTP exchange with a provider, its recording, and the errors of the network."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Protocol

from multidict import CIMultiDict
from yarl import URL


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHead:
    """A request without its body, in the form in which aiohttp takes it. Used for many requests, so never changed."""

    method: str
    url: URL
    headers: CIMultiDict[str]
    """Without the headers that belong to a connection or to the body: the transport adds those."""


@dataclass(slots=True, kw_only=True)
class Recording:
    """One request and its response. It is complete up to the moment it is read, also after an error or a cancel."""

    started_at: datetime
    request_body: bytes = b""
    status: int | None = None
    """None until a response begins."""
    headers: Mapping[str, str] = field(default_factory=dict)
    first_byte_at: datetime | None = None
    ended_at: datetime | None = None
    """None while more bytes may arrive."""
    pieces: list[bytes] = field(default_factory=list)
    resent: bool = False
    """Whether the request was sent again after a pooled connection was closed, see
    `server.providers.wire.transport`."""
    on_sent: Callable[[], None] | None = None
    """Called when the request is sent and recorded. It must neither raise nor wait."""

    @property
    def body(self) -> bytes:
        """The bytes so far. Reading it again copies nothing, unless more have arrived."""
        if len(self.pieces) > 1:
            self.pieces = [b"".join(self.pieces)]
        return self.pieces[0] if self.pieces else b""

    def begin(self, request_body: bytes) -> None:
        """Record that the request is sent now."""
        self.started_at = datetime.now(UTC)
        self.ended_at = None
        self.request_body = request_body
        if self.on_sent is not None:
            self.on_sent()

    def answer(self, status: int, headers: Mapping[str, str]) -> None:
        """Record the status and the headers of the response."""
        self.status = status
        self.headers = dict(headers)

    def append(self, piece: bytes) -> None:
        """Record some bytes of the body."""
        if self.first_byte_at is None:
            self.first_byte_at = datetime.now(UTC)
        self.pieces.append(piece)

    def end(self) -> None:
        """Record that the response has ended."""
        if self.ended_at is None:
            self.ended_at = datetime.now(UTC)


def begin_recording() -> Recording:
    """Return the recording of a request that is sent now."""
    return Recording(started_at=datetime.now(UTC))


class Exchange(Protocol):
    """A response whose body is still arriving."""

    async def read(self) -> bytes:
        """Return the next bytes of the body, which are recorded; no bytes after its end, which closes the exchange.

        Raises `WireCut` if the connection breaks or is closed meanwhile, and `WireTimedOut` if nothing arrives in time.
        """
        ...

    def close(self) -> None:
        """Close the connection at once, whether or not the body has ended. May be called more than once."""
        ...


class WireError(Exception):
    """An error of the network and not of the provider."""


class WireUnreachable(WireError):
    """No connection could be established."""


class WireCut(WireError):
    """The connection ended before the response was complete."""


class WireTimedOut(WireError):
    """The response did not arrive in time."""
