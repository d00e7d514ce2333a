"""Several hosts: a primary and a streaming standby that replaces it.

Commits wait for the standby here, so everything that was acknowledged has to be present after any failover.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import httpx2
import pytest
from pydantic import SecretStr

from server.app.asgi import serving
from server.app.http_server import bind
from server.app.settings import Settings
from server.app.wiring import open_program
from server.conversation.api_key import Scope
from server.conversation.errors import DatabaseUnavailable
from server.postgres.access.key_ring import PostgresKeyRing
from server.postgres.connections import DatabaseOptions
from server.postgres.engine import Database, Statement
from server.postgres.migrations import migrate_up
from server.postgres.store import PostgresStore
from tests.support.builders import accept, answer, create_conversation, take_exchange, user_input
from tests.support.external_postgres import PASSWORD, USER, Cluster, Site, come_true, open_site
from tests.support.wire_proxy import open_proxy

Result = TypeVar("Result")

BOUND_SECONDS = 8.0
"""A failover ends within this time after the promotion, with room for a slow machine."""
PORT = Statement("SELECT inet_server_port() AS port")
READ_WRITE = ("", "?target_session_attrs=read-write", "?target_session_attrs=primary")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A primary, its standby, and a migrated database on both."""

    primary: Cluster
    standby: Cluster

    def options(self, query: str = "", *ports: int) -> DatabaseOptions:
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports or (self.primary.port, self.standby.port))
        return DatabaseOptions(
            url=f"postgresql://{USER}:{PASSWORD}@{hosts}/strata{query}",
            connect_seconds=2.0,
            statement_seconds=1.0,
            pool_wait_seconds=3.0,
        )

    async def promote(self) -> None:
        assert await self.standby.fetch("SELECT pg_promote(true)")


async def open_pair(site: Site) -> Pair:
    primary = site.primary()
    await primary.fetch("CREATE DATABASE strata")
    await migrate_up(DatabaseOptions(url=primary.url("strata")))
    standby = site.standby(primary)
    # Not earlier: a commit would wait for a missing standby, and the standby would copy the setting.
    await primary.fetch("ALTER SYSTEM SET synchronous_standby_names = '*'")
    await primary.fetch("SELECT pg_reload_conf()")

    async def in_step() -> bool:
        standbys = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'"
        return bool(await primary.fetch(standbys) == 1)

    await come_true(in_step)
    return Pair(primary=primary, standby=standby)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with open_site() as site:
        yield site


@pytest.fixture(scope="module")
async def lasting_pair(site: Site) -> Pair:
    """For tests that only read."""
    return await open_pair(site)


@pytest.fixture
async def pair(site: Site) -> AsyncIterator[Pair]:
    """For tests that break it."""
    pair = await open_pair(site)
    yield pair
    pair.primary.stop()
    pair.standby.stop()


async def port_of(database: Database) -> int:
    [row] = await database.run(PORT)
    port: int = row["port"]
    return port


class TestChoice:
    @pytest.mark.parametrize("query", READ_WRITE)
    async def test_the_host_that_accepts_writes_is_used_at_any_position(self, lasting_pair: Pair, query: str) -> None:
        primary, standby = lasting_pair.primary.port, lasting_pair.standby.port
        for ports in ((primary, standby), (standby, primary)):
            database = Database(lasting_pair.options(query, *ports))
            assert await port_of(database) == primary
            await database.close()

    async def test_hosts_may_be_in_the_query(self, lasting_pair: Pair) -> None:
        primary, standby = lasting_pair.primary.port, lasting_pair.standby.port
        url = f"postgresql://{USER}:{PASSWORD}@/strata?host=127.0.0.1,127.0.0.1&port={standby},{primary}"
        database = Database(DatabaseOptions(url=url))
        assert await port_of(database) == primary
        await database.close()

    async def test_any_host_is_used_if_any_is_allowed(self, lasting_pair: Pair) -> None:
        standby = lasting_pair.standby.port
        database = Database(lasting_pair.options("?target_session_attrs=any", standby, lasting_pair.primary.port))
        assert await port_of(database) == standby
        with pytest.raises(DatabaseUnavailable, match=r"The database has become read-only\."):
            await PostgresKeyRing(database).create_tenant("nowhere")
        await database.close()

    async def test_standbys_alone_are_reported_as_read_only(self, lasting_pair: Pair) -> None:
        dead_and_standby = lasting_pair.options("", 1, lasting_pair.standby.port)
        database = Database(dead_and_standby)
        with pytest.raises(DatabaseUnavailable, match=r"None of the database hosts takes writes\."):
            await database.run(PORT)
        await database.close()

    async def test_a_silent_host_costs_its_share_of_the_time_once(self, lasting_pair: Pair) -> None:
        """A machine without power refuses no connection; it just does not answer."""
        primary = lasting_pair.primary
        async with open_proxy(primary.url("strata")) as silent:
            silent.swallow()
            database = Database(lasting_pair.options("?sslmode=disable", silent.port, primary.port))
            began = time.monotonic()
            assert await port_of(database) == primary.port
            assert time.monotonic() - began < database.options.connect_seconds
            ports = await asyncio.gather(*(port_of(database) for _ in range(5)))
            assert ports == [primary.port] * 5
            assert silent.connections_made == 1
            await database.close()


