# ruff: noqa: SLF001  # reason: it looks at the statements themselves
"""The request path finds its rows by key, in an empty database as in a full one.

A plan is made once per connection and kept; one that reads a table whole because the table happens to be small would go
on doing so while it grows.
"""

import re

import pytest

from server.postgres import accepting, conversations, finishing, key_ring, loading, reading
from server.postgres.engine import Database, Statement

BY_KEY = {
    "accept": accepting._ACCEPT,
    "accept with images": accepting._ACCEPT_WITH_BLOBS,
    "load": loading._LOAD,
    "begin call": finishing._BEGIN_CALL,
    "end call": finishing._END_CALL,
    "append chunks": finishing._APPEND_CHUNKS,
    "finish": finishing._FINISH,
    "load conversation": conversations._LOAD,
    "begin epoch": conversations._BEGIN_EPOCH,
    "take over": conversations._TAKE_OVER,
    "load turn": reading._TURN,
    "list turns": reading._OLDEST_TURNS,
    "list newest turns": reading._NEWEST_TURNS,
    "list chunks": reading._CHUNKS,
    "find key": key_ring._FIND_LIVE_KEY,
}
OWN_KEYS = re.compile(r"pk_\w+|ix_turns_conversation_id_idempotency_key|ix_conversations_running")
"""The last one is by id as well, of the conversations that run."""


@pytest.mark.parametrize("name", BY_KEY)
async def test_a_statement_of_the_request_path_finds_its_rows_by_key(database: Database, name: str) -> None:
    plan = await explain(database, BY_KEY[name])
    assert "Seq Scan" not in plan
    indexes = re.findall(r"Index (?:Only )?Scan (?:Backward )?using (\w+)|Bitmap Index Scan on (\w+)", plan)
    used = {first or second for first, second in indexes}
    assert used
    assert all(OWN_KEYS.fullmatch(index) for index in used), used


async def explain(database: Database, statement: Statement) -> str:
    """The plan that is kept, with placeholders for values."""
    count = max(int(place) for place in re.findall(r"\$(\d+)", statement.sql))
    nulls = ", ".join(["NULL"] * count)
    async with database.connection() as connection, connection.transaction():
        await connection.execute(f"PREPARE looked_at AS {statement.sql}")
        try:
            rows = await connection.fetch(f"EXPLAIN EXECUTE looked_at({nulls})")
        finally:
            await connection.execute("DEALLOCATE looked_at")
    return "\n".join(row[0] for row in rows)
