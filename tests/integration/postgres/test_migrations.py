"""The schema comes from the migrations and from nothing else."""

import ast
import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import asyncpg
import pytest

from server.conversation.errors import MigrationFailed, SchemaAhead, SchemaBehind
from server.postgres.connections import DatabaseOptions, connect
from server.postgres.engine import Database
from server.postgres.migrations import (
    find_drift,
    migrate_down_one,
    migrate_up,
    read_schema_state,
    require_current_schema,
    write_revision,
)
from tests.support.database_source import with_database

REVISIONS = sorted((Path(__file__).parents[3] / "migrations" / "versions").glob("*.py"))


@pytest.fixture
async def empty(server_url: str, worker_id: str) -> AsyncIterator[DatabaseOptions]:
    """A database without any table."""
    name = f"strata_migrations_{worker_id}"
    connection = await asyncpg.connect(server_url)
    try:
        await connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
        await connection.execute(f'CREATE DATABASE "{name}"')
        yield DatabaseOptions(url=with_database(server_url, name))
        await connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')
    finally:
        await connection.close()


def copy_scripts(place: Path) -> Path:
    """A copy of all migrations, to which others can be added."""
    scripts = place / "migrations"
    (scripts / "versions").mkdir(parents=True)
    for path in (REVISIONS[0].parents[1] / "env.py", REVISIONS[0].parents[1] / "script.py.mako"):
        (scripts / path.name).write_bytes(path.read_bytes())
    for path in REVISIONS:
        (scripts / "versions" / path.name).write_bytes(path.read_bytes())
    return scripts


async def tables(options: DatabaseOptions) -> list[str]:
    connection = await connect(options)
    try:
        rows = await connection.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY 1")
    finally:
        await connection.close()
    return [row["tablename"] for row in rows if row["tablename"] != "alembic_version"]


async def test_an_empty_database_is_brought_to_the_head_and_equals_the_models(empty: DatabaseOptions) -> None:
    before = await read_schema_state(empty)
    assert (before.current, before.known, len(before.pending)) == (None, True, len(REVISIONS))
    after = await migrate_up(empty)
    assert (after.current, after.pending) == (before.head, ())
    assert await find_drift(empty) == []


async def test_every_step_goes_down_and_up_again_and_leaves_the_same(empty: DatabaseOptions) -> None:
    head = await migrate_up(empty)
    complete = await tables(empty)
    for _ in REVISIONS:
        await migrate_down_one(empty)
    assert await tables(empty) == []
    assert (await read_schema_state(empty)).current is None
    assert await migrate_up(empty) == head
    assert await tables(empty) == complete
    assert await find_drift(empty) == []


async def test_downgrading_an_empty_database_is_refused(empty: DatabaseOptions) -> None:
    with pytest.raises(MigrationFailed):
        await migrate_down_one(empty)


async def test_concurrent_migrations_act_as_one(empty: DatabaseOptions) -> None:
    states = await asyncio.gather(*(migrate_up(empty) for _ in range(4)))
    assert {state.current for state in states} == {states[0].head}
    assert await find_drift(empty) == []


CONCURRENT = """\
import sqlalchemy as sa
from alembic import op

revision = "20991231_01"
down_revision = {head!r}


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '4s'")
    with op.get_context().autocommit_block():
        op.execute("SET statement_timeout = 0")
        op.execute("DROP INDEX CONCURRENTLY IF EXISTS ix_turns_created_at")
        op.create_index("ix_turns_created_at", "turns", ["created_at"], postgresql_concurrently=True)
        op.execute("RESET statement_timeout")


def downgrade() -> None:
    pass
"""


