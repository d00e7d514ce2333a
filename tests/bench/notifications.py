"""What announcing the growth of running turns costs: commits per second, and how late readers get their events.

    python -m tests.bench.notifications [--streams 1000] [--listeners 10] [--seconds 10] [--interval 0.25]

One process writes the checkpoints of many running turns, each at its interval, as a server does. Another process reads
some of these turns from the store, as a server does whose clients listen to a turn that it does not run. Each chunk
holds the time at which it was written, by the clock that all processes of a machine share; the reader subtracts. Beside
them, turns are accepted in other conversations: the statement that a client waits for before its first event.

Three rounds on one database: every growth is announced, as if all turns had readers elsewhere; growth is announced only
to the readers; there are no readers. Nothing but the local Postgres is contacted.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import uvloop

from server.app.providers import FOLDS
from server.conversation.api_key import Tenant
from server.conversation.call import Chunk
from server.conversation.conversation import Lease
from server.conversation.event import TextDelta
from server.postgres.access.key_ring import PostgresKeyRing
from server.postgres.connections import DatabaseOptions
from server.postgres.embedded.service import open_embedded
from server.postgres.engine import Database
from server.postgres.migrations import migrate_up
from server.postgres.notifications import PostgresNotifications
from server.postgres.store import PostgresStore
from server.turns.stored import StoredHandle, TurnLibrary
from tests.support.builders import accept, answer, call_start, create_conversation, user_input

_ANNOUNCE_ALL = "UPDATE conversations SET listened_until = 'infinity' WHERE lease_token IS NOT NULL"
_PROBE_SECONDS = 0.05
_LEASE_SECONDS = 600.0
_SETTLE_SECONDS = 1.0


@dataclass(slots=True, kw_only=True)
class Load:
    """The turns of one round, and what was measured."""

    store: PostgresStore
    tenant: Tenant
    leases: list[Lease]
    interval: float
    offsets: dict[str, int] = field(default_factory=dict)
    appended: list[float] = field(default_factory=list)
    """Seconds of each checkpoint."""
    accepted: list[float] = field(default_factory=list)
    """Seconds until each turn beside them was accepted."""

    async def write(self, number: int, until: float) -> None:
        """Write the checkpoints of one turn."""
        lease = self.leases[number]
        await asyncio.sleep(self.interval * number / len(self.leases))
        while (began := time.monotonic()) < until:
            data = _frame(str(began))
            offset = self.offsets.get(lease.conversation_id, 0)
            chunk = Chunk(attempt=1, offset=offset, data=data)
            await self.store.append_chunks(lease, [chunk], lease_seconds=_LEASE_SECONDS)
            self.offsets[lease.conversation_id] = offset + len(data)
            now = time.monotonic()
            self.appended.append(now - began)
            await asyncio.sleep(max(0.0, began + self.interval - now))

    async def probe(self, until: float) -> None:
        """Accept turns in other conversations, one after the other."""
        while time.monotonic() < until:
            conversation = await create_conversation(self.store, self.tenant.id)
            began = time.monotonic()
            taken = await accept(self.store, self.tenant.id, user_input(conversation.id))
            self.accepted.append(time.monotonic() - began)
            await self.store.finish_turn(taken.lease, answer())
            await asyncio.sleep(_PROBE_SECONDS)


def _frame(text: str) -> bytes:
    chunk = {"candidates": [{"content": {"parts": [{"text": text}], "role": "model"}, "index": 0}]}
    return b"data: " + json.dumps(chunk).encode() + b"\r\n\r\n"


async def read_turns(parent: Connection, url: str, tenant_id: str, conversation_ids: Sequence[str]) -> None:
    """Read turns until the parent ends the round, and send it how late each event was."""
    late: list[float] = []
    ending = asyncio.create_task(asyncio.to_thread(parent.recv))
    database = Database(DatabaseOptions(url=url))
    async with PostgresNotifications(database.options) as notifications:
        await notifications.wait_until_listening()
        library = TurnLibrary(store=PostgresStore(database), notifications=notifications, folds=FOLDS)

        async def read(conversation_id: str) -> None:
            handle = StoredHandle(library=library, tenant_id=tenant_id, conversation_id=conversation_id, seq=2)
            reader = handle.read()
            while not ending.done():
                events = await reader.next(0.5) or ()
                now = time.monotonic()
                late.extend(now - float(event.text) for _, event in events if isinstance(event, TextDelta))
            reader.close()

        parent.send(None)
        await asyncio.gather(*(read(conversation_id) for conversation_id in conversation_ids))
    await database.close()
    parent.send(late)


def _run_reader(parent: Connection, url: str, tenant_id: str, conversation_ids: Sequence[str]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(read_turns(parent, url, tenant_id, conversation_ids))


@asynccontextmanager
async def reading(url: str, tenant_id: str, conversation_ids: Sequence[str], late: list[float]) -> AsyncIterator[None]:
    """Read the turns in another process during the block; `late` is filled at its end."""
    if not conversation_ids:
        yield
        return
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_run_reader, args=(there, url, tenant_id, conversation_ids), daemon=True)
    process.start()
    await asyncio.to_thread(here.recv)
    # The first look of each reader requests notifications.
    await asyncio.sleep(_SETTLE_SECONDS)
    try:
        yield
    finally:
        here.send(None)
        late.extend(await asyncio.to_thread(here.recv))
        await asyncio.to_thread(process.join, 20)


async def measure(
    database: Database, options: argparse.Namespace, name: str, *, listeners: int, announces_all: bool
) -> None:
    store = PostgresStore(database)
    tenant = await PostgresKeyRing(database).create_tenant(name)
    leases = []
    for _ in range(options.streams):
        conversation = await create_conversation(store, tenant.id)
        lease = (await accept(store, tenant.id, user_input(conversation.id))).lease
        await store.begin_call(lease, call_start(provider="gemini"))
        leases.append(lease)
    load = Load(store=store, tenant=tenant, leases=leases, interval=options.interval)
    late: list[float] = []
    read_ids = [lease.conversation_id for lease in leases[:: max(1, len(leases) // max(1, listeners))]][:listeners]
    async with reading(database.options.url, tenant.id, read_ids, late):
        if announces_all:
            async with database.connection() as connection:
                await connection.execute(_ANNOUNCE_ALL)
        began = time.monotonic()
        until = began + options.seconds
        await asyncio.gather(load.probe(until), *(load.write(number, until) for number in range(len(leases))))
        seconds = time.monotonic() - began
    for lease in leases:
        await store.finish_turn(lease, answer())
    print(  # noqa: T201  reason: its output is its purpose
        f"{name}\n"
        f"  checkpoints: {len(load.appended) / seconds:.0f} commits/s (due: {len(leases) / options.interval:.0f}/s)\n"
        f"  a checkpoint: {_spread(load.appended)}\n"
        f"  accepting a turn: {_spread(load.accepted)}\n"
        f"  an event to its reader elsewhere: {_spread(late)}"
    )


def _spread(seconds: list[float]) -> str:
    if not seconds:
        return "none"
    ordered = sorted(seconds)
    return (
        f"median {statistics.median(ordered) * 1000:.1f} ms, "
        f"99 % {ordered[int(len(ordered) * 0.99)] * 1000:.1f} ms, longest {ordered[-1] * 1000:.0f} ms"
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--listeners", type=int, default=10, help="streams that are read in another process")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a round")
    parser.add_argument("--interval", type=float, default=0.25, help="seconds between the checkpoints of a turn")
    options = parser.parse_args()
    with ExitStack() as stack:
        place = stack.enter_context(TemporaryDirectory(prefix="strata-bench-"))
        # Open to the account that Postgres runs under for root.
        os.chmod(place, 0o755)  # noqa: PTH101, S103
        embedded = stack.enter_context(open_embedded(Path(place) / "data"))
        await migrate_up(DatabaseOptions(url=embedded.url))
        database = Database(DatabaseOptions(url=embedded.url))
        some = options.listeners
        await measure(database, options, f"all growth announced, {some} readers", listeners=some, announces_all=True)
        await measure(database, options, f"announced to {some} readers only", listeners=some, announces_all=False)
        await measure(database, options, "no readers", listeners=0, announces_all=False)
        await database.close()


if __name__ == "__main__":
    uvloop.run(main())
