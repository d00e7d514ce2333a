"""What a streamed chunk costs, as a ratio to reading the same bytes and doing nothing with them.

    python -m tests.bench.stream_cost

A server in another process sends a recorded kind of stream, one chunk per write. It is read four ways: by bare aiohttp,
which is the floor; through Strata's provider, with its SDK making the request, the recording and the fold; and by each
vendor's SDK as it comes, on its own HTTP client, which parses every chunk into its models. Rounds are interleaved, so
that whatever else the machine does hits all of them. CPU is that of this process.
"""

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection

import aiohttp
import anthropic
import httpx2
from google import genai
from google.genai import types

from server.conversation.payload import Payload
from server.emulator.server import emulating
from server.providers.anthropic.provider import AnthropicProvider
from server.providers.gemini.provider import GeminiProvider
from server.providers.provider import Provider
from tests.bench.upstream import ANTHROPIC_MODEL, GEMINI_MODEL, anthropic_chunks, gemini_chunks
from tests.contracts.provider_harness import build_payload, consume
from tests.recordings.replay import Replay

CHUNKS = 2_000
ROUNDS = 15
WARM_UP = 3

Step = Callable[[], Awaitable[None]]


def serve(pieces: list[bytes], parent: Connection) -> None:
    """Until the process is ended."""

    async def run() -> None:
        async with emulating(Replay(pieces=pieces, forgetful=True)) as url:
            parent.send(url)
            await asyncio.Event().wait()

    asyncio.run(run())


async def read_bare(session: aiohttp.ClientSession, url: str) -> None:
    async with session.post(url, data=b"{}") as response:
        async for _ in response.content.iter_any():
            pass


async def read_strata(provider: Provider, payload: Payload) -> None:
    stream = provider.open_stream(payload)
    await consume(stream)
    assert stream.answer.native is not None


async def read_genai(client: genai.Client) -> None:
    async for _ in await client.aio.models.generate_content_stream(model=GEMINI_MODEL, contents="x"):
        pass


async def read_anthropic(client: anthropic.AsyncAnthropic) -> None:
    async for _ in await client.messages.create(
        model=ANTHROPIC_MODEL, max_tokens=9, messages=[{"role": "user", "content": "x"}], stream=True
    ):
        pass


async def compare(steps: dict[str, Step]) -> dict[str, tuple[float, float]]:
    """Medians by name: microseconds of CPU and of time per chunk."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for _ in range(WARM_UP + ROUNDS):
        for name, step in steps.items():
            cpu, wall = time.process_time(), time.perf_counter()
            await step()
            taken[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    scale = 1e6 / CHUNKS
    return {
        name: (
            statistics.median(cpu for cpu, _ in times[WARM_UP:]) * scale,
            statistics.median(wall for _, wall in times[WARM_UP:]) * scale,
        )
        for name, times in taken.items()
    }


def show(vendor: str, results: dict[str, tuple[float, float]]) -> None:
    floor_cpu, floor_wall = results["aiohttp"]
    for name, (cpu, wall) in results.items():
        row = f"{vendor:<10} {name:<14} {cpu:8.1f} {cpu / floor_cpu:7.2f} {wall:9.1f} {wall / floor_wall:7.2f}"
        print(row)  # noqa: T201  reason: its output is its purpose


async def measure(url_gemini: str, url_anthropic: str) -> None:
    print(f"{'':<10} {'':<14}   cpu µs   ratio   time µs   ratio   (per chunk)")  # noqa: T201  reason: as above
    async with aiohttp.ClientSession() as session, httpx2.AsyncClient() as http:
        gemini = GeminiProvider("key", base_url=url_gemini)
        options = types.HttpOptions(base_url=url_gemini, httpx_async_client=http)
        genai_client = genai.Client(api_key="key", http_options=options)
        payload = build_payload(GEMINI_MODEL, [b'{"role":"user","parts":[{"text":"x"}]}'])
        steps: dict[str, Step] = {
            "aiohttp": lambda: read_bare(session, url_gemini),
            "strata": lambda: read_strata(gemini, payload),
            "google-genai": lambda: read_genai(genai_client),
        }
        show("gemini", await compare(steps))
        await gemini.close()
        genai_client.close()

        claude = AnthropicProvider("key", base_url=url_anthropic)
        payload = build_payload(ANTHROPIC_MODEL, [b'{"role":"user","content":"x"}'])
        async with anthropic.AsyncAnthropic(api_key="key", base_url=url_anthropic) as client:
            steps = {
                "aiohttp": lambda: read_bare(session, url_anthropic),
                "strata": lambda: read_strata(claude, payload),
                "anthropic": lambda: read_anthropic(client),
            }
            show("anthropic", await compare(steps))
        await claude.close()


def main() -> None:
    context = multiprocessing.get_context("spawn")
    servers, urls = [], []
    for pieces in (gemini_chunks(CHUNKS), anthropic_chunks(CHUNKS)):
        receiving, sending = context.Pipe(duplex=False)
        server = context.Process(target=serve, args=(pieces, sending), daemon=True)
        server.start()
        servers.append(server)
        urls.append(receiving.recv())
    try:
        asyncio.run(measure(*urls))
    finally:
        for server in servers:
            server.terminate()


if __name__ == "__main__":
    main()
