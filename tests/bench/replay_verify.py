"""How near verifying comes to the least it could do, as a ratio, in one run on one database.

    python -m tests.bench.replay_verify [--turns N] [--data-dir DIR] [--conversations N] [--long N --provider NAME]

The floor is what nobody can leave out: the same rows read with plain asyncpg, the raw bytes decompressed and folded,
each request written by the SDK and hashed. Verifying finds out in addition what every request was made of, and compares
all that is stored of the answers. One process does both, in turns, so that whatever else the machine does hits both;
told are the ratios of time and of this process's CPU, which a loaded machine does not bend.

The conversations are `strata seed`'s, made for the run, or those that are in a data directory already. With `--long`
it is a single conversation of so many turns, held for the run, with its compactions; then also told is what a late
call costs beside an early one.
"""

import argparse
import asyncio
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Self
from uuid import UUID

import uvloop

from server.app.database import open_database
from server.app.providers import open_offline_providers, open_providers
from server.app.settings import Settings
from server.conversation.identifiers import CONVERSATION, decode_id
from server.conversation.store import RebuildSource
from server.inspection.past_payload import rebuild_call
from server.postgres.archive.exporter import list_conversation_ids
from server.postgres.codec import decode_raw, encode_raw
from server.postgres.engine import Database
from server.postgres.replay.recorded_calls import PostgresRecordedCalls
from server.providers.choice import ANTHROPIC, GEMINI, KEY_VARIABLES, ProviderChoice
from server.providers.provider import Provider
from server.replay.verify.answer_check import fold_raw, is_answer
from server.replay.verify.recorded_calls import CallFilter, RecordedCall
from server.replay.verify.verification import Counts, add_counts
from server.replay.verify.verifier import Verifier, VerifyOptions
from tests.bench.long_conversation import serve_emulator
from tests.bench.processes import in_process
from tests.support.long_conversation_driver import open_long_conversation

TURNS = 4_000
BATCH = 20
EDGE = 100
READS = (
    "SELECT * FROM epochs WHERE conversation_id = ANY($1::uuid[])",
    (
        "SELECT seq, kind, state, native, blocks, provider, model, account, stop_reason, error_code, output_tokens "
        "FROM turns WHERE conversation_id = ANY($1::uuid[]) ORDER BY conversation_id, seq"
    ),
    (
        "SELECT turn_seq, attempt, provider, model, account, epoch, request_hash, dynamic, caching, manifest, "
        "usage_reported, raw_response FROM calls WHERE conversation_id = ANY($1::uuid[]) "
        "ORDER BY conversation_id, turn_seq, attempt"
    ),
)


