"""What the store costs per turn, as a ratio to the least that could be done, in one run on one database.

    python -m tests.bench.store_step [--quick]

The floor is raw asyncpg on one connection: insert the input, read the static text and the last 20 turns, insert the
answer. Strata's step is accepting the input, loading the payload's sources, and finishing the answer with its call: as
many round trips and commits, but with checks, lease, numbering, idempotency, raw bytes and values for the domain.
Blocks of steps are interleaved, so that other work of the machine affects both.
"""

import argparse
import asyncio
import hashlib
import statistics
import time
from collections.abc import Awaitable, Callable
from functools import partial
from uuid import UUID, uuid4

import uvloop

from server.conversation.api_key import Tenant
from server.conversation.block import TextBlock, encode_blocks
from server.conversation.conversation import Conversation
from server.conversation.identifiers import CONVERSATION, decode_id
from server.conversation.store import NewAnswer, NewInput
from server.conversation.turn import Native
from server.postgres.access.key_ring import PostgresKeyRing
from server.postgres.connections import Connection, DatabaseOptions, connect
from server.postgres.engine import Database
from server.postgres.store import PostgresStore
from tests.bench.processes import open_database, pin
from tests.bench.report import Figure, Goal, render_table
from tests.support.builders import accept, answer, call_end, call_start, create_conversation, epoch, user_input

LENGTHS = (10, 100, 1_000, 5_000)
QUICK_LENGTHS = (10, 40)
BUFFERED = 20
ROUNDS = 200
WARM_UP = 40
BLOCK = 20
STATIC_TEXT = "You are a careful assistant. " * 200
ASKED, REPLIED, SIGNATURE = "x" * 200, "y" * 800, "s" * 1500

FLOOR_TABLES = """
CREATE TABLE IF NOT EXISTS floor_prefix (conversation_id uuid PRIMARY KEY, text text);
CREATE TABLE IF NOT EXISTS floor_turns
    (conversation_id uuid, seq bigint, native bytea, PRIMARY KEY (conversation_id, seq))
"""
FLOOR_LOAD = """
SELECT (SELECT text FROM floor_prefix WHERE conversation_id = $1), array_agg(native ORDER BY seq)
FROM (SELECT seq, native FROM floor_turns WHERE conversation_id = $1 ORDER BY seq DESC LIMIT 20) AS recent
"""
FLOOR_APPEND = "INSERT INTO floor_turns VALUES ($1, $2, $3)"


def reply() -> NewAnswer:
    native = f'{{"role":"model","parts":[{{"text":"{REPLIED}","thoughtSignature":"{SIGNATURE}"}}]}}'.encode()
    return answer(
        blocks=(TextBlock(text=REPLIED),),
        native=Native(dialect="gemini", data=native),
        start=call_start(),
        end=call_end(raw_response=b"data: " + native + b"\n\n"),
    )


async def strata_step(store: PostgresStore, tenant: Tenant, question: NewInput, given: NewAnswer, held: bytes) -> None:
    accepted = await accept(store, tenant.id, question)
    await store.load_payload_source(tenant.id, question.conversation_id, cached_static_hashes=[held])
    await store.finish_turn(accepted.lease, given)


async def floor_step(connection: Connection, conversation_id: UUID, seq: int, native: bytes) -> None:
    await connection.execute(FLOOR_APPEND, conversation_id, seq, ASKED.encode())
    await connection.fetch(FLOOR_LOAD, conversation_id)
    await connection.execute(FLOOR_APPEND, conversation_id, seq + 1, native)


async def timed(step: Callable[[], Awaitable[None]]) -> float:
    began = time.perf_counter()
    await step()
    return (time.perf_counter() - began) * 1000


async def compare(
    store: PostgresStore, tenant: Tenant, connection: Connection, turns: int, rounds: int
) -> tuple[list[float], list[float]]:
    """Medians in ms of each block at a conversation's length: the floor's and ours."""
    conversation = await create_conversation(store, tenant.id)
    static_hash = hashlib.sha256(STATIC_TEXT.encode()).digest()
    await fill(store, conversation, turns)
    begun = epoch(text=STATIC_TEXT, static_hash=static_hash, buffer_start_seq=max(1, turns - BUFFERED + 1))
    await store.begin_epoch(tenant.id, conversation.id, begun)
    floor_id, native = uuid4(), reply().native.data
    await connection.execute("INSERT INTO floor_prefix VALUES ($1, $2)", floor_id, STATIC_TEXT)
    await connection.executemany(FLOOR_APPEND, [(floor_id, seq, native) for seq in range(1, turns + 1)])
    await connection.execute("ANALYZE")
    floor, ours = [], []
    for first in range(0, WARM_UP + rounds, BLOCK):
        # In blocks: one after the other, each step would find the caches full of the other's.
        for number in range(first, first + BLOCK):
            seq = turns + 2 * number + 1
            floor.append(await timed(partial(floor_step, connection, floor_id, seq, native)))
        for _ in range(BLOCK):
            question, given = user_input(conversation.id, ASKED), reply()
            ours.append(await timed(partial(strata_step, store, tenant, question, given, static_hash)))
            await keep_buffer_small(store, conversation)
    blocks = range(WARM_UP, WARM_UP + rounds, BLOCK)
    medians = [[statistics.median(steps[first : first + BLOCK]) for first in blocks] for steps in (floor, ours)]
    return medians[0], medians[1]


