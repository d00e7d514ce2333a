"""TCP proxies that break connections on request.

The one for Postgres also counts round trips. It parses the messages that it passes on, so its clients do not use TLS.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from enum import Enum
from typing import Final
from urllib.parse import parse_qs, quote, urlsplit

from tests.support.external_postgres import free_port

_PIECE_BYTES: Final = 65536
_STARTUP_CODES: Final = {196608, 196610}
"""The versions of the protocol that a startup message can name: 3.0 and 3.2."""
_WAITS_FOR_ANSWER: Final = {b"S", b"Q", b"H"}
"""Sync, Query and Flush: what a client sends before it waits."""
_EXECUTE: Final = b"E"
_READY: Final = b"Z"
_FATAL_FIELDS: Final = (
    b"SFATAL\0VFATAL\0C57P01\0Mterminating connection due to administrator command\0Fpostgres.c\0L3250\0Rstop\0\0"
)
_FATAL: Final = b"E" + (len(_FATAL_FIELDS) + 4).to_bytes(4, "big") + _FATAL_FIELDS


class Loss(Enum):
    """Which half of a round trip is lost."""

    REQUEST = "request"
    """The server never receives the statement."""
    ANSWER = "answer"
    """The server has executed the statement, and its answer is lost."""


class TcpProxy:
    """Listens on `port` and passes everything on to an upstream, unless it has to cut, refuse or swallow."""

    def __init__(self, upstream_url: str) -> None:
        self.port = free_port()
        self.connections_made = 0
        self.max_connections = 0
        """Simultaneous connections."""
        self.upstream_url = upstream_url
        self._server: asyncio.Server | None = None
        self._flows = asyncio.Event()
        self._flows.set()
        self._links: set[Link] = set()

    def link(self, client: asyncio.StreamWriter) -> "Link":
        """A new pair of connections."""
        return Link(client)

    async def accept(self) -> None:
        """Accept new connections, as at the beginning."""
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def refuse(self) -> None:
        """Refuse new connections; existing ones stay."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def swallow(self) -> None:
        """Accept and keep connections, but pass nothing on in either direction."""
        self._flows.clear()

    def flow(self) -> None:
        """Pass on what was held back, and everything after it."""
        self._flows.set()

    def cut(self) -> None:
        """Close all connections."""
        for link in list(self._links):
            link.cut()

    async def close(self) -> None:
        await self.refuse()
        self.flow()
        while self._links:
            self.cut()
            await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = self.link(writer)
        self._links.add(link)
        self.connections_made += 1
        self.max_connections = max(self.max_connections, len(self._links))
        try:
            await self._flows.wait()
            upstream_reader, upstream_writer = await _connect(self.upstream_url)
            link.upstream = upstream_writer
            await asyncio.gather(
                self._pump(reader, upstream_writer, link.pass_request, link),
                self._pump(upstream_reader, writer, link.pass_answer, link),
            )
        except OSError:
            pass  # Either side may disconnect at any time.
        finally:
            link.cut()
            self._links.discard(link)

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        passes: Callable[[bytes], bool],
        link: "Link",
    ) -> None:
        while piece := await reader.read(_PIECE_BYTES):
            await self._flows.wait()
            if passes(piece) and not link.ended:
                writer.write(piece)
                await writer.drain()
        link.cut()


class Link:
    """The connection of a client and the corresponding one to the server."""

    def __init__(self, client: asyncio.StreamWriter) -> None:
        self.client = client
        self.upstream: asyncio.StreamWriter | None = None
        self.ended = False

    def pass_request(self, piece: bytes) -> bool:
        """Whether it is to be passed on."""
        return True

    def pass_answer(self, piece: bytes) -> bool:
        """Whether it is to be passed on."""
        return True

    def cut(self) -> None:
        self.ended = True
        for writer in (self.client, self.upstream):
            if writer is not None:
                writer.transport.abort()


