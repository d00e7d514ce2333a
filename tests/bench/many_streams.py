"""How long the words of a provider take to reach their clients while many streams are open at the same time.

    python -m tests.bench.many_streams [--streams 1000] [--per-second 50]

An upstream in another process answers every request with a word at once, waits until as many requests as there are
streams have come, and then says a word a second to each of them. Each word is the time at which it was sent, by the
clock that all processes of a machine share; the client subtracts. Nothing ends before all have heard their first word:
a limit of simultaneous calls below the number of streams would show as a run that does not end.
"""

import argparse
import asyncio
import json
import os
import statistics
import time
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import uvloop

from server.emulator.exchange import Exchange, Receive, Scope, Send, read_request
from server.emulator.server import emulating
from server.postgres.connections import DatabaseOptions
from server.postgres.embedded.service import open_embedded
from server.postgres.migrations import migrate_up
from tests.bench.processes import Serving, in_process
from tests.bench.strata_server import serve_strata
from tests.support.emulators import MODELS

WORDS = 5
"""For each stream, after its first."""
_PREFIX = "at "


class Metronome:
    """Answers as Gemini does, with the time as the words."""

    def __init__(self, streams: int) -> None:
        self._streams = streams
        self._waiting = 0
        self._all_there = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            while True:
                message = await receive()
                await send({"type": f"{message['type']}.complete"})
                if message["type"] == "lifespan.shutdown":
                    return
        exchange = Exchange(await read_request(scope, receive), scope, receive, send)
        await exchange.start(200, content_type="text/event-stream")
        await exchange.send(_word())
        self._waiting += 1
        number = self._waiting
        if number == self._streams:
            self._all_there.set()
        await self._all_there.wait()
        # The streams speak in turns, and not all at the same moment.
        await asyncio.sleep(number / self._streams)
        for _ in range(WORDS):
            await exchange.send(_word())
            await asyncio.sleep(1)
        await exchange.send(_word(finishReason="STOP"))
        await exchange.finish()


def _word(**more: str) -> bytes:
    part = {"text": f"{_PREFIX}{time.monotonic()} "}
    chunk = {
        "candidates": [{"content": {"parts": [part], "role": "model"}, "index": 0, **more}],
        "usageMetadata": {"promptTokenCount": 9, "candidatesTokenCount": 2, "totalTokenCount": 11},
        "responseId": "bench",
    }
    return b"data: " + json.dumps(chunk).encode() + b"\r\n\r\n"


async def serve_metronome(parent: Connection, streams: int) -> None:
    async with emulating(Metronome(streams)) as url:
        parent.send(Serving(pid=os.getpid(), url=url))
        await asyncio.to_thread(parent.poll, None)


async def listen(
    session: aiohttp.ClientSession, url: str, headers: dict[str, str], pause_seconds: float
) -> tuple[float, list[float]]:
    """How long the first word took from the request, and how late each word was."""
    await asyncio.sleep(pause_seconds)
    began = time.monotonic()
    first, late = 0.0, []
    async with session.post(url, json={"input": "Tell me the time."}, headers=headers) as answer:
        assert answer.status == 200, await answer.read()
        async for line in answer.content:
            if line.startswith(b"data: ") and _PREFIX.encode() in line:
                text = json.loads(line[6:]).get("text", "")
                if text.startswith(_PREFIX):
                    now = time.monotonic()
                    first = first or now - began
                    late.append(now - float(text.removeprefix(_PREFIX)))
    assert len(late) == WORDS + 2, late
    return first, late


async def measure(strata: Serving, streams: int, per_second: float) -> None:
    headers = {"authorization": f"Bearer {strata.key}", "accept": "text/event-stream"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300)) as session:

        async def make(path: str, body: dict[str, Any]) -> Any:
            async with session.post(strata.url + path, json=body, headers=headers) as answer:
                assert answer.status == 201, await answer.read()
                return await answer.json()

        definition = {"name": "clock", "provider": "gemini", "model": MODELS["gemini"]}
        assistant = await make("/v1/assistants", definition)
        urls = []
        for _ in range(streams):
            conversation = await make("/v1/conversations", {"assistant_id": assistant["id"]})
            urls.append(f"{strata.url}/v1/conversations/{conversation['id']}/turns")
        cpu = strata.cpu_seconds()
        received = await asyncio.gather(
            *(listen(session, url, headers, number / per_second) for number, url in enumerate(urls))
        )
        cpu = strata.cpu_seconds() - cpu
    firsts = [late[0] for _, late in received]
    later = [each for _, late in received for each in late[1:]]
    lines = [
        f"{streams} streams, {cpu:.1f} s of CPU in the server",
        f"  request to first word: {_spread([first for first, _ in received])}",
        f"  first word sent to first word heard: {_spread(firsts)}",
        f"  any later word: {_spread(later)}",
    ]
    print("\n".join(lines))  # noqa: T201  reason: its output is its purpose


def _spread(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    return (
        f"median {statistics.median(ordered) * 1000:.0f} ms, "
        f"99 % {ordered[int(len(ordered) * 0.99)] * 1000:.0f} ms, longest {ordered[-1] * 1000:.0f} ms"
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--per-second", type=float, default=50.0, help="how many streams begin in a second")
    options = parser.parse_args()
    streams = options.streams
    async with AsyncExitStack() as stack:
        place = stack.enter_context(TemporaryDirectory(prefix="strata-bench-"))
        # Open to the account that Postgres runs under for root.
        os.chmod(place, 0o755)  # noqa: PTH101, S103
        embedded = stack.enter_context(open_embedded(Path(place) / "data"))
        await migrate_up(DatabaseOptions(url=embedded.url))
        upstream = await stack.enter_async_context(in_process(serve_metronome, streams))
        strata = await stack.enter_async_context(in_process(serve_strata, embedded.url, upstream.url))
        await measure(strata, streams, options.per_second)


if __name__ == "__main__":
    uvloop.run(main())
