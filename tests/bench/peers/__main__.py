"""Comparable servers and libraries, measured as Strata is: what `make bench-peers` starts.

    python -m tests.bench.peers [--only NAME,...] [--quick] [--output FILE] [--compare EARLIER.json]

Servers take turns over HTTP beside the relay and Strata. Libraries take store steps beside raw asyncpg. All use one
embedded Postgres. A peer that cannot be installed or started is reported with the reason, and the run goes on.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import uvloop

from tests.bench.http_turn import Surroundings, open_surroundings
from tests.bench.load import Load, Round, Target, run_round, run_rounds
from tests.bench.peers.environments import PACKAGES, PeerUnavailable, install, read_version
from tests.bench.peers.gateways import open_litellm, open_smg
from tests.bench.processes import in_process, pin
from tests.bench.relay import RelayTarget, serve_relay
from tests.bench.report import Figure, describe_machine, render_comparison, render_table, write_report
from tests.bench.strata_server import open_strata_target, serve_strata

OpenGateway = Callable[[Surroundings], AbstractAsyncContextManager[Target]]
GATEWAYS: Mapping[str, OpenGateway] = {"smg": open_smg, "litellm": open_litellm}
LIBRARIES = ("openai-agents", "google-adk", "langgraph")
FLOOR = "asyncpg"
HTTP_LOADS = {1: 100, 8: 800, 16: 1_600, 64: 3_200}
QUICK_HTTP_LOADS = {1: 5, 4: 20}
LONG_TURNS = 1_000
"""The length at which bytes and WAL per turn are taken."""
STEP_CLIENTS = {1: 20, 8: 10, 16: 10, 64: 4}
"""Steps per client, by the number of clients."""
QUICK_STEP_CLIENTS = {1: 2, 4: 2}
ROUNDS = 3


def show(text: str) -> None:
    print(text, end="\n\n", flush=True)  # noqa: T201  reason: its output is its purpose


class Written:
    """What Postgres has written since this was made."""

    def __init__(self, connection: "asyncpg.Connection[asyncpg.Record]", position: str, size: int) -> None:
        self._connection = connection
        self._position = position
        self._size = size

    @classmethod
    async def begin(cls, connection: "asyncpg.Connection[asyncpg.Record]") -> "Written":
        position = await connection.fetchval("SELECT pg_current_wal_insert_lsn()")
        return cls(connection, position, await _read_size(connection))

    async def to_figures(self, name: str, turns: int) -> list[Figure]:
        wal = await self._connection.fetchval("SELECT pg_current_wal_insert_lsn() - $1::pg_lsn", self._position)
        size = await _read_size(self._connection) - self._size
        return [
            Figure(name=f"{name}: WAL per turn", unit="bytes", values=[float(wal) / turns]),
            Figure(name=f"{name}: growth of the database per turn", unit="bytes", values=[size / turns]),
        ]


async def _read_size(connection: "asyncpg.Connection[asyncpg.Record]") -> int:
    return int(await connection.fetchval("SELECT sum(pg_database_size(oid)) FROM pg_database"))


async def measure_gateways(around: Surroundings, options: argparse.Namespace) -> list[Figure]:
    """The chosen gateways and Strata, each as a ratio to the relay."""
    arguments = (around.database_url, around.upstream_url)
    async with AsyncExitStack() as stack:
        cores = around.cores.server
        relay = await stack.enter_async_context(in_process(serve_relay, *arguments, cores=cores))
        strata = await stack.enter_async_context(in_process(serve_strata, *arguments, cores=cores))
        floor = RelayTarget(serving=relay, provider="anthropic")
        targets: list[Target] = [floor, await open_strata_target(strata, "anthropic")]
        for name in (name for name in options.only if name in GATEWAYS):
            try:
                targets.append(await stack.enter_async_context(GATEWAYS[name](around)))
                show(f"{name} {read_version(name)}")
            except PeerUnavailable as error:
                show(f"{name} {error}")
        for target in targets:
            await run_round(target, Load(clients=4, turns=8, turns_per_conversation=None))
        figures = []
        for clients, turns in (QUICK_HTTP_LOADS if options.quick else HTTP_LOADS).items():
            figures += await _compare(targets, clients, turns, 1 if options.quick else ROUNDS)
        connection = await asyncpg.connect(around.database_url)
        try:
            turns = 20 if options.quick else LONG_TURNS
            for target in targets:
                # The first change of a page after a checkpoint writes the whole page: that is done before.
                await connection.execute("CHECKPOINT")
                await run_round(target, Load(clients=4, turns=40, turns_per_conversation=None))
                written = await Written.begin(connection)
                await run_round(target, Load(clients=4, turns=turns, turns_per_conversation=None))
                figures += await written.to_figures(f"{target.name}, {turns:,} turns over HTTP", turns)
        finally:
            await connection.close()
    return figures


async def _compare(targets: Sequence[Target], clients: int, turns: int, rounds: int) -> list[Figure]:
    figures = []
    for workload, turns_per_conversation in (("growing", None), ("fresh", 20)):
        load = Load(clients=clients, turns=turns, turns_per_conversation=turns_per_conversation)
        results = await run_rounds(targets, load, rounds)
        for name, taken in results.items():
            title = f"{name}, {workload}, clients: {clients}"
            measures: dict[tuple[str, str], Callable[[Round], float]] = {
                ("throughput", "turns/s"): lambda one: one.turns_per_second,
                ("CPU per turn", "ms"): lambda one: one.cpu_ms,
                ("first text", "ms"): lambda one: statistics.median(one.first_event_ms),
            }
            figures += [
                Figure(
                    name=f"{title}: {what}",
                    unit=unit,
                    values=[read(one) for one in taken],
                    floor=[read(one) for one in results["relay"]] if name != "relay" else (),
                )
                for (what, unit), read in measures.items()
            ]
    return figures


class Library:
    """A process that takes the store steps of one library."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ask(self, **command: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        line = await self._process.stdout.readline()
        if not line:
            raise PeerUnavailable("ended before it had answered; its error is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


@asynccontextmanager
async def open_library(name: str, around: Surroundings) -> AsyncIterator[Library]:
    python = sys.executable if name == FLOOR else str(install(name) / "python")
    script = Path(__file__).with_name("library_steps.py")
    cores = ",".join(map(str, sorted(around.cores.server)))
    process = await asyncio.create_subprocess_exec(
        python, str(script), name, around.database_url, cores, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        yield Library(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


async def measure_libraries(around: Surroundings, options: argparse.Namespace) -> list[Figure]:
    figures: list[Figure] = []
    floor: dict[str, Sequence[float]] = {}
    for name in (FLOOR, *(name for name in LIBRARIES if name in options.only)):
        try:
            async with open_library(name, around) as library:
                measured = await _measure_library(library, around, options)
        except PeerUnavailable as error:
            show(f"{name} {error}")
            continue
        if name == FLOOR:
            floor = {figure.name: figure.values for figure in measured}
        else:
            show(f"{name} {read_version(name)}")
        figures += [
            Figure(
                name=f"{name}, {figure.name}",
                unit=figure.unit,
                values=figure.values,
                floor=floor[figure.name] if name != FLOOR else (),
            )
            for figure in measured
        ]
    return figures


async def _measure_library(library: Library, around: Surroundings, options: argparse.Namespace) -> list[Figure]:
    figures = []
    for turns in (10,) if options.quick else (10, 100, LONG_TURNS):
        await library.ask(do="prepare", turns=turns, clients=1)
        connection = await asyncpg.connect(around.database_url)
        try:
            # As above.
            await connection.execute("CHECKPOINT")
            await library.ask(do="run", steps=1 if options.quick else 10)
            written = await Written.begin(connection)
            steps = 2 if options.quick else 20
            taken = await library.ask(do="run", steps=steps)
            name = f"store step at {turns:,} turns"
            figures.append(Figure(name=name, unit="ms", values=[taken["median_ms"]]))
            # A step appends two turns.
            figures += await written.to_figures(name, steps * 2)
        finally:
            await connection.close()
    for clients, steps in (QUICK_STEP_CLIENTS if options.quick else STEP_CLIENTS).items():
        await library.ask(do="prepare", turns=100, clients=clients)
        taken = await library.ask(do="run", steps=steps)
        name = f"store steps at 100 turns, clients: {clients}"
        figures += [
            Figure(name=f"{name}: steps", unit="steps/s", values=[taken["steps_per_second"]]),
            Figure(name=f"{name}: CPU per step", unit="ms", values=[taken["cpu_ms"]]),
        ]
    return figures


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.peers", description="Measure peers as Strata is.")
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=list(PACKAGES),
        metavar="NAME,...",
        help=f"peers to run: {', '.join(PACKAGES)} (all)",
    )
    parser.add_argument("--quick", action="store_true", help="a small run that shows only that it works")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--compare", type=Path, metavar="EARLIER.json", help="show the difference to an earlier run")
    options = parser.parse_args(arguments)
    unknown = set(options.only) - set(PACKAGES)
    if unknown:
        parser.error(f"There is no peer {', '.join(sorted(unknown))}. The peers are {', '.join(PACKAGES)}.")
    return options


async def run(options: argparse.Namespace) -> tuple[dict[str, Any], list[Figure]]:
    cores = pin()
    machine = describe_machine(cores)
    show("\n".join(f"{name}: {value}" for name, value in machine.items()))
    figures: list[Figure] = []
    async with open_surroundings(cores) as around:
        for kind, measure in ((set(GATEWAYS), measure_gateways), (set(LIBRARIES), measure_libraries)):
            if kind & set(options.only):
                measured = await measure(around, options)
                show(render_table(measured))
                figures += measured
    return machine, figures


def main(arguments: Sequence[str]) -> None:
    options = parse_arguments(arguments)
    earlier = json.loads(options.compare.read_text(encoding="utf-8")) if options.compare else None
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        machine, figures = runner.run(run(options))
    if options.output:
        write_report(options.output, " ".join(["python -m tests.bench.peers", *arguments]), machine, figures)
    if earlier is not None:
        show(render_comparison(figures, earlier))


if __name__ == "__main__":
    main(sys.argv[1:])