class TestFailover:
    @pytest.mark.parametrize("query", READ_WRITE[:2])
    async def test_the_store_continues_and_nothing_that_was_acknowledged_is_missing(
        self, pair: Pair, query: str
    ) -> None:
        database = Database(pair.options(query))
        store = PostgresStore(database)
        tenant = await PostgresKeyRing(database).create_tenant("acme")
        conversations = [await create_conversation(store, tenant.id) for _ in range(4)]
        acknowledged = {conversation.id: 0 for conversation in conversations}
        stop = asyncio.Event()

        async def converse(conversation_id: str) -> None:
            while not stop.is_set():
                turn = user_input(conversation_id)
                accepted = await retry_write(lambda: accept(store, tenant.id, turn))  # noqa: B023  reason: awaited at once
                await retry_write(lambda: store.finish_turn(accepted.lease, answer()))  # noqa: B023  reason: awaited at once
                acknowledged[conversation_id] += 2

        async def retry_write(step: Callable[[], Awaitable[Result]]) -> Result:
            while True:
                try:
                    return await step()
                except DatabaseUnavailable:
                    await asyncio.sleep(0.02)

        running = asyncio.gather(*(converse(conversation.id) for conversation in conversations))
        await come_true(lambda: min(acknowledged.values()) >= 10)
        pair.primary.kill()
        await pair.promote()
        before = dict(acknowledged)
        await come_true(lambda: all(acknowledged[key] > before[key] for key in before), BOUND_SECONDS)
        stop.set()
        await running
        assert await port_of(database) == pair.standby.port
        for conversation_id, count in acknowledged.items():
            after = await store.load_conversation(tenant.id, conversation_id)
            assert (after.revision, after.next_seq) == (count, count + 1)
        await database.close()

    async def test_a_running_server_reports_it_and_recovers(self, pair: Pair, tmp_path: Path) -> None:
        settings = Settings(
            database_url=SecretStr(pair.options().url),
            database_connect_seconds=2,
            database_statement_seconds=1,
            data_dir=tmp_path,
            shutdown_limit_seconds=1,
        )
        async with (
            open_program(settings) as program,
            serving(program, bind("127.0.0.1", 0)) as url,
            httpx2.AsyncClient(base_url=url, timeout=30) as client,
        ):
            tenant = await program.key_ring.create_tenant("acme")
            _, key_text = await program.key_ring.create_key(
                tenant_id=tenant.id, name="client", scopes=frozenset({Scope.CLIENT}), expires_at=None
            )

            async def ready() -> bool:
                return (await client.get("/readyz")).status_code == 200

            assert await ready()
            pair.primary.kill()
            unready = await client.get("/readyz")
            assert (unready.status_code, unready.json()["code"]) == (503, "database_unavailable")
            assert unready.json()["detail"] == "None of the database hosts takes writes."
            assert (await client.get("/healthz")).status_code == 200
            await pair.promote()
            await come_true(ready, BOUND_SECONDS)
            known = await client.get("/v1/key", headers={"authorization": f"Bearer {key_text}"})
            assert known.status_code == 200

    async def test_the_store_leaves_a_primary_that_was_demoted_during_its_connections(self, pair: Pair) -> None:
        database = Database(pair.options())
        store = PostgresStore(database)
        tenant = await PostgresKeyRing(database).create_tenant("acme")
        conversation = await create_conversation(store, tenant.id)
        await take_exchange(store, tenant.id, conversation.id)
        assert await port_of(database) == pair.primary.port
        await pair.promote()
        await pair.primary.fetch("ALTER SYSTEM SET default_transaction_read_only = on")
        await pair.primary.fetch("SELECT pg_reload_conf()")

        async def demoted() -> bool:
            return bool(await pair.primary.fetch("SHOW default_transaction_read_only") == "on")

        await come_true(demoted)
        accepted = await accept(store, tenant.id, user_input(conversation.id))
        assert accepted.seq == 3
        assert await port_of(database) == pair.standby.port
        await database.close()

    async def test_the_store_leaves_a_silent_primary(self, pair: Pair) -> None:
        """A machine without power, as its connected clients observe it."""
        async with open_proxy(pair.primary.url("strata")) as proxy:
            database = Database(replace(pair.options("?sslmode=disable", proxy.port, pair.standby.port)))
            store = PostgresStore(database)
            tenant = await PostgresKeyRing(database).create_tenant("acme")
            conversation = await create_conversation(store, tenant.id)
            await take_exchange(store, tenant.id, conversation.id)
            proxy.swallow()
            await pair.promote()
            began = time.monotonic()
            turn = user_input(conversation.id)
            with pytest.raises(DatabaseUnavailable, match=r"The database does not answer in time\."):
                await store.accept_turn(tenant.id, turn)
            assert (await accept(store, tenant.id, turn)).seq == 3
            assert time.monotonic() - began < BOUND_SECONDS
            assert await port_of(database) == pair.standby.port
            await database.close()
