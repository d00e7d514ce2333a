# ruff: noqa: SLF001  # reason: it looks at the statements themselves
"""The request path finds its rows by key from the first row on.

A plan is made once per connection and kept; one that reads a whole table because the table happens to be small would
continue to do so while it grows. The index is checked in a new database: in one whose indexes are bloated by thousands
of deleted rows, PostgreSQL 18 may reach a row by another index that contains its id.
"""

import re
from collections.abc import AsyncIterator, Sequence

import asyncpg
import pytest

from server.postgres.access import key_ring, rate_limit
from server.postgres.compaction import epochs
from server.postgres.compaction import lengths as conversation_lengths
from server.postgres.connections import DatabaseOptions
from server.postgres.conversation import conversations
from server.postgres.engine import Database, Statement
from server.postgres.inspection import assistants as assistant_inspection
from server.postgres.inspection import conversation_list as inspection_list
from server.postgres.inspection import search_index as indexing
from server.postgres.inspection import timelines as inspection
from server.postgres.migrations import migrate_up
from server.postgres.payload import loading
from server.postgres.turns import accept as accepting
from server.postgres.turns import leases, reading
from server.postgres.turns import queue as queueing
from server.postgres.turns import running as finishing
from tests.support.database_source import with_database

BY_KEY = {
    "accept": accepting._ACCEPT,
    "accept with images": accepting._ACCEPT_WITH_BLOBS,
    "find duplicate": accepting._FIND,
    "enter queue": queueing._ENTER,
    "keep ticket": queueing._KEEP,
    "leave queue": queueing._LEAVE,
    "load": loading._LOAD,
    "load past": loading._LOAD_PAST,
    "begin call": finishing._BEGIN_CALL,
    "end call": finishing._END_CALL,
    "append chunks": finishing._APPEND_CHUNKS,
    "finish": finishing._FINISH,
    "finish without call": finishing._FINISH_WITHOUT_CALL,
    "request cancel": leases._REQUEST_CANCEL,
    "load conversation": conversations._LOAD,
    "begin epoch": epochs._BEGIN_EPOCH,
    "take over": leases._TAKE_OVER,
    "find expired": leases._FIND_EXPIRED,
    "load turn": reading._TURN,
    "list turns": reading._OLDEST_TURNS,
    "list newest turns": reading._NEWEST_TURNS,
    "list chunks": reading._CHUNKS,
    "find key": key_ring.FIND_LIVE_KEY,
    "reserve requests": rate_limit._RESERVE,
}
OWN_KEYS = re.compile(r"pk_\w+|ix_turns_conversation_id_idempotency_key|ix_conversations_running")
"""The last one is by id as well, among the running conversations."""


@pytest.fixture(scope="module")
async def new_database(server_url: str, worker_id: str) -> AsyncIterator[Database]:
    name = f"strata_plans_{worker_id}"
    connection = await asyncpg.connect(server_url)
    try:
        await connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
        await connection.execute(f'CREATE DATABASE "{name}"')
        options = DatabaseOptions(url=with_database(server_url, name))
        await migrate_up(options)
        database = Database(options)
        yield database
        await database.close()
        await connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')
    finally:
        await connection.close()


@pytest.mark.parametrize("name", BY_KEY)
async def test_a_statement_of_the_request_path_reads_no_whole_table(database: Database, name: str) -> None:
    assert "Seq Scan" not in await explain(database, BY_KEY[name])


@pytest.mark.parametrize("name", BY_KEY)
async def test_a_statement_of_the_request_path_finds_its_rows_by_key(new_database: Database, name: str) -> None:
    plan = await explain(new_database, BY_KEY[name])
    assert "Seq Scan" not in plan
    indexes = re.findall(r"Index (?:Only )?Scan (?:Backward )?using (\w+)|Bitmap Index Scan on (\w+)", plan)
    used = {first or second for first, second in indexes}
    assert used
    assert all(OWN_KEYS.fullmatch(index) for index in used), used


