"""Turns over HTTP, streamed, as ratios to a bare relay that stores what it relays, in one run on one database.

    python -m tests.bench.http_turn [--rounds N] [--quick]
    python -m tests.bench.http_turn --strata PROVIDER [--clients N] [--turns N] [--fresh] [--profile [FILE]]

Without `--strata` both providers are measured beside the relay, with 1, 16 and 64 clients, with conversations that grow
and with a new one every 20 turns, whose creation counts as part of its turns. With `--strata` only Strata is measured,
on one provider and with one load; `--profile` then prints where the server's CPU time went, and writes the statistics
for `pstats` if it names a file.
"""

import argparse
import asyncio
import pstats
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import uvloop

from tests.bench.load import Load, Round, Target, run_round, run_rounds
from tests.bench.processes import Cores, Serving, in_process, open_database, open_place, pin
from tests.bench.relay import RelayTarget, serve_relay
from tests.bench.report import Figure, Goal, render_table
from tests.bench.strata_server import Watching, open_strata_target, serve_strata
from tests.bench.upstream import serve_upstream
from tests.support.emulators import BOTH

FRESH_TURNS = 20
LOADS = {1: 200, 16: 1_600, 64: 3_200}
"""How many turns a round has, by the number of clients. Growing conversations reach 200, 100 and 50 exchanges."""
QUICK_LOADS = {1: 10, 4: 40}
WARM_UP_TURNS = 64
CPU_CLIENTS = 16
_PROFILE_ROWS = 45


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the servers that are measured need."""

    cores: Cores
    database_url: str
    upstream_url: str


@asynccontextmanager
async def open_surroundings(cores: Cores, *, separate_writes: bool = False) -> AsyncIterator[Surroundings]:
    async with open_database() as database_url, in_process(serve_upstream, separate_writes) as upstream:
        yield Surroundings(cores=cores, database_url=database_url, upstream_url=upstream.url)


async def measure(around: Surroundings, *, rounds: int, quick: bool) -> list[Figure]:
    """Both providers beside the relay."""
    arguments = (around.database_url, around.upstream_url)
    figures: list[Figure] = []
    async with (
        in_process(serve_relay, *arguments, cores=around.cores.server) as relay,
        in_process(serve_strata, *arguments, cores=around.cores.server) as strata,
    ):
        targets = {provider: await _build_targets(relay, strata, provider) for provider in BOTH}
        for provider in BOTH:
            for target in targets[provider]:
                await run_round(target, Load(clients=4, turns=WARM_UP_TURNS, turns_per_conversation=FRESH_TURNS))
        for name, turns_per_conversation in (("growing", None), ("fresh", FRESH_TURNS)):
            for clients, turns in (QUICK_LOADS if quick else LOADS).items():
                load = Load(clients=clients, turns=turns, turns_per_conversation=turns_per_conversation)
                for provider in BOTH:
                    results = await run_rounds(targets[provider], load, rounds)
                    figures += _build_figures(f"{provider}, {name}, {show_clients(clients)}", clients, results)
    return figures


async def _build_targets(relay: Serving, strata: Serving, provider: str) -> list[Target]:
    return [RelayTarget(serving=relay, provider=provider), await open_strata_target(strata, provider)]


def show_clients(count: int) -> str:
    return "1 client" if count == 1 else f"{count} clients"


def _build_figures(name: str, clients: int, results: dict[str, list[Round]]) -> list[Figure]:
    floor, ours = results["relay"], results["strata"]
    rate_goal = Goal(of="ratio", limit=0.5, at_least=True) if clients > 1 else None
    figures = [
        Figure(
            name=f"HTTP turn, {name}: throughput",
            unit="turns/s",
            values=[one.turns_per_second for one in ours],
            floor=[one.turns_per_second for one in floor],
            goal=rate_goal,
        ),
        Figure(
            name=f"HTTP turn, {name}: CPU per turn",
            unit="ms",
            values=[one.cpu_ms for one in ours],
            floor=[one.cpu_ms for one in floor],
            goal=Goal(of="ratio", limit=2.0) if clients == CPU_CLIENTS else None,
        ),
    ]
    if clients == 1:
        figures.append(
            Figure(
                name=f"HTTP turn, {name}: first text",
                unit="ms",
                values=[statistics.median(one.first_event_ms) for one in ours],
                floor=[statistics.median(one.first_event_ms) for one in floor],
                goal=Goal(of="difference", limit=2.0),
            )
        )
    return figures


async def measure_strata(
    around: Surroundings, provider: str, load: Load, *, rounds: int, profile: Path | None
) -> list[Figure]:
    """Strata alone, on one provider."""
    arguments = (around.database_url, around.upstream_url, Watching(profile=profile))
    async with in_process(serve_strata, *arguments, cores=around.cores.server) as strata:
        target = await open_strata_target(strata, provider)
        if profile is None:
            await run_round(target, Load(clients=4, turns=WARM_UP_TURNS, turns_per_conversation=FRESH_TURNS))
        taken = [await run_round(target, load) for _ in range(rounds)]
    name = f"{provider}, {show_clients(load.clients)}"
    return [
        Figure(name=f"{name}: throughput", unit="turns/s", values=[one.turns_per_second for one in taken]),
        Figure(name=f"{name}: CPU per turn", unit="ms", values=[one.cpu_ms for one in taken]),
        Figure(name=f"{name}: first text", unit="ms", values=[statistics.median(one.first_event_ms) for one in taken]),
    ]


def print_profile(path: Path, turns: int) -> None:
    """The functions with the most time of their own, and those with the most time altogether."""
    statistics_ = pstats.Stats(str(path), stream=sys.stdout)
    print(f"Profile of {turns} turns. The profiler itself slows small Python functions most.")  # noqa: T201  reason: its output is its purpose
    statistics_.sort_stats("tottime").print_stats(_PROFILE_ROWS)
    statistics_.sort_stats("cumtime").print_stats(_PROFILE_ROWS)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure turns over HTTP beside a bare relay.")
    parser.add_argument("--strata", choices=BOTH, metavar="PROVIDER", help="measure Strata alone, on this provider")
    parser.add_argument("--clients", type=int, default=16, help="with --strata: how many clients (16)")
    parser.add_argument("--turns", type=int, default=1_600, help="with --strata: how many turns a round has (1600)")
    parser.add_argument("--fresh", action="store_true", help="with --strata: a new conversation every 20 turns")
    parser.add_argument("--rounds", type=int, help="how many rounds (3; 1 with --profile)")
    parser.add_argument("--quick", action="store_true", help="a small run that shows only that it works")
    parser.add_argument("--separate-writes", action="store_true", help="the upstream sends each chunk in its own write")
    parser.add_argument(
        "--profile",
        nargs="?",
        const="",
        type=lambda name: name and Path(name).absolute(),
        metavar="FILE",
        help="with --strata: profile the server, and keep the statistics in FILE",
    )
    options = parser.parse_args(arguments)
    if options.profile is not None and options.strata is None:
        parser.error("--profile needs --strata")
    return options


async def main(options: argparse.Namespace) -> None:
    cores = pin()
    profiled = options.profile is not None
    rounds = options.rounds or (1 if profiled or options.quick else 3)
    async with open_surroundings(cores, separate_writes=options.separate_writes) as around:
        if options.strata is None:
            print(render_table(await measure(around, rounds=rounds, quick=options.quick)))  # noqa: T201  reason: as above
            return
        fresh = FRESH_TURNS if options.fresh else None
        load = Load(clients=options.clients, turns=options.turns, turns_per_conversation=fresh)
        with open_place() as place:
            profile = (options.profile or place / "profile") if profiled else None
            figures = await measure_strata(around, options.strata, load, rounds=rounds, profile=profile)
            if profile is not None:
                print_profile(profile, options.turns * rounds)
            print(render_table(figures))  # noqa: T201  reason: as above


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(parse_arguments()))
