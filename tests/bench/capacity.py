"""How many machines a number of concurrent streams needs, from measured figures.

    python -m tests.bench.capacity --server-turn-ms 20 --server-second-ms 2 [--turn-seconds 20] [--interval 0.25]

The figures of Postgres are measured here, on the embedded server with one connection: CPU time of its process, bytes of
write-ahead log and bytes of tables, per turn (accept, load, begin of the call, finish) and per checkpoint. The figures
of a server are those of another benchmark: milliseconds of CPU per turn, and per second of a stream. The rest is
arithmetic, printed with its inputs. Background jobs, replication and headroom for peaks are not included.
"""

import argparse
import asyncio
import hashlib
import math
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import uvloop

from server.conversation.api_key import Tenant
from server.conversation.call import Chunk
from server.conversation.conversation import Lease
from server.postgres.access.key_ring import PostgresKeyRing
from server.postgres.connections import Connection, DatabaseOptions
from server.postgres.embedded.service import open_embedded
from server.postgres.engine import Database
from server.postgres.migrations import migrate_up
from server.postgres.store import PostgresStore
from tests.bench.store_step import ASKED, STATIC_TEXT, keep_buffer_small, reply
from tests.support.builders import LEASE_SECONDS, accept, call_start, create_conversation, epoch, user_input

STREAMS = (1_000, 10_000, 100_000)
CHUNK_BYTES = 500
"""Of a checkpoint: what a model says in a quarter of a second, as its provider frames it."""
WARM_UP = 100
TURNS = 600
CHECKPOINTS = 2_000
_STATIC_HASH = hashlib.sha256(STATIC_TEXT.encode()).digest()
_TICKS = os.sysconf("SC_CLK_TCK")
_SIZE = """
SELECT sum(pg_total_relation_size(c.oid)) FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace
WHERE nspname IN ('public', 'partitions') AND relkind = 'r'
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one turn or one checkpoint costs Postgres."""

    cpu_seconds: float
    wal_bytes: float
    table_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a stream is, and what it costs."""

    turn_seconds: float
    interval: float
    server_turn_seconds: float
    """CPU per turn."""
    server_second_seconds: float
    """CPU per second of a stream."""
    turn: Cost
    checkpoint: Cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What so many concurrent streams need, with all cores in full use."""

    turns_per_second: float
    server_cores: float
    postgres_cores: float
    commits_per_second: float
    wal_bytes_per_second: float
    stored_bytes_per_day: float


def compute_need(load: Load, streams: int) -> Need:
    """Compute what a number of concurrent streams needs."""
    turns = streams / load.turn_seconds
    # The first checkpoint is due after one interval.
    checkpoints = streams / load.interval - turns
    return Need(
        turns_per_second=turns,
        server_cores=turns * load.server_turn_seconds + streams * load.server_second_seconds,
        postgres_cores=turns * load.turn.cpu_seconds + checkpoints * load.checkpoint.cpu_seconds,
        # Accepting, beginning the call and finishing write; loading does not.
        commits_per_second=3 * turns + checkpoints,
        wal_bytes_per_second=turns * load.turn.wal_bytes + checkpoints * load.checkpoint.wal_bytes,
        # Chunks are deleted when the turn ends.
        stored_bytes_per_day=turns * load.turn.table_bytes * 86_400,
    )


