"""Many slow streams at once: how late their words arrive, what each costs in memory, and how late the event loop is.

    python -m tests.bench.many_streams [--streams 2000] [--per-second 50] [--quick]

An upstream in another process answers every request with a word at once, waits until as many requests as there are
streams have come, and then says a word a second to each of them. Each word is the time at which it was sent, by the
clock that all processes of a machine share; the client subtracts. Every client has to get every word: a missing one
ends the run with an error, and so does a limit of simultaneous calls below the number of streams. Memory is what the
server process has grown by from the last conversation created to the last stream opened.
"""

import argparse
import asyncio
import json
import os
import time
from multiprocessing.connection import Connection

import aiohttp
import uvloop

from server.emulator.exchange import Exchange, Receive, Scope, Send, read_request
from server.emulator.server import emulating
from tests.bench.processes import (
    Cores,
    Serving,
    in_process,
    open_database,
    open_place,
    pin,
    raise_file_limit,
    wait_for_end,
)
from tests.bench.report import Figure, Goal, render_table
from tests.bench.strata_server import StrataTarget, Watching, open_strata_target, serve_strata

STREAMS = 2_000
QUICK_STREAMS = 20
PER_SECOND = 50.0
WORDS = 5
"""For each stream, after its first."""
_PREFIX = "at "
_LIMIT_SECONDS = 300


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
        await asyncio.sleep(1 + number / self._streams)
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
        await wait_for_end(parent)


class Listeners:
    """The clients of all streams."""

    def __init__(self, target: StrataTarget, streams: int, per_second: float) -> None:
        self._target = target
        self._streams = streams
        self._per_second = per_second
        self._open_count = 0
        self._memory_before = 0
        self.memory_bytes = 0
        """What the server has grown by when every stream has had its first word."""
        self.first_seconds: list[float] = []
        """From the request to its first word."""
        self.late_seconds: list[float] = []
        """From the sending of a word to its arrival."""

    async def listen_all(self) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=_LIMIT_SECONDS)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            paths = [await self._open_conversation(session) for _ in range(self._streams)]
            self._memory_before = self._target.serving.memory_bytes()
            await asyncio.gather(*(self._listen(session, path, number) for number, path in enumerate(paths)))

    async def _open_conversation(self, session: aiohttp.ClientSession) -> str:
        target = self._target
        url, body = f"{target.serving.url}/v1/conversations", {"assistant_id": target.assistant_id}
        async with session.post(url, json=body, headers=target.headers) as answer:
            assert answer.status == 201, await answer.read()
            return f"{url}/{(await answer.json())['id']}/turns"

    async def _listen(self, session: aiohttp.ClientSession, url: str, number: int) -> None:
        await asyncio.sleep(number / self._per_second)
        began, late = time.monotonic(), []
        headers = {**self._target.headers, "accept": "text/event-stream"}
        async with session.post(url, json={"input": "Tell me the time."}, headers=headers) as answer:
            assert answer.status == 200, await answer.read()
            async for line in answer.content:
                sent_at = _read_time(line)
                if sent_at is None:
                    continue
                now = time.monotonic()
                late.append(now - sent_at)
                if len(late) == 1:
                    self.first_seconds.append(now - began)
                    self._count_open()
        assert len(late) == WORDS + 2, late
        self.late_seconds += late[1:]

    def _count_open(self) -> None:
        self._open_count += 1
        if self._open_count == self._streams:
            self.memory_bytes = self._target.serving.memory_bytes() - self._memory_before


def _read_time(line: bytes) -> float | None:
    if not line.startswith(b"data: ") or _PREFIX.encode() not in line:
        return None
    text = json.loads(line[6:]).get("text", "")
    return float(text.removeprefix(_PREFIX)) if text.startswith(_PREFIX) else None


async def measure(cores: Cores, *, streams: int, per_second: float) -> list[Figure]:
    raise_file_limit()
    with open_place() as place:
        watching = Watching(loop_lags=place / "lags")
        async with open_database() as database_url, in_process(serve_metronome, streams) as metronome:
            arguments = (database_url, metronome.url, watching)
            async with in_process(serve_strata, *arguments, cores=cores.server) as strata:
                target = await open_strata_target(strata, "gemini")
                listeners = Listeners(target, streams, per_second)
                cpu = strata.cpu_seconds()
                await listeners.listen_all()
                cpu = strata.cpu_seconds() - cpu
        lags = [float(line) for line in (place / "lags").read_text(encoding="utf-8").splitlines()]
    name = f"{streams:,} slow streams"
    per_stream = listeners.memory_bytes / streams / 1000
    figures = [
        Figure(name=f"{name}: memory per stream", unit="kB", values=[per_stream], goal=Goal(of="value", limit=60)),
        Figure(name=f"{name}: CPU per stream", unit="ms", values=[cpu * 1000 / streams]),
        Figure(name=f"{name}: lost words", unit="count", values=[0], goal=Goal(of="value", limit=0)),
    ]
    spreads: dict[str, tuple[list[float], Goal | None]] = {
        "loop lag": (lags, Goal(of="value", limit=50)),
        "request to first word": (listeners.first_seconds, None),
        "a later word, from sent to received": (listeners.late_seconds, None),
    }
    for what, (seconds, goal) in spreads.items():
        ordered = sorted(one * 1000 for one in seconds)
        figures += [
            Figure(name=f"{name}: {what}, median", unit="ms", values=[ordered[len(ordered) // 2]]),
            Figure(name=f"{name}: {what}, p99", unit="ms", values=[ordered[int(len(ordered) * 0.99)]], goal=goal),
        ]
    return figures


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure many slow streams at once.")
    parser.add_argument("--streams", type=int, default=STREAMS, help="how many (%(default)s)")
    parser.add_argument("--per-second", type=float, default=PER_SECOND, help="how many begin in a second (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a small run that shows only that it works")
    return parser.parse_args()


async def main(options: argparse.Namespace) -> None:
    streams = QUICK_STREAMS if options.quick else options.streams
    print(render_table(await measure(pin(), streams=streams, per_second=options.per_second)))  # noqa: T201  reason: its output is its purpose


if __name__ == "__main__":
    uvloop.run(main(parse_arguments()))
