"""A TCP proxy in front of a server that cuts connections after a number of bytes of an answer."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

_PIECE_BYTES = 65536


class CuttingProxy:
    """`cuts` has the number of bytes of the next connections that reach the client. Later connections are not cut."""

    def __init__(self, upstream_url: str) -> None:
        self.url = ""
        self.cuts: deque[int] = deque()
        self.connections_made = 0
        self._upstream = urlsplit(upstream_url)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections_made += 1
        left = self.cuts.popleft() if self.cuts else None
        upstream_reader, upstream_writer = await asyncio.open_connection(self._upstream.hostname, self._upstream.port)
        pumps = {
            asyncio.create_task(_pump(reader, upstream_writer, None)),
            asyncio.create_task(_pump(upstream_reader, writer, left)),
        }
        try:
            # When one side closes the connection, the other is closed too.
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            upstream_writer.close()
            writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, left: int | None) -> None:
    """Copy until the end, or until this many bytes have passed."""
    with suppress(OSError):  # Either side may disconnect at any time.
        while left != 0 and (piece := await reader.read(_PIECE_BYTES)):
            passed = piece if left is None else piece[:left]
            left = None if left is None else left - len(passed)
            writer.write(passed)
            await writer.drain()


@asynccontextmanager
async def open_cutting_proxy(upstream_url: str) -> AsyncIterator[CuttingProxy]:
    """A proxy on a free port of this machine."""
    proxy = CuttingProxy(upstream_url)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        await server.wait_closed()