async def test_an_index_is_created_concurrently_while_others_wait_to_migrate(
    empty: DatabaseOptions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`CREATE INDEX CONCURRENTLY` waits for every older transaction: a waiting migrator must not be one."""
    head = (await migrate_up(empty)).head
    scripts = copy_scripts(tmp_path)
    (scripts / "versions" / "2099-12-31_concurrent.py").write_text(CONCURRENT.format(head=head))
    monkeypatch.setattr("server.postgres.migrations.find_bundled", lambda _name: scripts)
    states = await asyncio.gather(*(migrate_up(empty) for _ in range(3)))
    assert {state.current for state in states} == {"20991231_01"}
    connection = await connect(empty)
    try:
        assert await connection.fetchval(
            "SELECT indisvalid FROM pg_index WHERE indexrelid::regclass::text ~ $1", "x_turns_cr"
        )
        held = await connection.fetchval(
            "SELECT count(*) FROM pg_locks JOIN pg_database d ON d.oid = database "
            "WHERE locktype = 'advisory' AND datname = current_database()"
        )
        assert held == 0
    finally:
        await connection.close()


async def test_a_difference_between_database_and_models_is_found(empty: DatabaseOptions) -> None:
    await migrate_up(empty)
    connection = await connect(empty)
    await connection.execute("ALTER TABLE turns ADD COLUMN surprise text; DROP INDEX ix_conversations_running")
    await connection.close()
    drift = " ".join(await find_drift(empty))
    assert "surprise" in drift
    assert "ix_conversations_running" in drift


async def test_an_older_and_a_newer_schema_are_distinguished(empty: DatabaseOptions) -> None:
    connection = await connect(empty)
    try:
        with pytest.raises(SchemaBehind, match="at revision none"):
            await require_current_schema(connection)
        await migrate_up(empty)
        await require_current_schema(connection)
        await connection.execute("UPDATE alembic_version SET version_num = '20991231_01'")
        with pytest.raises(SchemaAhead, match="20991231_01"):
            await require_current_schema(connection)
        for attempt in (migrate_up(empty), migrate_down_one(empty)):
            with pytest.raises(SchemaAhead):
                await attempt
    finally:
        await connection.close()


async def test_a_pool_refuses_a_wrong_schema_until_it_is_migrated(empty: DatabaseOptions) -> None:
    database = Database(replace(empty, pool_size=1), on_first_contact=require_current_schema)
    try:
        for _ in range(2):
            with pytest.raises(SchemaBehind):
                async with database.connection():
                    pytest.fail("it must not connect")
        await migrate_up(empty)
        async with database.connection() as connection:
            assert await connection.fetchval("SELECT count(*) FROM turns") == 0
    finally:
        await database.close()


async def test_a_migration_without_its_lock_gives_up_and_changes_nothing(empty: DatabaseOptions) -> None:
    await migrate_up(empty)
    before = await tables(empty)
    holder = await connect(empty)
    try:
        async with holder.transaction():
            await holder.execute(f"LOCK TABLE {', '.join(before)} IN EXCLUSIVE MODE")
            with pytest.raises(MigrationFailed, match="lock timeout"):
                await migrate_down_one(empty)
    finally:
        await holder.close()
    assert await tables(empty) == before


@pytest.mark.parametrize("path", REVISIONS, ids=lambda path: path.stem)
def test_a_revision_is_dated_and_limits_its_locks_and_statements(path: Path) -> None:
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}_[a-z_]+", path.stem)
    tree = ast.parse(path.read_text())
    steps = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert [step.name for step in steps][:2] == ["upgrade", "downgrade"]
    for step in steps[:2]:
        beginning = ast.unparse(step)[:400]
        assert "SET LOCAL lock_timeout" in beginning
        assert "SET LOCAL statement_timeout" in beginning


def test_a_new_revision_contains_the_rules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scripts = copy_scripts(tmp_path)
    monkeypatch.setattr("server.postgres.migrations.find_bundled", lambda _name: scripts)
    written = write_revision("Add Marks")
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}_add_marks\.py", written.name)
    source = written.read_text()
    compile(source, written.name, "exec")
    assert "SET LOCAL lock_timeout = '4s'" in source
    assert "usable by that release" in source
