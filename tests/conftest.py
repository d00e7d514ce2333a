"""Fixtures for all tests: a real Postgres, a database per worker, and the whole program on a free port.

The database is that of STRATA_TEST_DATABASE_URL, or a container if a Docker engine is available, or the embedded
Postgres. Its schema always comes from the migrations.
"""

import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import pytest
from hypothesis import HealthCheck, settings
from pydantic import SecretStr

from server.app.asgi import serving
from server.app.http_server import bind
from server.app.settings import Settings
from server.app.wiring import Program, open_program
from server.conversation.api_key import Scope, Tenant
from server.postgres.access.key_ring import PostgresKeyRing
from server.postgres.connections import DatabaseOptions
from server.postgres.embedded.service import open_embedded
from server.postgres.engine import Database
from server.postgres.migrations import migrate_up
from server.postgres.replay.conversations import make_replay_database
from server.postgres.replay.replays import PostgresReplays
from server.postgres.schema import metadata
from server.postgres.store import PostgresStore
from tests.support.database_source import find_server_url, with_database
from tests.support.emulators import EmulatedProviders, Stages, open_stages
from tests.support.replay_builders import ReplayHarness

pytest_plugins = ["tests.support.fleets", "tests.support.loud_skips"]

# A real database is slower than the deadline of hypothesis, and fixtures are deliberately shared between examples.
settings.register_profile(
    "strata",
    deadline=None,
    max_examples=50,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("strata")

_EMPTY_ALL = "; ".join(str(table.delete()) for table in reversed(metadata.sorted_tables))


def pytest_xdist_auto_num_workers() -> int:
    """Two per core: tests mostly wait for processes, pauses and browsers."""
    return 2 * (os.cpu_count() or 1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of these tests."""
    parser.addoption("--shots", type=Path, metavar="DIR", help="pictures of the pages that are looked at, into DIR")


def pytest_configure() -> None:
    """Remove the STRATA_ variables of the environment, which must not reach the code under test."""
    for name in [name for name in os.environ if name.startswith("STRATA_") and name != "STRATA_TEST_DATABASE_URL"]:
        del os.environ[name]
    # Otherwise each of the many processes that tests start would compile the whole server again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # A shell without job control starts background commands with SIGINT ignored, and every process that they start
    # inherits it: a process that a test interrupts would continue.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def server_url(testrun_uid: str) -> Iterator[str]:
    """A Postgres server on which databases may be created: one for the whole run, shared by all workers."""
    url = find_server_url(testrun_uid)
    if url is not None:
        yield url
        return
    # Not the temporary directory of pytest: the account that Postgres runs under for root cannot enter it.
    data_dir = Path(tempfile.gettempdir()) / f"strata-tests-{testrun_uid[:12]}"
    with open_embedded(data_dir, extra_settings={"fsync": "off", "max_connections": "200"}) as embedded:
        yield embedded.url
    # The last worker to finish finds that Postgres has stopped.
    if not (data_dir / "postgres" / "postmaster.pid").exists():
        shutil.rmtree(data_dir, ignore_errors=True)


@pytest.fixture(scope="session")
async def database_options(server_url: str, worker_id: str) -> DatabaseOptions:
    """A database for this worker, migrated from empty."""
    name = f"strata_test_{worker_id}"
    connection = await asyncpg.connect(server_url)
    try:
        await connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
        await connection.execute(f'CREATE DATABASE "{name}"')
    finally:
        await connection.close()
    options = DatabaseOptions(url=with_database(server_url, name), application_name="strata-tests")
    await migrate_up(options)
    return options


@pytest.fixture(scope="session")
async def session_database(database_options: DatabaseOptions) -> AsyncIterator[Database]:
    database = Database(database_options)
    yield database
    await database.close()


@pytest.fixture
async def database(session_database: Database) -> Database:
    """The database of the worker without any row. Deleting from empty tables takes a millisecond; truncating takes
    fifty.
    """
    async with session_database.connection() as connection:
        await connection.execute(_EMPTY_ALL)
    return session_database


@pytest.fixture(scope="session")
async def session_replay_store(session_database: Database) -> AsyncIterator[Database]:
    replay_store = make_replay_database(session_database)
    yield replay_store
    await replay_store.close()


@pytest.fixture
def replay_store(database: Database, session_replay_store: Database) -> Database:  # noqa: ARG001  reason: emptied before
    """The replay conversations, without any row."""
    return session_replay_store


@pytest.fixture
def store(database: Database) -> PostgresStore:
    return PostgresStore(database)


@pytest.fixture
def key_ring(database: Database) -> PostgresKeyRing:
    return PostgresKeyRing(database)


@pytest.fixture
async def tenant(key_ring: PostgresKeyRing) -> Tenant:
    return await key_ring.create_tenant("acme")


@pytest.fixture
def harness(database: Database, replay_store: Database, store: PostgresStore, tenant: Tenant) -> ReplayHarness:
    """Replays of one tenant."""
    return ReplayHarness(
        database=database,
        replay_store=replay_store,
        store=store,
        replays=PostgresReplays(database, replay_store),
        tenant=tenant,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StrataServer:
    """The whole program, served on a free port."""

    url: str
    program: Program
    key_ring: PostgresKeyRing
    tenant: Tenant
    client_key: str
    admin_key: str


@pytest.fixture
def server_settings(database_options: DatabaseOptions, tmp_path: Path) -> Settings:
    return Settings(
        database_url=SecretStr(database_options.url),
        data_dir=tmp_path,
        port=0,
        shutdown_limit_seconds=5,
        # In tests of turns no job may change the conversations; tests of jobs switch the worker on.
        worker_inside=False,
        log_format="json",
    )


@pytest.fixture(scope="session")
async def stages() -> AsyncIterator[Stages]:
    async with open_stages() as opened:
        yield opened


@pytest.fixture
def emulated(stages: Stages) -> EmulatedProviders:
    """Both providers, strict, at full speed."""
    return stages.play()


@pytest.fixture
async def strata_server(
    database: Database,  # noqa: ARG001  reason: emptied before the server starts
    server_settings: Settings,
    emulated: EmulatedProviders,
) -> AsyncIterator[StrataServer]:
    async with (
        emulated.open(server_settings) as providers,
        open_program(emulated.point(server_settings), providers=providers) as program,
    ):
        tenant = await program.key_ring.create_tenant("acme")
        client_key, admin_key = await keys_of(program, tenant)
        async with serving(program, bind("127.0.0.1", 0)) as url:
            yield StrataServer(
                url=url,
                program=program,
                key_ring=program.key_ring,
                tenant=tenant,
                client_key=client_key,
                admin_key=admin_key,
            )


async def keys_of(program: Program, tenant: Tenant) -> list[str]:
    """A key for clients and one for operators."""
    return [
        (
            await program.key_ring.create_key(
                tenant_id=tenant.id, name=scope, scopes=frozenset({scope}), expires_at=None
            )
        )[1]
        for scope in (Scope.CLIENT, Scope.ADMIN)
    ]
