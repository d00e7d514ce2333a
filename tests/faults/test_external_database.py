"""An external database that is unavailable, fails, or stops answering: the server reports it, continues, and recovers.

A proxy between the two breaks connections on request. Everything else is real.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg
import httpx2
import pytest
from pydantic import SecretStr

from server.app.asgi import serving
from server.app.http_server import bind
from server.app.settings import Settings
from server.app.wiring import open_program
from server.conversation.api_key import Scope, Tenant
from server.conversation.call import Chunk
from server.conversation.conversation import ConversationState
from server.conversation.errors import DatabaseUnavailable, SchemaAhead, SchemaBehind, StrataError
from server.postgres.access.key_ring import PostgresKeyRing
from server.postgres.connections import DatabaseOptions
from server.postgres.engine import Database, Statement
from server.postgres.migrations import migrate_up
from server.postgres.store import PostgresStore
from tests.support.builders import LEASE_SECONDS, accept, answer, call_end, call_start, create_conversation, user_input
from tests.support.database_source import with_database
from tests.support.external_postgres import come_true
from tests.support.wire_proxy import Loss, WireProxy, open_proxy

ASK = Statement("SELECT 1 AS one")
SLEEP = Statement("SELECT pg_sleep(:seconds)")
PATIENT_SECONDS = 30.0  # If the database answers, a slow machine does not exceed this.
BRIEF_SECONDS = 1.5  # If it is silent, the test waits for this limit.
BOUND_SECONDS = 12.0  # The total of the brief limits of an operation, with room for a slow machine.


@pytest.fixture
async def proxy(database: Database) -> AsyncIterator[WireProxy]:
    async with open_proxy(database.options.url) as proxy:
        yield proxy


@pytest.fixture
async def far(proxy: WireProxy) -> AsyncIterator[Database]:
    """The database through the proxy."""
    far = Database(DatabaseOptions(url=proxy.url(), connect_seconds=PATIENT_SECONDS, statement_seconds=PATIENT_SECONDS))
    yield far
    await far.close()


@pytest.fixture
def far_store(far: Database) -> PostgresStore:
    return PostgresStore(far)


@pytest.fixture
async def key_text(key_ring: PostgresKeyRing, tenant: Tenant) -> str:
    _, text = await key_ring.create_key(
        tenant_id=tenant.id, name="client", scopes=frozenset({Scope.CLIENT}), expires_at=None
    )
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A running server, used over HTTP."""

    client: httpx2.AsyncClient
    key_text: str

    async def ask(self, path: str) -> tuple[int, dict[str, Any]]:
        headers = {"authorization": f"Bearer {self.key_text}"} if path.startswith("/v1") else {}
        response = await self.client.get(path, headers=headers)
        body: dict[str, Any] = response.json()
        return response.status_code, body

    async def expect_unready(self, code: str) -> None:
        """The process is alive, and reports why it cannot serve."""
        assert (await self.ask("/healthz"))[0] == 200
        began = time.monotonic()
        status, body = await self.ask("/readyz")
        assert (status, body["code"]) == (503, code)
        assert [check["code"] for check in body["checks"]] == [code]
        assert body["checks"][0]["detail"] == body["detail"] != ""
        status, body = await self.ask("/v1/key")
        assert (status, body["code"]) == (503, code)
        assert time.monotonic() - began < 2 * BOUND_SECONDS

    async def expect_ready(self) -> None:
        """Within a limit, and without any help."""

        async def ready() -> bool:
            return (await self.ask("/readyz"))[0] == 200

        await come_true(ready, BOUND_SECONDS)


@asynccontextmanager
async def open_server(
    url: str, key_text: str, data_dir: Path, *, limit_seconds: float = PATIENT_SECONDS
) -> AsyncIterator[Served]:
    settings = Settings(
        database_url=SecretStr(url),
        database_connect_seconds=limit_seconds,
        database_statement_seconds=limit_seconds,
        database_pool_wait_seconds=limit_seconds,
        data_dir=data_dir,
        shutdown_limit_seconds=1,
    )
    async with (
        open_program(settings) as program,
        serving(program, bind("127.0.0.1", 0)) as base_url,
        httpx2.AsyncClient(base_url=base_url, timeout=30) as client,
    ):
        yield Served(client=client, key_text=key_text)