class Meter:
    """The counters of Postgres for its only connection."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def measure(self, step: Callable[[], Awaitable[None]], count: int) -> Cost:
        for _ in range(WARM_UP):
            await step()
        before = await self._read()
        for _ in range(count):
            await step()
        after = await self._read()
        cpu, wal, size = ((late - early) / count for early, late in zip(before, after, strict=True))
        return Cost(cpu_seconds=cpu, wal_bytes=wal, table_bytes=size)

    async def _read(self) -> tuple[float, float, float]:
        async with self._database.connection() as connection:
            return await self._read_cpu(connection), *await self._read_bytes(connection)

    @staticmethod
    async def _read_cpu(connection: Connection) -> float:
        pid = await connection.fetchval("SELECT pg_backend_pid()")
        fields = (await asyncio.to_thread(Path(f"/proc/{pid}/stat").read_text)).rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    @staticmethod
    async def _read_bytes(connection: Connection) -> tuple[float, float]:
        wal = await connection.fetchval("SELECT (pg_current_wal_lsn() - '0/0'::pg_lsn)::float8")
        return wal, float(await connection.fetchval(_SIZE))


async def measure_postgres(url: str) -> tuple[Cost, Cost]:
    """Measure a turn and a checkpoint."""
    database = Database(DatabaseOptions(url=url, pool_size=1))
    store, tenant = PostgresStore(database), await PostgresKeyRing(database).create_tenant("capacity")
    meter = Meter(database)
    turn = await meter.measure(await _turn_step(store, tenant), TURNS)
    checkpoint = await meter.measure(await _checkpoint_step(store, tenant), CHECKPOINTS)
    await database.close()
    return turn, checkpoint


async def _turn_step(store: PostgresStore, tenant: Tenant) -> Callable[[], Awaitable[None]]:
    conversation = await create_conversation(store, tenant.id)
    await store.begin_epoch(tenant.id, conversation.id, epoch(text=STATIC_TEXT, static_hash=_STATIC_HASH))
    count = 0

    async def take() -> None:
        nonlocal count
        taken = await accept(store, tenant.id, user_input(conversation.id, ASKED))
        await store.load_payload_source(tenant.id, conversation.id, cached_static_hashes=[_STATIC_HASH])
        await store.begin_call(taken.lease, call_start())
        await store.finish_turn(taken.lease, reply())
        count += 1
        if count % 10 == 0:
            await keep_buffer_small(store, conversation)

    return take


async def _checkpoint_step(store: PostgresStore, tenant: Tenant) -> Callable[[], Awaitable[None]]:
    conversation = await create_conversation(store, tenant.id)
    lease: Lease = (await accept(store, tenant.id, user_input(conversation.id, ASKED))).lease
    offset = 0

    async def write() -> None:
        nonlocal offset
        chunk = Chunk(attempt=1, offset=offset, data=os.urandom(CHUNK_BYTES))
        await store.append_chunks(lease, [chunk], lease_seconds=LEASE_SECONDS)
        offset += CHUNK_BYTES

    return write


def render(load: Load) -> str:
    """Show the figures and what follows from them."""
    turn, checkpoint = load.turn, load.checkpoint
    cpu = [
        seconds * 1000
        for seconds in (turn.cpu_seconds, checkpoint.cpu_seconds, load.server_turn_seconds, load.server_second_seconds)
    ]
    lines = [
        f"Postgres, CPU: {cpu[0]:.2f} ms per turn, {cpu[1]:.2f} ms per checkpoint",
        f"Postgres, WAL: {turn.wal_bytes / 1000:.1f} kB per turn, {checkpoint.wal_bytes / 1000:.1f} kB per checkpoint",
        f"Postgres, tables: {turn.table_bytes / 1000:.1f} kB per turn",
        f"Server, CPU: {cpu[2]:g} ms per turn, {cpu[3]:g} ms per second",
        f"A turn takes {load.turn_seconds:g} s and is stored every {load.interval:g} s.",
        "",
        "| streams | turns/s | server cores | Postgres cores | commits/s | WAL | stored per day |",
        "|---|---|---|---|---|---|---|",
    ]
    for streams in STREAMS:
        need = compute_need(load, streams)
        lines.append(
            f"| {streams:,} | {need.turns_per_second:,.0f} | {math.ceil(need.server_cores):,} | "
            f"{math.ceil(need.postgres_cores):,} | {need.commits_per_second:,.0f} | "
            f"{need.wal_bytes_per_second / 1e6:,.0f} MB/s | {need.stored_bytes_per_day / 1e9:,.0f} GB |"
        )
    return "\n".join(lines)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server-turn-ms", type=float, required=True, help="CPU of a server per turn")
    parser.add_argument("--server-second-ms", type=float, required=True, help="CPU of a server per second of a stream")
    parser.add_argument("--turn-seconds", type=float, default=20.0, help="how long an answer streams")
    parser.add_argument("--interval", type=float, default=0.25, help="seconds between checkpoints")
    options = parser.parse_args()
    with TemporaryDirectory(prefix="strata-bench-") as place:
        # Open to the account that Postgres runs under for root.
        os.chmod(place, 0o755)  # noqa: PTH101, S103
        with open_embedded(Path(place) / "data") as embedded:
            await migrate_up(DatabaseOptions(url=embedded.url))
            turn, checkpoint = await measure_postgres(embedded.url)
    load = Load(
        turn_seconds=options.turn_seconds,
        interval=options.interval,
        server_turn_seconds=options.server_turn_ms / 1000,
        server_second_seconds=options.server_second_ms / 1000,
        turn=turn,
        checkpoint=checkpoint,
    )
    print(render(load))  # noqa: T201  reason: its output is its purpose


if __name__ == "__main__":
    uvloop.run(main())
