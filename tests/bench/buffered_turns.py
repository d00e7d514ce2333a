"""What a turn costs by the number of turns in the buffer, as ratios to 10 buffered turns.

    python -m tests.bench.buffered_turns [--lengths 10,100,1000] [--copies N] [--quick]

One conversation per provider grows by turns over HTTP, with compaction switched off, and is forked at each length.
Another server process then continues the forks. The first turn of each is cold: that process has never loaded the
conversation. The turns after it are warm. CPU time is that of the process, with its work in the background. The rounds
go through all lengths, one fork each.
"""

import argparse
import asyncio
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import uvloop

from tests.bench.http_turn import Surroundings, open_surroundings
from tests.bench.load import Client, Load, TakeTurn, run_round
from tests.bench.processes import Serving, in_process, pin
from tests.bench.report import Figure, Goal, render_table
from tests.bench.strata_server import NOTHING, StrataTarget, open_strata_target, serve_strata
from tests.support.emulators import BOTH

LENGTHS = (10, 100, 1_000)
QUICK_LENGTHS = (4, 10)
COPIES = 6
WARM_TURNS = 3
COMPACTION_OFF = {"compaction": {"policy": "off"}}
_SETTLE_SECONDS = 0.2
_GOALS = {"warm": Goal(of="ratio", limit=1.3), "cold": Goal(of="ratio", limit=3.0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """CPU milliseconds of one turn."""

    cold: float
    warm: float


async def measure(around: Surroundings, *, lengths: Sequence[int], copies: int) -> list[Figure]:
    """Both providers, at each length."""
    arguments = (around.database_url, around.upstream_url)
    async with in_process(serve_strata, *arguments, cores=around.cores.server) as growing:
        targets = [await open_strata_target(growing, provider, COMPACTION_OFF) for provider in BOTH]
        forks = {target.provider: await _grow(target, lengths, copies) for target in targets}
    figures: list[Figure] = []
    async with in_process(serve_strata, *arguments, NOTHING, growing.key, cores=around.cores.server) as strata:
        for provider in BOTH:
            target = await open_strata_target(strata, provider, COMPACTION_OFF)
            await run_round(target, Load(clients=4, turns=40, turns_per_conversation=10))
            costs: dict[int, list[Cost]] = {length: [] for length in lengths}
            for copy in range(copies):
                for length in lengths:
                    take_turn = target.continue_conversation(forks[provider][length][copy])
                    costs[length].append(await _measure_fork(strata, take_turn))
            figures += _build_figures(provider, costs)
    return figures


async def _grow(target: StrataTarget, lengths: Sequence[int], copies: int) -> dict[int, list[str]]:
    """The ids of forks by their number of turns. A turn of the user and its answer count as two."""
    forks: dict[int, list[str]] = {}
    async with Client(target.serving.url) as client:
        made = await client.post_json("/v1/conversations", {"assistant_id": target.assistant_id}, target.headers)
        take_turn = target.continue_conversation(made["id"])
        length = 0
        for wanted in sorted(lengths):
            while length < wanted:
                await take_turn(client, f"Task {length}: tell me a story.")
                length += 2
            path = f"/v1/conversations/{made['id']}/fork"
            answers = [await client.post_json(path, {"at_seq": length}, target.headers) for _ in range(copies)]
            forks[wanted] = [answer["id"] for answer in answers]
    return forks


async def _measure_fork(strata: Serving, take_turn: TakeTurn) -> Cost:
    async with Client(strata.url) as client:

        async def measure_turns(count: int) -> float:
            before = strata.cpu_seconds()
            for number in range(count):
                await take_turn(client, f"Task {number}: tell me another story.")
            # Work in the background that follows a turn belongs to its cost.
            await asyncio.sleep(_SETTLE_SECONDS)
            return (strata.cpu_seconds() - before) * 1000 / count

        return Cost(cold=await measure_turns(1), warm=await measure_turns(WARM_TURNS))


def _build_figures(provider: str, costs: Mapping[int, Sequence[Cost]]) -> list[Figure]:
    figures = []
    shortest, longest = min(costs), max(costs)
    for state, goal in _GOALS.items():
        floor = [getattr(cost, state) for cost in costs[shortest]]
        for length, taken in costs.items():
            figures.append(
                Figure(
                    name=f"CPU per turn, {provider}, {state}: {length:,} buffered turns",
                    unit="ms",
                    values=[getattr(cost, state) for cost in taken],
                    # Against the median: one turn is short, and a single floor varies more than what is compared.
                    floor=[statistics.median(floor)] * len(taken) if length != shortest else (),
                    goal=goal if length == longest else None,
                )
            )
    return figures


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the CPU time of a turn by the number of buffered turns.")
    parser.add_argument("--lengths", type=lambda text: tuple(int(one) for one in text.split(",")))
    parser.add_argument("--copies", type=int, default=COPIES, help="how many forks of each length (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a small run that shows only that it works")
    return parser.parse_args()


async def main(options: argparse.Namespace) -> None:
    async with open_surroundings(pin()) as around:
        lengths = options.lengths or (QUICK_LENGTHS if options.quick else LENGTHS)
        figures = await measure(around, lengths=lengths, copies=2 if options.quick else options.copies)
    print(render_table(figures))  # noqa: T201  reason: its output is its purpose


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(parse_arguments()))