@dataclass(slots=True)
class Spent:
    """Time and CPU of what was done inside `with`."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    _began: tuple[float, float] = (0.0, 0.0)

    def __enter__(self) -> Self:
        self._began = (time.perf_counter(), time.process_time())
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._began[0]
        self.cpu_seconds += time.process_time() - self._began[1]


async def read_rows(database: Database, ids: Sequence[UUID], spent: Spent) -> None:
    """The same rows, as they come."""
    with spent:
        async with database.connection() as connection:
            for sql in READS:
                await connection.fetch(sql, list(ids))


async def do_the_least(calls: Sequence[RecordedCall], offline_providers: Mapping[str, Provider], spent: Spent) -> None:
    """What cannot be left out: folding the bytes of each call, writing its request."""
    for past in calls:
        end, scribe = past.call.end, offline_providers[past.call.start.provider]
        assert end is not None
        assert end.raw_response is not None
        assert past.source is not None
        compressed = encode_raw(end.raw_response)
        payload = rebuild_call(RebuildSource(call=past.call, source=past.source), provider=scribe)
        with spent:
            raw = decode_raw(compressed)
            if is_answer(end):
                fold_raw(scribe.open_fold(), raw)
            hashlib.sha256(await scribe.encode_request(payload)).digest()


async def measure(database: Database, settings: Settings, ids: Sequence[str]) -> None:
    async with open_offline_providers(settings) as offline_providers:
        verifier = Verifier(PostgresRecordedCalls(database), offline_providers, VerifyOptions())
        await verifier.verify(ids[:BATCH])
        verifying, floor, counts = Spent(), Spent(), Counts()
        for place in range(0, len(ids), BATCH):
            batch = ids[place : place + BATCH]
            with verifying:
                counts = add_counts(counts, (await verifier.verify(batch)).counts)
            keys = [key for each in batch if (key := decode_id(CONVERSATION, each)) is not None]
            await read_rows(database, keys, floor)
            async for _, items in PostgresRecordedCalls(database).conversations(batch, CallFilter()):
                calls = [item async for item in items if isinstance(item, RecordedCall)]
                await do_the_least(calls, offline_providers, floor)
    count, size = counts.call_count, counts.raw_bytes / 2**20
    show("calls", f"{count:,}, of which {counts.mismatch_count} do not match; {size:.1f} MB of raw bytes")
    show("floor", f"{floor.seconds / count * 1e3:.2f} ms a call, CPU {floor.cpu_seconds / count * 1e3:.2f}")
    show("verify", f"{verifying.seconds / count * 1e3:.2f} ms a call, CPU {verifying.cpu_seconds / count * 1e3:.2f}")
    ratio, cpu_ratio = verifying.seconds / floor.seconds, verifying.cpu_seconds / floor.cpu_seconds
    show("verify to floor", f"{ratio:.2f}, CPU {cpu_ratio:.2f}")


async def measure_edges(database: Database, settings: Settings, conversation_id: str) -> None:
    """What the requests of late calls cost to make again beside those of early ones, as CPU: reading included."""
    async with open_offline_providers(settings) as offline_providers:
        spent: list[float] = []
        async for _, items in PostgresRecordedCalls(database).conversations([conversation_id], CallFilter()):
            began = time.process_time()
            async for item in items:
                if isinstance(item, RecordedCall) and item.call.turn_seq > 0:
                    payload = rebuild_call(
                        RebuildSource(call=item.call, source=item.source),  # type: ignore[arg-type]  # reason: it is there
                        provider=offline_providers[item.call.start.provider],
                    )
                    await offline_providers[item.call.start.provider].encode_request(payload)
                    spent.append(time.process_time() - began)
                    began = time.process_time()
    early, late = median(spent[EDGE : 2 * EDGE]), median(spent[-EDGE:])
    show("a call, late to early", f"{late / early:.2f} (CPU, {early * 1e3:.2f} ms early)")


def show(name: str, figure: str) -> None:
    print(f"{name:<22} {figure}", flush=True)  # noqa: T201  reason: its output is its purpose


@asynccontextmanager
async def seeded(place: Path, turns: int) -> AsyncIterator[tuple[Database, Settings, Sequence[str]]]:
    settings = Settings(data_dir=place, log_level="error")
    if turns:
        environment = os.environ | {"STRATA_DATA_DIR": str(place)}
        command = [sys.executable, "-m", "server", "seed", "--turns", str(turns)]
        await asyncio.to_thread(subprocess.run, command, env=environment, check=True)
    async with open_database(settings) as database:
        yield database, settings, [each async for each in list_conversation_ids(database, None)]


@asynccontextmanager
async def record_conversation(
    place: Path, provider: str, turns: int
) -> AsyncIterator[tuple[Database, Settings, Sequence[str]]]:
    async with AsyncExitStack() as stack:
        urls = {name: (await stack.enter_async_context(in_process(serve_emulator, name))).url for name in KEY_VARIABLES}
        settings = Settings(
            data_dir=place,
            gemini_base_url=urls[GEMINI],
            anthropic_base_url=urls[ANTHROPIC],
            log_level="error",
        )
        database = await stack.enter_async_context(open_database(settings))
        environment = {keys[0]: "key" for keys in KEY_VARIABLES.values()}
        choice = ProviderChoice(provider=GEMINI, api_key="key")
        providers = await stack.enter_async_context(open_providers(settings, choice, environment))
        async with open_long_conversation(
            settings, providers, database, provider, typical_exchange_count=turns // 2
        ) as driver:
            await driver.go_on(turns)
            yield database, settings, [driver.conversation_id]


async def run(arguments: argparse.Namespace) -> None:
    with TemporaryDirectory(prefix="strata-bench-") as made:
        # Open to the account that Postgres runs under for root.
        os.chmod(made, 0o755)  # noqa: PTH101, S103
        place = arguments.data_dir or Path(made) / "data"
        if arguments.long:
            opened = record_conversation(place, arguments.provider, arguments.long)
        else:
            opened = seeded(place, 0 if arguments.data_dir else arguments.turns)
        async with opened as (database, settings, ids):
            await measure(database, settings, ids[: arguments.conversations])
            if arguments.long:
                await measure_edges(database, settings, ids[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--conversations", type=int, help="So many of them, the oldest.")
    parser.add_argument("--long", type=int)
    parser.add_argument("--provider", choices=list(KEY_VARIABLES), default=ANTHROPIC)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(parser.parse_args()))