async def measure_wal(store: PostgresStore, tenant: Tenant, connection: Connection) -> tuple[int, int]:
    """Bytes of write-ahead log per turn, and bytes that the turn itself has: question, answer, raw response."""
    conversation = await create_conversation(store, tenant.id)
    static_hash = hashlib.sha256(STATIC_TEXT.encode()).digest()
    await store.begin_epoch(tenant.id, conversation.id, epoch(text=STATIC_TEXT, static_hash=static_hash))
    await connection.execute("CHECKPOINT")
    # The first change of a page after a checkpoint writes the whole page; that is over after some turns.
    for _ in range(WARM_UP):
        await strata_step(store, tenant, user_input(conversation.id, ASKED), reply(), static_hash)
    before = await connection.fetchval("SELECT pg_current_wal_lsn()")
    for _ in range(ROUNDS):
        await strata_step(store, tenant, user_input(conversation.id, ASKED), reply(), static_hash)
    written = await connection.fetchval("SELECT pg_current_wal_lsn() - $1::pg_lsn", before)
    answer_ = reply()
    raw = answer_.end.raw_response if answer_.end is not None else None
    size = len(ASKED) + len(answer_.native.data) + len(raw or b"")
    return round(int(written) / ROUNDS), size


async def fill(store: PostgresStore, conversation: Conversation, turns: int) -> None:
    """So many turns of the usual size, written at once: how they got there does not matter here."""
    database = store._database  # noqa: SLF001  reason: a benchmark may look inside
    async with database.connection() as connection:
        await connection.execute(
            """
            INSERT INTO turns (conversation_id, seq, kind, state, blocks, native, dialect, provider, model, account,
                attempt, written_by_lease)
            SELECT $1, n, kind, 'complete',
                jsonb_build_array(jsonb_build_object('type', 'text', 'text', repeat('y', 800))), native,
                dialect, provider, 'm', 'a', attempt, gen_random_uuid()
            FROM generate_series(1, $4::bigint) AS n
            JOIN (VALUES (1, 'user_task', $2::bytea, 'strata', NULL, NULL::smallint),
                (0, 'model_response', $3::bytea, 'gemini', 'gemini', 1::smallint))
                AS form (rest, kind, native, dialect, provider, attempt) ON rest = n % 2
            """,
            decode_id(CONVERSATION, conversation.id),
            encode_blocks([TextBlock(text=ASKED)]),
            reply().native.data,
            turns,
        )
        await connection.execute(
            "UPDATE conversations SET next_seq = $2 WHERE id = $1", decode_id(CONVERSATION, conversation.id), turns + 1
        )


async def keep_buffer_small(store: PostgresStore, conversation: Conversation) -> None:
    """What the compactor does in the background, without its cost."""
    async with store._database.connection() as connection:  # noqa: SLF001  reason: a benchmark may look inside
        await connection.execute(
            "UPDATE conversations SET buffer_start_seq = greatest(1, next_seq - $2) WHERE id = $1",
            decode_id(CONVERSATION, conversation.id),
            BUFFERED,
        )


async def measure(database_url: str, *, quick: bool) -> list[Figure]:
    options = DatabaseOptions(url=database_url)
    database = Database(options)
    connection = await connect(options)
    figures: list[Figure] = []
    try:
        await connection.execute(FLOOR_TABLES)
        tenant = await PostgresKeyRing(database).create_tenant(str(uuid4()))
        store = PostgresStore(database)
        for turns in QUICK_LENGTHS if quick else LENGTHS:
            floor, ours = await compare(store, tenant, connection, turns, BLOCK if quick else ROUNDS)
            name, goal = f"store step: {turns:,} turns", Goal(of="ratio", limit=1.5)
            figures.append(Figure(name=name, unit="ms", values=ours, floor=floor, goal=goal))
        wal, size = await measure_wal(store, tenant, connection)
        name, goal = "store step: WAL, beside the bytes of the turn", Goal(of="ratio", limit=2.0)
        figures.append(Figure(name=name, unit="bytes", values=[wal], floor=[size], goal=goal))
    finally:
        await connection.close()
        await database.close()
    return figures


async def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the store's part of a turn.")
    parser.add_argument("--quick", action="store_true", help="a small run that shows only that it works")
    quick = parser.parse_args().quick
    pin()
    async with open_database() as database_url:
        print(render_table(await measure(database_url, quick=quick)))  # noqa: T201  reason: its output is its purpose


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