class TestServer:
    async def test_it_starts_without_a_database_and_serves_when_one_is_available(
        self, proxy: WireProxy, key_text: str, tmp_path: Path
    ) -> None:
        await proxy.refuse()
        async with open_server(proxy.url(), key_text, tmp_path) as served:
            await served.expect_unready("database_unavailable")
            await proxy.accept()
            await served.expect_ready()
            assert (await served.ask("/v1/key"))[0] == 200

    async def test_it_survives_a_loss_of_the_database_and_recovers(
        self, proxy: WireProxy, key_text: str, tmp_path: Path
    ) -> None:
        async with open_server(proxy.url(), key_text, tmp_path) as served:
            for _ in range(2):
                await served.expect_ready()
                await proxy.lose_database()
                await served.expect_unready("database_unavailable")
                await proxy.accept()
            await served.expect_ready()
            assert (await served.ask("/v1/key"))[0] == 200

    async def test_it_survives_a_silent_database_and_recovers(
        self, proxy: WireProxy, key_text: str, tmp_path: Path
    ) -> None:
        proxy.swallow()
        async with open_server(proxy.url(), key_text, tmp_path, limit_seconds=BRIEF_SECONDS) as served:
            await served.expect_unready("database_unavailable")
            proxy.flow()
            await served.expect_ready()
            proxy.swallow()
            await served.expect_unready("database_unavailable")
            proxy.flow()
            await served.expect_ready()
            assert (await served.ask("/v1/key"))[0] == 200

    async def test_it_stops_properly_while_the_database_is_silent(
        self, proxy: WireProxy, key_text: str, tmp_path: Path
    ) -> None:
        async with open_server(proxy.url(), key_text, tmp_path, limit_seconds=BRIEF_SECONDS) as served:
            await served.expect_ready()
            proxy.swallow()
            began = time.monotonic()
        assert time.monotonic() - began < BOUND_SECONDS