async def test_the_length_of_conversations_is_read_from_the_newest_by_index(new_database: Database) -> None:
    plan = await explain(new_database, conversation_lengths._TYPICAL)
    assert "Index Cond: ((tenant_id = $1) AND (assistant_id = $2) AND (id < $3))" in plan
    # In the order of the index, so that the limit ends the scan.
    assert "Sort" not in plan
    assert "Limit" in plan


INSPECTED = {
    "timeline head": inspection._HEAD,
    "timeline turns": inspection._TURNS,
    "timeline sizes": inspection._SIZES,
    "timeline epochs": inspection._MARKS,
    "the call before a part": inspection._EARLIER,
    "timeline calls": inspection._OUTLINES,
    "background calls": inspection._BACKGROUND,
    "one call": inspection._CALL,
    "the call before": inspection._PREVIOUS,
    "the call after": inspection._NEXT,
    "assistants": assistant_inspection._LIST_ONE,
    "assistants of all": assistant_inspection._LIST_ALL,
    "one assistant": assistant_inspection._LOAD,
    "versions of an assistant": assistant_inspection._VERSIONS,
    "conversations by version": assistant_inspection._COUNT_BY_VERSION,
    "turns to count": indexing._TURNS,
    "calls to count": indexing._CALLS,
    "hold": indexing._HOLD,
    "lock": indexing._LOCK,
    "walk": indexing._WALK,
}


@pytest.mark.parametrize("name", INSPECTED)
async def test_a_view_of_operators_finds_its_rows_by_key(new_database: Database, name: str) -> None:
    plan = await explain(new_database, INSPECTED[name])
    # There are few tenants and assistants, and a plan for an empty table may read it whole.
    assert set(re.findall(r"Seq Scan on (\w+)", plan)) <= {"tenants"}, plan


@pytest.mark.parametrize("statement", [inspection_list._SCAN_ONE, inspection_list._SCAN_ALL], ids=["one", "all"])
async def test_a_list_reads_from_the_newest_and_its_window_ends_the_scan(
    new_database: Database, statement: Statement
) -> None:
    plan = await explain(new_database, statement)
    assert re.search(r"Limit.*\n\s+->  Index Scan using ix_conversation_facts_(tenant_)?activity", plan), plan
    assert "Index Cond" in plan
    assert not set(re.findall(r"Seq Scan on (\w+)", plan)) & {"conversation_facts", "turn_texts", "turns"}, plan
    # Texts are searched one conversation at a time.
    assert "pk_turn_texts" in plan


async def test_words_and_labels_are_found_by_index_up_to_a_cap(new_database: Database) -> None:
    words = await explain(new_database, inspection_list._WITH_WORDS)
    assert "Bitmap Index Scan on ix_turn_texts_tsv" in words, words
    labels = await explain(new_database, inspection_list._WITH_LABELS)
    assert "Bitmap Index Scan on ix_conversation_facts_labels" in labels, labels
    assert labels.startswith("Limit")
    among = await explain(new_database, inspection_list._AMONG)
    assert not set(re.findall(r"Seq Scan on (\w+)", among)) & {"conversation_facts", "turn_texts", "turns"}, among


async def explain(database: Database, statement: Statement, *, without: Sequence[str] = ()) -> str:
    """The plan that is kept, with placeholders for values.

    The tables are nearly empty, and for a few rows any plan is cheap. `without` are kinds of steps that a long table
    would not have: they are made so expensive that only a statement that needs them has them.
    """
    count = max(int(place) for place in re.findall(r"\$(\d+)", statement.sql))
    nulls = ", ".join(["NULL"] * count)
    async with database.connection() as connection, connection.transaction():
        for kind in without:
            await connection.execute(f"SET LOCAL enable_{kind} = off")
        await connection.execute(f"PREPARE looked_at AS {statement.sql}")
        try:
            rows = await connection.fetch(f"EXPLAIN EXECUTE looked_at({nulls})")
        finally:
            await connection.execute("DEALLOCATE looked_at")
    return "\n".join(row[0] for row in rows)