class WireProxy(TcpProxy):
    """A proxy in front of Postgres that counts round trips and can lose one half of one."""

    def __init__(self, upstream_url: str) -> None:
        super().__init__(upstream_url)
        self.round_trips = 0
        self.bytes_received = 0
        """Round trips of clients."""
        self.losses = 0
        self.loss: Loss | None = None
        """What happens to the next statement on any connection: it loses this half, and its connection."""

    def url(self, **query: str) -> str:
        """The URL of the upstream through this proxy."""
        parts = urlsplit(self.upstream_url)
        account, at, _ = parts.netloc.rpartition("@")
        options = "&".join(f"{name}={quote(value)}" for name, value in {"sslmode": "disable", **query}.items())
        return f"postgresql://{account}{at}127.0.0.1:{self.port}{parts.path}?{options}"

    def link(self, client: asyncio.StreamWriter) -> Link:
        return _PostgresLink(self, client)

    def announce_end(self) -> None:
        """Send what a stopping server sends to idle clients. The connections stay open: their end is still to come."""
        for link in self._links:
            link.client.write(_FATAL)

    async def lose_database(self) -> None:
        """Behave as if the server had been stopped."""
        await self.refuse()
        self.cut()


class _PostgresLink(Link):
    """Parses the messages that pass."""

    def __init__(self, proxy: WireProxy, client: asyncio.StreamWriter) -> None:
        super().__init__(client)
        self._proxy = proxy
        self._requests = _Messages(typed=False)
        self._answers = _Messages(typed=True)
        self._loses_answer = False

    def pass_request(self, piece: bytes) -> bool:
        kinds = list(self._requests.read(piece))
        self._proxy.round_trips += sum(kind in _WAITS_FOR_ANSWER for kind in kinds)
        if self._proxy.loss is None or _EXECUTE not in kinds:
            return True
        loss, self._proxy.loss = self._proxy.loss, None
        if loss is Loss.REQUEST:
            self._lose()
            return False
        self._loses_answer = True
        return True

    def pass_answer(self, piece: bytes) -> bool:
        kinds = list(self._answers.read(piece))
        if not self._loses_answer:
            self._proxy.bytes_received += len(piece)
            return True
        if _READY in kinds:
            self._lose()
        return False

    def _lose(self) -> None:
        self._proxy.losses += 1
        self.cut()


class _Messages:
    """The kinds of the messages in one direction of a connection, for any split into pieces."""

    def __init__(self, *, typed: bool) -> None:
        """The first messages of a client have no kind: a length and a code."""
        self._typed = typed
        self._held = b""
        self._rest = 0
        """Bytes of the current message that are still to come."""

    def read(self, piece: bytes) -> Iterator[bytes]:
        """The kind of each message that ends or begins in this piece, once."""
        self._held += piece
        while True:
            passed = min(self._rest, len(self._held))
            self._held, self._rest = self._held[passed:], self._rest - passed
            header = 5 if self._typed else 8
            if self._rest or len(self._held) < header:
                return
            kind = self._held[:1] if self._typed else b""
            length = int.from_bytes(self._held[header - 4 : header] if self._typed else self._held[:4], "big")
            if not self._typed:
                self._typed = int.from_bytes(self._held[4:8], "big") in _STARTUP_CODES
            self._rest = length + len(kind)
            if kind:
                yield kind


async def _connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(url)
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    directory = query.get("host", "")
    if directory.startswith("/"):
        return await asyncio.open_unix_connection(f"{directory}/.s.PGSQL.{query.get('port', 5432)}")
    return await asyncio.open_connection(parts.hostname, parts.port)


@asynccontextmanager
async def open_proxy(upstream_url: str) -> AsyncIterator[WireProxy]:
    """A proxy that accepts connections."""
    proxy = WireProxy(upstream_url)
    await proxy.accept()
    try:
        yield proxy
    finally:
        await proxy.close()
