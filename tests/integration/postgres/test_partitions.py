"""The large tables are converted to hash partitions while they are in use, and the store works on them unchanged."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import asyncpg
import pytest

from server.conversation.api_key import Tenant
from server.conversation.call import Chunk
from server.conversation.errors import MigrationFailed
from server.postgres import partitions
from server.postgres.access.key_ring import PostgresKeyRing
from server.postgres.connections import DatabaseOptions
from server.postgres.engine import Database
from server.postgres.migrations import find_drift, migrate_down_one, migrate_up
from server.postgres.partitions import (
    PARTITIONED_TABLES,
    CopyProgress,
    abandon_partitioning,
    is_partitioned,
    partition_tables,
)
from server.postgres.schema import metadata
from server.postgres.store import PostgresStore
from tests.contracts.store_contract import StoreContract, other_tenant
from tests.support.builders import LEASE_SECONDS, accept, answer, call_start, create_conversation, user_input
from tests.support.database_source import with_database

__all__ = ["other_tenant"]

_CONTENT = "SELECT * FROM {0} ORDER BY conversation_id, {1}"
_ORDERS = {"turns": "seq", "calls": "turn_seq, attempt", "call_chunks": "turn_seq, attempt, byte_offset"}


class Interrupted(Exception):
    """Ends a conversion as a crash would."""


def _interrupt(_: CopyProgress) -> None:
    raise Interrupted


async def _create_database(server_url: str, name: str) -> DatabaseOptions:
    connection = await asyncpg.connect(server_url)
    try:
        await connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
        await connection.execute(f'CREATE DATABASE "{name}"')
    finally:
        await connection.close()
    options = DatabaseOptions(url=with_database(server_url, name))
    await migrate_up(options)
    return options


async def _drop_database(server_url: str, name: str) -> None:
    connection = await asyncpg.connect(server_url)
    try:
        await connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')
    finally:
        await connection.close()


@pytest.fixture(scope="module")
async def partitioned_options(server_url: str, worker_id: str) -> AsyncIterator[DatabaseOptions]:
    """A new database with partitions."""
    name = f"strata_partitioned_{worker_id}"
    options = await _create_database(server_url, name)
    assert await partition_tables(options, count=3, on_progress=lambda _: None) == list(PARTITIONED_TABLES)
    yield options
    await _drop_database(server_url, name)


@pytest.fixture
async def plain(server_url: str, worker_id: str) -> AsyncIterator[Database]:
    """A database of its own without partitions."""
    name = f"strata_plain_{worker_id}"
    database = Database(await _create_database(server_url, name))
    yield database
    await database.close()
    await _drop_database(server_url, name)


class TestPartitionedStore(StoreContract):
    """The contract of the store holds on partitions."""

    @pytest.fixture
    async def database(self, partitioned_options: DatabaseOptions) -> AsyncIterator[Database]:
        database = Database(partitioned_options)
        async with database.connection() as connection:
            await connection.execute("; ".join(str(table.delete()) for table in reversed(metadata.sorted_tables)))
        yield database
        await database.close()


async def test_partitions_are_no_difference_to_the_models(partitioned_options: DatabaseOptions) -> None:
    assert await find_drift(partitioned_options) == []
    assert await partition_tables(partitioned_options, count=5, on_progress=lambda _: None) == []


async def test_a_generic_plan_reads_one_partition(partitioned_options: DatabaseOptions) -> None:
    database = Database(partitioned_options)
    async with database.connection() as connection:
        await connection.execute("PREPARE wanted (uuid) AS SELECT native FROM turns WHERE conversation_id = $1")
        rows = await connection.fetch("EXPLAIN (ANALYZE) EXECUTE wanted ('018f0000-0000-7000-8000-000000000000')")
    await database.close()
    assert "Subplans Removed: 2" in "\n".join(row[0] for row in rows)


async def _contents(database: Database) -> dict[str, list[asyncpg.Record]]:
    async with database.connection() as connection:
        return {table: await connection.fetch(_CONTENT.format(table, order)) for table, order in _ORDERS.items()}


async def _fill(store: PostgresStore, tenant: Tenant, count: int) -> None:
    for number in range(count):
        conversation = await create_conversation(store, tenant.id)
        for _ in range(3):
            taken = await accept(store, tenant.id, user_input(conversation.id))
            await store.finish_turn(taken.lease, answer())
        if number % 2:
            # A turn that runs while the tables are converted.
            taken = await accept(store, tenant.id, user_input(conversation.id))
            await store.begin_call(taken.lease, call_start())
            await store.append_chunks(
                taken.lease, [Chunk(attempt=1, offset=0, data=b"abc")], lease_seconds=LEASE_SECONDS
            )


async def test_an_interrupted_conversion_continues_and_changes_no_row(plain: Database) -> None:
    store, tenant = PostgresStore(plain), await PostgresKeyRing(plain).create_tenant("acme")
    await _fill(store, tenant, 5)
    before = await _contents(plain)
    seen: list[CopyProgress] = []

    def interrupt(progress: CopyProgress) -> None:
        seen.append(progress)
        if len(seen) == 3:
            raise Interrupted

    with pytest.raises(Interrupted):
        await partition_tables(plain.options, count=4, on_progress=interrupt, batch_rows=4)
    with pytest.raises(MigrationFailed, match="copied to partitions: turns"):
        await migrate_down_one(plain.options)
    assert await partition_tables(plain.options, count=4, on_progress=seen.append, batch_rows=4) == [
        *PARTITIONED_TABLES
    ]
    assert [each.copied_rows for each in seen if each.table == "turns"][:5] == [4, 8, 12, 16, 20]
    assert await _contents(plain) == before
    assert await find_drift(plain.options) == []


async def test_an_abandoned_conversion_leaves_the_table_as_it_was(plain: Database) -> None:
    store, tenant = PostgresStore(plain), await PostgresKeyRing(plain).create_tenant("acme")
    await _fill(store, tenant, 2)
    before = await _contents(plain)

    with pytest.raises(Interrupted):
        await partition_tables(plain.options, count=2, on_progress=_interrupt, batch_rows=2)
    assert await abandon_partitioning(plain.options) == ["turns"]
    assert await abandon_partitioning(plain.options) == []
    assert await _contents(plain) == before
    await _fill(store, tenant, 1)
    async with plain.connection() as connection:
        assert not await is_partitioned(connection, "turns")


async def test_turns_are_taken_ended_and_erased_while_the_tables_are_converted(plain: Database) -> None:
    store, tenant = PostgresStore(plain), await PostgresKeyRing(plain).create_tenant("acme")
    await _fill(store, tenant, 20)
    done = asyncio.Event()
    kept: dict[str, int] = {}

    async def use(number: int) -> None:
        """Take turns; each third conversation is erased."""
        while not done.is_set():
            conversation = await create_conversation(store, tenant.id)
            for _ in range(2):
                taken = await accept(store, tenant.id, user_input(conversation.id))
                await store.begin_call(taken.lease, call_start())
                chunk = Chunk(attempt=1, offset=0, data=b"abc")
                await store.append_chunks(taken.lease, [chunk], lease_seconds=LEASE_SECONDS)
                await asyncio.sleep(0.01 * number)
                await store.finish_turn(taken.lease, answer(start=call_start()))
            kept[conversation.id] = 4
            if len(kept) % 3 == 0:
                await store.erase_conversation(tenant.id, conversation.id)
                kept[conversation.id] = 0

    async def convert() -> None:
        try:
            await partition_tables(plain.options, count=4, on_progress=lambda _: None, batch_rows=3)
        finally:
            await asyncio.sleep(0.2)
            done.set()

    await asyncio.gather(convert(), *(use(number) for number in range(4)))
    async with plain.connection() as connection:
        rows = await connection.fetch("SELECT conversation_id, count(*) FROM turns GROUP BY 1")
        unended = await connection.fetchval("SELECT count(*) FROM calls WHERE ended_at IS NULL")
        chunks = await connection.fetchval("SELECT count(*) FROM call_chunks")
        for table in PARTITIONED_TABLES:
            assert await is_partitioned(connection, table)
    assert len(kept) > 8
    assert len(rows) == 20 + sum(count > 0 for count in kept.values())
    assert sum(row["count"] for row in rows) == 20 * 6 + 10 + sum(kept.values())
    # Of the ten turns that run all the time.
    assert (unended, chunks) == (10, 10)


async def test_a_role_that_only_reads_and_writes_rows_can_be_served_throughout(plain: Database, worker_id: str) -> None:
    role = f"strata_app_{worker_id}"
    async with plain.connection() as connection:
        await connection.execute(f"DROP ROLE IF EXISTS {role}")
        await connection.execute(f"CREATE ROLE {role}")
        await connection.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {role}")
        await connection.execute(f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO {role}")
    tenant = await PostgresKeyRing(plain).create_tenant("acme")
    joined = "&" if "?" in plain.options.url else "?"
    served = Database(replace(plain.options, url=f"{plain.options.url}{joined}role={role}"))

    try:
        await _fill(PostgresStore(served), tenant, 2)
        with pytest.raises(Interrupted):
            await partition_tables(plain.options, count=2, on_progress=_interrupt, batch_rows=2)
        await _fill(PostgresStore(served), tenant, 2)
        await partition_tables(plain.options, count=2, on_progress=lambda _: None)
        await _fill(PostgresStore(served), tenant, 2)
    finally:
        await served.close()
        async with plain.connection() as connection:
            await connection.execute(f"DROP OWNED BY {role}")
            await connection.execute(f"DROP ROLE {role}")
    assert len((await _contents(plain))["turns"]) == 6 * 6 + 3


async def test_a_table_in_use_is_tried_again(plain: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "_LOCK_SECONDS", 0.05)
    monkeypatch.setattr(partitions, "_LOCK_PAUSE_SECONDS", 0.05)
    async with plain.connection() as connection:
        held = connection.transaction()
        await held.start()
        await connection.execute("SELECT FROM turns")
        converting = asyncio.create_task(partition_tables(plain.options, count=2, on_progress=lambda _: None))
        done, _ = await asyncio.wait({converting}, timeout=0.5)
        assert not done
        await held.rollback()
    assert await converting == list(PARTITIONED_TABLES)
