"""A TCP server with hand-written HTTP, for answers that no HTTP library would send."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """One chunk of the chunked transfer coding."""
    return b"%x\r\n%s\r\n" % (len(data), data)


@dataclass(slots=True, kw_only=True, eq=False)
class RawConnection:
    """One connection of a client."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    number: int
    """From 1, in the order of the connections."""
    request_count: int = 0
    """How many requests were read from it."""

    async def read_request(self) -> bytes | None:
        """The body of the next request; None if the client closes the connection instead."""
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = 0
            for line in head.split(b"\r\n"):
                name, _, value = line.partition(b":")
                if name.lower() == b"content-length":
                    length = int(value)
            body = await self.reader.readexactly(length)
        except (asyncio.IncompleteReadError, OSError):
            return None
        self.request_count += 1
        return body

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def send_whole(self, body: bytes, content_type: str = "text/event-stream") -> None:
        """A complete answer, after which the connection can be reused."""
        await self.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s"
            % (content_type.encode(), len(body), body)
        )

    async def closed_by_client(self) -> None:
        """Wait until the client has closed its side."""
        with suppress(OSError):
            while await self.reader.read(65536):
                pass


@dataclass(slots=True, kw_only=True)
class RawServer:
    """The accepted connections, in order."""

    url: str
    connections: list[RawConnection] = field(default_factory=list)

    @property
    def request_count(self) -> int:
        return sum(connection.request_count for connection in self.connections)


@asynccontextmanager
async def open_raw_server(serve_connection: Callable[[RawConnection], Awaitable[None]]) -> AsyncIterator[RawServer]:
    """A server on a free port; `serve_connection` serves each connection, which is closed when it returns."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        connection = RawConnection(reader=reader, writer=writer, number=len(server.connections) + 1)
        server.connections.append(connection)
        try:
            with suppress(OSError):
                await serve_connection(connection)
        except asyncio.CancelledError:
            pass  # The test has ended; the server of asyncio would log the cancellation of its handler.
        finally:
            writer.close()
            tasks.discard(task)

    listener = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=2048)
    server = RawServer(url=f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
    try:
        yield server
    finally:
        listener.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
