"""Two thousand turns on each provider: what its cache gives, and whether late turns cost what early ones do.

    python -m tests.bench.long_conversation [--turns N] [--provider NAME] [--profile FILE]

The whole program, with the worker inside, talks through the SDKs to emulators in processes of their own, which refuse
what the providers would refuse. Its database is a real one, seen through a proxy that counts. Every turn has to be
accepted. Printed are ratios: what the provider has read from its cache, beside what the simulation says of the same
exchanges; and the medians of the last hundred turns over those from the hundredth to the two hundredth: of bytes that
came from the database, of CPU of this process (which has the server in it, the proxy and whoever talks), of time, and
of time without the provider's, which is from the request's leaving to the answer's last byte. "same buffer" compares
only turns that had as many turns in the buffer. With `--profile`, what the CPU went into is written there for `pstats`.
"""

import argparse
import asyncio
import cProfile
import os
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import uvloop

from server.app.providers import open_providers
from server.app.settings import Settings
from server.emulator.anthropic.app import build_anthropic_app
from server.emulator.gemini.app import build_gemini_app
from server.emulator.server import emulating
from server.emulator.state import build_state
from server.postgres.connections import DatabaseOptions
from server.postgres.embedded.service import open_embedded
from server.postgres.engine import Database
from server.postgres.migrations import migrate_up
from server.providers.choice import ANTHROPIC, GEMINI, KEY_VARIABLES, ProviderChoice
from tests.bench.processes import Serving, in_process
from tests.support.long_conversation_driver import (
    LongConversationDriver,
    Sample,
    compare_at_same_buffer,
    cost_of,
    open_long_conversation,
    predict,
    share_of,
)

TURNS = 2_000
WARM_UP = 100
WINDOW = 100
BUILDS = {GEMINI: build_gemini_app, ANTHROPIC: build_anthropic_app}
MEASURES: dict[str, Callable[[Sample], float]] = {
    "bytes": lambda sample: sample.bytes_read,
    "cpu": lambda sample: sample.cpu_seconds,
    "time": lambda sample: sample.seconds,
}


async def serve_emulator(parent: Connection, provider: str) -> None:
    state = build_state()
    async with emulating(BUILDS[provider](state)) as url:
        parent.send(Serving(pid=os.getpid(), url=url))
        while not parent.poll():
            # Nobody looks at them, and late requests are large.
            state.request_log.clear()
            await asyncio.sleep(0.5)


async def measure(driver: LongConversationDriver, turns: int, typical: int) -> None:
    await driver.go_on(turns)
    account = await driver.account()
    samples = driver.samples
    predicted = predict(driver, account, typical_exchange_count=typical, warm_up=WARM_UP)
    settled = [sample for sample in samples if sample.seq > WARM_UP]
    cost = cost_of(settled, driver.provider)
    show(driver.provider, "calls", f"{len(samples)}, of which refused {account.refused}")
    show(driver.provider, "compactions", f"{account.compactions}, the simulation {predicted.compactions}")
    show(driver.provider, "cache share", f"{share_of(settled):.4f}, the simulation {predicted.share:.4f}")
    show(driver.provider, "cost of input", f"{cost / predicted.cost_usd:.3f} of the simulation's")
    early = [sample for sample in samples if WARM_UP < sample.seq <= WARM_UP + WINDOW]
    late = [sample for sample in samples if turns - WINDOW < sample.seq <= turns]
    show(driver.provider, "input tokens", f"{_middle(early, _tokens):.0f} early, {_middle(late, _tokens):.0f} late")
    provider_seconds = dict(zip(account.seqs, account.provider_seconds, strict=True))
    measures = {**MEASURES, "own time": lambda sample: sample.seconds - provider_seconds[sample.seq]}
    for name, weigh in measures.items():
        whole = _middle(late, weigh) / _middle(early, weigh)
        same = compare_at_same_buffer(early, late, account, weigh)
        show(driver.provider, f"{name}, late to early", f"{whole:.2f}, same buffer {same:.2f}")
    show(driver.provider, "cpu", f"{_middle(early, MEASURES['cpu']) * 1000:.1f} ms early")


def _tokens(sample: Sample) -> float:
    return sample.usage.input_tokens


def _middle(samples: Sequence[Sample], weigh: Callable[[Sample], float]) -> float:
    return median(weigh(sample) for sample in samples)


def show(provider: str, name: str, figure: str) -> None:
    print(f"{provider:<10} {name:<22} {figure}", flush=True)  # noqa: T201  reason: its output is its purpose


async def run(turns: int, names: Sequence[str], profile: str | None) -> None:
    async with AsyncExitStack() as stack:
        place = stack.enter_context(TemporaryDirectory(prefix="strata-bench-"))
        # Open to the account that Postgres runs under for root.
        os.chmod(place, 0o755)  # noqa: PTH101, S103
        embedded = stack.enter_context(open_embedded(Path(place) / "data"))
        options = DatabaseOptions(url=embedded.url)
        await migrate_up(options)
        direct = Database(options)
        stack.push_async_callback(direct.close)
        upstreams = {name: (await stack.enter_async_context(in_process(serve_emulator, name))).url for name in BUILDS}
        settings = Settings(
            data_dir=Path(place),
            gemini_base_url=upstreams[GEMINI],
            anthropic_base_url=upstreams[ANTHROPIC],
            log_level="error",
        )
        environment = {keys[0]: "key" for keys in KEY_VARIABLES.values()}
        choice = ProviderChoice(provider=GEMINI, api_key="key")
        providers = await stack.enter_async_context(open_providers(settings, choice, environment))
        profiler = cProfile.Profile()
        typical = turns // 2
        for name in names:
            async with open_long_conversation(
                settings, providers, direct, name, typical_exchange_count=typical
            ) as driver:
                if profile is not None:
                    profiler.enable()
                await measure(driver, turns, typical)
                profiler.disable()
        if profile is not None:
            profiler.dump_stats(profile)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--provider", choices=list(BUILDS))
    parser.add_argument("--profile")
    chosen = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(chosen.turns, [chosen.provider] if chosen.provider else list(BUILDS), chosen.profile))
