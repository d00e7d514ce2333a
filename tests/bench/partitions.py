"""What hash partitions cost per turn: the three statements of a turn, without and with partitions, in one run.

    python -m tests.bench.partitions [--counts 4 8 16] [--turns 100] [--rounds 40]

There is one database per number of partitions, and blocks of turns go to each of them in turn, so that other work of
the machine affects all of them. The CPU time is that of the database's process for the connection. Times are shown as
the lowest tenth of the turns, because a waiting disk affects them least.
"""

import argparse
import hashlib
import os
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import uvloop

from server.conversation.api_key import Tenant
from server.conversation.conversation import Conversation
from server.postgres.access.key_ring import PostgresKeyRing
from server.postgres.connections import DatabaseOptions, connect
from server.postgres.embedded.service import open_embedded
from server.postgres.engine import Database
from server.postgres.migrations import migrate_up
from server.postgres.partitions import partition_tables
from server.postgres.store import PostgresStore
from tests.bench.store_step import (
    ASKED,
    BUFFERED,
    STATIC_TEXT,
    fill,
    keep_buffer_small,
    reply,
    strata_step,
)
from tests.support.builders import create_conversation, epoch, user_input
from tests.support.database_source import with_database

BLOCK = 20
WARM_UP = 3
"""Blocks."""
_TICKS = os.sysconf("SC_CLK_TCK")
_STATIC_HASH = hashlib.sha256(STATIC_TEXT.encode()).digest()


@dataclass(slots=True, kw_only=True)
class Side:
    """A database with so many partitions, and what its turns cost."""

    count: int
    store: PostgresStore
    tenant: Tenant
    conversation: Conversation
    pid: int
    """Of the database's process for the only connection."""
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0

    async def take_block(self) -> None:
        cpu = self._read_cpu()
        for _ in range(BLOCK):
            question, given = user_input(self.conversation.id, ASKED), reply()
            began = time.perf_counter()
            await strata_step(self.store, self.tenant, question, given, _STATIC_HASH)
            self.seconds.append(time.perf_counter() - began)
        self.cpu_seconds += self._read_cpu() - cpu
        await keep_buffer_small(self.store, self.conversation)

    def _read_cpu(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def forget(self) -> None:
        self.seconds.clear()
        self.cpu_seconds = 0.0


async def open_side(stack: AsyncExitStack, server_url: str, count: int, turns: int) -> Side:
    name = f"partitions_{count}"
    admin = await connect(DatabaseOptions(url=server_url))
    await admin.execute(f"CREATE DATABASE {name}")
    await admin.close()
    options = DatabaseOptions(url=with_database(server_url, name), pool_size=1)
    await migrate_up(options)
    if count:
        await partition_tables(options, count=count, on_progress=lambda _: None)
    database = Database(options)
    stack.push_async_callback(database.close)
    store, tenant = PostgresStore(database), await PostgresKeyRing(database).create_tenant("bench")
    conversation = await create_conversation(store, tenant.id)
    await fill(store, conversation, turns)
    begun = epoch(text=STATIC_TEXT, static_hash=_STATIC_HASH, buffer_start_seq=max(1, turns - BUFFERED + 1))
    await store.begin_epoch(tenant.id, conversation.id, begun)
    async with database.connection() as connection:
        await connection.execute("ANALYZE")
        pid = await connection.fetchval("SELECT pg_backend_pid()")
    return Side(count=count, store=store, tenant=tenant, conversation=conversation, pid=pid)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--turns", type=int, default=100, help="length of the conversation")
    parser.add_argument("--rounds", type=int, default=40, help=f"blocks of {BLOCK} turns for each database")
    options = parser.parse_args()
    async with AsyncExitStack() as stack:
        place = stack.enter_context(TemporaryDirectory(prefix="strata-bench-"))
        # Open to the account that Postgres runs under for root.
        os.chmod(place, 0o755)  # noqa: PTH101, S103
        embedded = stack.enter_context(open_embedded(Path(place) / "data"))
        sides = [await open_side(stack, embedded.url, count, options.turns) for count in (0, *options.counts)]
        for number in range(WARM_UP + options.rounds):
            for side in sides:
                await side.take_block()
                if number < WARM_UP:
                    side.forget()
        for side in sides:
            quick = sorted(side.seconds)[len(side.seconds) // 10] * 1000
            cpu = side.cpu_seconds / len(side.seconds) * 1000
            print(f"{side.count:3} partitions: {quick:.2f} ms, {cpu:.2f} ms of CPU in Postgres")  # noqa: T201  reason: its output is its purpose


if __name__ == "__main__":
    uvloop.run(main())
