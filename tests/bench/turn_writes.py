"""What a turn sends to Postgres: statements, jobs in the background, write-ahead log and bytes on disk.

    python -m tests.bench.turn_writes [--turns N] [--quick]

The whole server with its worker inside takes turns over HTTP from four clients, with the default settings, until its
work in the background has ended. Statements are counted in the server by asyncpg's query logger, so those of the worker
and of the server's own periodic checks are included; the most frequent ones are listed.
"""

import argparse
import asyncio
from collections import Counter
from pathlib import Path

import asyncpg
import uvloop

from tests.bench.http_turn import Surroundings, open_surroundings
from tests.bench.load import Load, run_round
from tests.bench.processes import in_process, open_place, pin
from tests.bench.report import Figure, Goal, render_table
from tests.bench.strata_server import Watching, open_strata_target, read_statements, serve_strata
from tests.bench.upstream import anthropic_chunks, gemini_chunks
from tests.support.emulators import BOTH

TURNS = 500
QUICK_TURNS = 20
CLIENTS = 4
_JOBS_SQL = "SELECT count(DISTINCT job_id) FROM pgqueuer_log"
_SHOWN_STATEMENTS = 20
_SHOWN_CHARACTERS = 110
RAW_BYTES = {"gemini": sum(map(len, gemini_chunks())), "anthropic": sum(map(len, anthropic_chunks()))}
"""The bytes of one response, which are stored. They are compressed, so a turn takes less on disk."""


async def measure(around: Surroundings, *, turns: int) -> tuple[list[Figure], str]:
    """Both providers. The text lists the most frequent statements."""
    figures: list[Figure] = []
    listings = []
    for provider in BOTH:
        with open_place() as place:
            counted = await _measure_provider(around, provider, turns, place / "statements")
        figures += counted[0]
        listings.append(f"{provider}, statements per turn:\n{_list_statements(counted[1], turns)}")
    return figures, "\n\n".join(listings)


async def _measure_provider(
    around: Surroundings, provider: str, turns: int, file: Path
) -> tuple[list[Figure], Counter[str]]:
    connection = await asyncpg.connect(around.database_url)
    try:
        arguments = (around.database_url, around.upstream_url, Watching(statements=file))
        async with in_process(serve_strata, *arguments, cores=around.cores.server) as strata:
            target = await open_strata_target(strata, provider)
            await connection.execute("CHECKPOINT")
            # The first change of a page after a checkpoint writes the whole page. A warm-up would not change that: new
            # conversations change other pages.
            wal = await connection.fetchval("SELECT pg_current_wal_insert_lsn()")
            jobs = await connection.fetchval(_JOBS_SQL)
            size = await connection.fetchval("SELECT pg_database_size(current_database())")
            await run_round(target, Load(clients=CLIENTS, turns=turns, turns_per_conversation=None))
            written = await connection.fetchval("SELECT pg_current_wal_insert_lsn() - $1::pg_lsn", wal)
            grown = await connection.fetchval("SELECT pg_database_size(current_database())") - size
            jobs = await connection.fetchval(_JOBS_SQL) - jobs
    finally:
        await connection.close()
    statements = read_statements(file)
    queue = sum(count for query, count in statements.items() if "pgqueuer" in query)
    per_turn = {
        "statements, all": statements.total() / turns,
        "statements, of the job queue": queue / turns,
        "jobs": jobs / turns,
    }
    goals = {"statements, all": Goal(of="value", limit=4)}
    figures = [
        Figure(name=f"per turn, {provider}: {name}", unit="count", values=[value], goal=goals.get(name))
        for name, value in per_turn.items()
    ]
    figures += [
        Figure(name=f"per turn, {provider}: WAL", unit="bytes", values=[float(written) / turns]),
        Figure(name=f"per turn, {provider}: growth of the database", unit="bytes", values=[grown / turns]),
        Figure(name=f"per turn, {provider}: response of the upstream", unit="bytes", values=[RAW_BYTES[provider]]),
    ]
    return figures, statements


def _list_statements(statements: Counter[str], turns: int) -> str:
    return "\n".join(
        f"{count / turns:7.3f}  {query[:_SHOWN_CHARACTERS]}"
        for query, count in statements.most_common(_SHOWN_STATEMENTS)
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure what a turn sends to Postgres.")
    parser.add_argument("--turns", type=int, default=TURNS, help="how many turns per provider (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a small run that shows only that it works")
    return parser.parse_args()


async def main(options: argparse.Namespace) -> None:
    async with open_surroundings(pin()) as around:
        figures, listing = await measure(around, turns=QUICK_TURNS if options.quick else options.turns)
    print(f"{listing}\n\n{render_table(figures)}")  # noqa: T201  reason: its output is its purpose


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(parse_arguments()))
