"""All benchmarks of Strata in one run, as ratios to floors measured beside them: what `make bench` starts.

    python -m tests.bench [--only SECTION,...] [--rounds N] [--quick] [--output FILE] [--compare EARLIER.json]

The sections are independent and have a database each. `docs/operations/benchmarks.md` explains the figures.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import uvloop

from tests.bench import buffered_turns, http_turn, many_streams, store_step, turn_writes
from tests.bench.processes import Cores, open_database, pin
from tests.bench.report import Figure, describe_machine, render_comparison, render_table, write_report

ROUNDS = 3


async def measure_http(cores: Cores, options: argparse.Namespace) -> list[Figure]:
    async with http_turn.open_surroundings(cores, separate_writes=options.separate_writes) as around:
        return await http_turn.measure(around, rounds=options.rounds, quick=options.quick)


async def measure_buffer(cores: Cores, options: argparse.Namespace) -> list[Figure]:
    lengths = buffered_turns.QUICK_LENGTHS if options.quick else buffered_turns.LENGTHS
    copies = 1 if options.quick else buffered_turns.COPIES
    async with http_turn.open_surroundings(cores) as around:
        return await buffered_turns.measure(around, lengths=lengths, copies=copies)


async def measure_store(_cores: Cores, options: argparse.Namespace) -> list[Figure]:
    async with open_database() as database_url:
        return await store_step.measure(database_url, quick=options.quick)


async def measure_writes(cores: Cores, options: argparse.Namespace) -> list[Figure]:
    async with http_turn.open_surroundings(cores) as around:
        turns = turn_writes.QUICK_TURNS if options.quick else turn_writes.TURNS
        figures, listing = await turn_writes.measure(around, turns=turns)
    if not options.quick:
        show(listing)
    return figures


async def measure_streams(cores: Cores, options: argparse.Namespace) -> list[Figure]:
    streams = many_streams.QUICK_STREAMS if options.quick else many_streams.STREAMS
    return await many_streams.measure(cores, streams=streams, per_second=many_streams.PER_SECOND)


Measure = Callable[[Cores, argparse.Namespace], Awaitable[list[Figure]]]
SECTIONS: dict[str, Measure] = {
    "http": measure_http,
    "buffer": measure_buffer,
    "store": measure_store,
    "writes": measure_writes,
    "streams": measure_streams,
}


def show(text: str) -> None:
    print(text, end="\n\n", flush=True)  # noqa: T201  reason: its output is its purpose


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Measure Strata beside its floors.")
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=list(SECTIONS),
        metavar="SECTION,...",
        help=f"sections to run: {', '.join(SECTIONS)} (all)",
    )
    parser.add_argument("--rounds", type=int, default=None, help=f"interleaved rounds of the HTTP section ({ROUNDS})")
    parser.add_argument("--quick", action="store_true", help="a small run that shows only that it works")
    parser.add_argument(
        "--separate-writes", action="store_true", help="http: the upstream sends each chunk in a write of its own"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--compare", type=Path, metavar="EARLIER.json", help="show the difference to an earlier run")
    options = parser.parse_args(arguments)
    unknown = set(options.only) - set(SECTIONS)
    if unknown:
        parser.error(f"There is no section {', '.join(sorted(unknown))}. The sections are {', '.join(SECTIONS)}.")
    options.rounds = options.rounds or (1 if options.quick else ROUNDS)
    return options


async def run(options: argparse.Namespace) -> tuple[dict[str, Any], list[Figure]]:
    cores = pin()
    machine = describe_machine(cores)
    show("\n".join(f"{name}: {value}" for name, value in machine.items()))
    figures: list[Figure] = []
    for name in options.only:
        measured = await SECTIONS[name](cores, options)
        show(render_table(measured))
        figures += measured
    return machine, figures


def main(arguments: Sequence[str]) -> None:
    options = parse_arguments(arguments)
    # Read first: a wrong file must not be noticed at the end of a long run.
    earlier = json.loads(options.compare.read_text(encoding="utf-8")) if options.compare else None
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        machine, figures = runner.run(run(options))
    if options.output:
        command = " ".join(["python -m tests.bench", *arguments])
        write_report(options.output, command, machine, figures)
    if earlier is not None:
        show(render_comparison(figures, earlier))


if __name__ == "__main__":
    main(sys.argv[1:])