class TestSchema:
    @pytest.fixture
    async def empty(self, server_url: str, worker_id: str) -> AsyncIterator[DatabaseOptions]:
        name = f"strata_empty_{worker_id}"
        await execute(server_url, f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
        await execute(server_url, f'CREATE DATABASE "{name}"')
        yield DatabaseOptions(url=with_database(server_url, name))
        await execute(server_url, f'DROP DATABASE "{name}" WITH (FORCE)')

    @staticmethod
    async def _become_newer(options: DatabaseOptions) -> None:
        await execute(options.url, "CREATE TABLE alembic_version (version_num text PRIMARY KEY)")
        await execute(options.url, "INSERT INTO alembic_version VALUES ('29991231_01')")

    async def test_a_server_does_not_start_on_an_older_schema(self, empty: DatabaseOptions, tmp_path: Path) -> None:
        with pytest.raises(SchemaBehind, match="revision none"):
            await open_server(empty.url, "", tmp_path).__aenter__()

    async def test_a_server_does_not_start_on_a_newer_schema(self, empty: DatabaseOptions, tmp_path: Path) -> None:
        await self._become_newer(empty)
        with pytest.raises(SchemaAhead, match="revision 29991231_01"):
            await open_server(empty.url, "", tmp_path).__aenter__()

    async def test_a_running_server_that_finds_an_older_schema_waits_for_its_migration(
        self, empty: DatabaseOptions, key_text: str, tmp_path: Path
    ) -> None:
        async with open_proxy(empty.url) as proxy:
            await proxy.refuse()
            async with open_server(proxy.url(), key_text, tmp_path) as served:
                await served.expect_unready("database_unavailable")
                await proxy.accept()
                await served.expect_unready("schema_behind")
                await migrate_up(empty)
                await served.expect_ready()
                assert (await served.ask("/v1/key"))[0] == 401

    async def test_a_running_server_that_finds_a_newer_schema_does_not_serve(
        self, empty: DatabaseOptions, key_text: str, tmp_path: Path
    ) -> None:
        await self._become_newer(empty)
        async with open_proxy(empty.url) as proxy:
            await proxy.refuse()
            async with open_server(proxy.url(), key_text, tmp_path) as served:
                await served.expect_unready("database_unavailable")
                await proxy.accept()
                await served.expect_unready("schema_ahead")


class TestLostConnections:
    async def test_idle_connections_that_were_cut_cause_no_error(self, far: Database, proxy: WireProxy) -> None:
        await asyncio.gather(*(far.run(SLEEP, seconds=0.05) for _ in range(5)))
        assert proxy.connections_made == 5
        for _ in range(3):
            proxy.cut()
            assert await asyncio.gather(*(far.run(ASK) for _ in range(5)))

    async def test_connections_that_are_about_to_end_cause_no_error(
        self, far: Database, proxy: WireProxy, database: Database
    ) -> None:
        """A stopping server announces it, and the connection ends a moment later."""
        await far.run(ASK)
        proxy.announce_end()
        await database.run(ASK)  # Time for the message to arrive.
        assert await far.run(ASK)
        assert proxy.connections_made == 2

    @pytest.mark.parametrize("loss", Loss)
    async def test_a_statement_that_loses_its_connection_is_repeated(
        self, far: Database, proxy: WireProxy, loss: Loss
    ) -> None:
        await far.run(ASK)
        proxy.loss = loss
        assert [row["one"] for row in await far.run(ASK)] == [1]
        assert (proxy.losses, proxy.connections_made) == (1, 2)

    async def test_a_statement_that_must_not_run_twice_is_not_repeated(
        self, far: Database, proxy: WireProxy, key_ring: PostgresKeyRing
    ) -> None:
        proxy.loss = Loss.ANSWER
        with pytest.raises(DatabaseUnavailable):
            await PostgresKeyRing(far).create_tenant("once")
        assert [tenant.name for tenant in await key_ring.list_tenants()] == ["once"]
        assert proxy.losses == 1

    async def test_one_loss_replaces_the_whole_pool(self, far: Database, proxy: WireProxy) -> None:
        await asyncio.gather(*(far.run(SLEEP, seconds=0.05) for _ in range(3)))
        proxy.loss = Loss.REQUEST
        await far.run(ASK)
        await asyncio.gather(*(far.run(SLEEP, seconds=0.05) for _ in range(3)))
        assert proxy.connections_made == 6

    async def test_a_block_that_loses_its_connection_fails_with_one_error(
        self, far: Database, proxy: WireProxy
    ) -> None:
        async def lose_it() -> None:
            async with far.transaction() as connection:
                proxy.cut()
                await connection.fetch("SELECT 1")

        with pytest.raises(DatabaseUnavailable):
            await lose_it()
        assert await far.run(ASK)
        assert far.pool_counts() == (1, 0)

    async def test_a_restart_under_load_loses_nothing_that_was_acknowledged(
        self, far_store: PostgresStore, store: PostgresStore, tenant: Tenant, proxy: WireProxy
    ) -> None:
        conversations = [await create_conversation(store, tenant.id) for _ in range(8)]
        finished = dict.fromkeys((conversation.id for conversation in conversations), 0)
        stop = asyncio.Event()

        async def converse(conversation_id: str) -> None:
            while not stop.is_set():
                accepted = await accept(far_store, tenant.id, user_input(conversation_id))
                await far_store.finish_turn(accepted.lease, answer())
                finished[conversation_id] += 1

        def all_went_on(before: dict[str, int]) -> bool:
            # By two: the answer that ends the first may have been sent before the cut.
            return running.done() or all(finished[key] >= count + 2 for key, count in before.items())

        running = asyncio.gather(*(converse(conversation.id) for conversation in conversations))
        for _ in range(10):
            proxy.cut()
            await come_true(partial(all_went_on, dict(finished)))
        stop.set()
        await running
        for conversation_id, count in finished.items():
            after = await store.load_conversation(tenant.id, conversation_id)
            assert (after.revision, after.next_seq) == (2 * count, 2 * count + 1)


class TestEffectOfOne:
    """The connection is lost in the middle of a write; the client cannot know whether the server has executed it."""

    @pytest.fixture(params=Loss)
    def loss(self, request: pytest.FixtureRequest) -> Loss:
        loss: Loss = request.param
        return loss

    async def test_accepting_and_finishing_a_turn(
        self, far_store: PostgresStore, store: PostgresStore, tenant: Tenant, proxy: WireProxy, loss: Loss
    ) -> None:
        conversation = await create_conversation(store, tenant.id)
        proxy.loss = loss
        turn = user_input(conversation.id, idempotency_key="k")
        accepted = await accept(far_store, tenant.id, turn)
        assert (accepted.seq, accepted.revision, accepted.lease.token) == (1, 1, turn.lease_token)
        assert len((await store.list_turns(tenant.id, conversation.id)).items) == 1
        proxy.loss = loss
        assert (await far_store.finish_turn(accepted.lease, answer())).revision == 2
        assert proxy.losses == 2
        assert [turn.seq for turn in (await store.list_turns(tenant.id, conversation.id)).items] == [1, 2]
        assert len(await store.list_calls(tenant.id, conversation.id, 2)) == 1
        after = await store.load_conversation(tenant.id, conversation.id)
        assert (after.state, after.revision, after.next_seq) == (ConversationState.IDLE, 2, 3)

    async def test_calls_and_chunks_of_a_running_turn(
        self, far_store: PostgresStore, store: PostgresStore, tenant: Tenant, proxy: WireProxy, loss: Loss
    ) -> None:
        conversation = await create_conversation(store, tenant.id)
        lease = (await accept(store, tenant.id, user_input(conversation.id))).lease
        chunks = [Chunk(attempt=1, offset=0, data=b"abc"), Chunk(attempt=1, offset=3, data=b"def")]
        steps: list[Callable[[], Awaitable[object]]] = [
            lambda: far_store.begin_call(lease, call_start()),
            lambda: far_store.append_chunks(lease, chunks, lease_seconds=LEASE_SECONDS),
        ]
        for step in steps:
            proxy.loss = loss
            await step()
        assert await store.list_chunks(tenant.id, conversation.id, 2, attempt=1) == chunks
        proxy.loss = loss
        await far_store.end_call(lease, call_start(), call_end(status=503))
        assert [call.end.status for call in await store.list_calls(tenant.id, conversation.id, 2) if call.end] == [503]
        assert proxy.losses == 3


class TestSilence:
    @pytest.fixture
    async def far(self, proxy: WireProxy) -> AsyncIterator[Database]:
        far = Database(DatabaseOptions(url=proxy.url(), connect_seconds=BRIEF_SECONDS, statement_seconds=BRIEF_SECONDS))
        yield far
        await far.close()

    async def _backends(self, far: Database) -> set[int]:
        backend = Statement("SELECT pg_backend_pid() AS pid, pg_sleep(0.05)")
        backends = {row["pid"] for [row] in await asyncio.gather(*(far.run(backend) for _ in range(3)))}
        assert len(backends) == 3
        return backends

    async def _gives_up(self, attempt: Awaitable[object]) -> StrataError:
        began = time.monotonic()
        with pytest.raises(DatabaseUnavailable) as caught:
            await attempt
        assert time.monotonic() - began < BOUND_SECONDS
        return caught.value

    async def test_a_statement_without_an_answer_times_out(self, far: Database, proxy: WireProxy) -> None:
        before = await self._backends(far)
        proxy.swallow()
        error = await self._gives_up(far.run(ASK))
        assert error.message == "The database does not answer in time."
        # The other connections of the pool are silent too: none of them may cost the next caller time.
        proxy.flow()
        assert (await self._backends(far)).isdisjoint(before)

    async def test_a_cancelled_caller_returns_at_once(self, far: Database, proxy: WireProxy) -> None:
        await far.run(ASK)
        proxy.swallow()
        waiting = asyncio.create_task(far.run(ASK))
        await come_true(lambda: far.pool_counts() == (1, 1))
        began = time.monotonic()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert time.monotonic() - began < BOUND_SECONDS
        proxy.flow()
        assert await far.run(ASK)
        assert far.pool_counts() == (1, 0)

    async def test_closing_ends(self, far: Database, proxy: WireProxy) -> None:
        await asyncio.gather(*(far.run(SLEEP, seconds=0.05) for _ in range(3)))
        proxy.swallow()
        began = time.monotonic()
        await far.close()
        assert time.monotonic() - began < BOUND_SECONDS
        assert (await self._gives_up(far.run(ASK))).message == "The connections to the database are closed."


async def execute(url: str, sql: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(sql)
    finally:
        await connection.close()
