"""A primary and a streaming replica: reports read the replica, and the primary while the replica is gone."""

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pydantic import SecretStr

from server.app.settings import Settings
from server.app.wiring import open_program
from server.conversation.api_key import Tenant
from server.inspection.usage_report import UsageBy
from server.postgres import replica as replica_module
from server.postgres.access.key_ring import PostgresKeyRing
from server.postgres.connections import DatabaseOptions
from server.postgres.engine import Database, Statement
from server.postgres.inspection.inspector import PostgresInspector
from server.postgres.migrations import migrate_up
from server.postgres.replica import ReplicaDatabase, is_reachable
from server.postgres.store import PostgresStore
from tests.support.builders import create_conversation, take_exchange
from tests.support.external_postgres import Cluster, Site, come_true, open_site
from tests.support.strata_process import strata_here

PORT = Statement("SELECT inet_server_port() AS port")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A primary with some turns, and its replica."""

    primary: Cluster
    replica: Cluster
    tenant: Tenant
    conversation_id: str

    def settings(self, data_dir: Path) -> Settings:
        return Settings(
            database_url=SecretStr(self.primary.url("strata")),
            database_read_url=SecretStr(self.replica.url("strata")),
            data_dir=data_dir,
            port=0,
            worker_inside=False,
        )

    def env(self, data_dir: Path) -> dict[str, str]:
        return {
            "STRATA_DATABASE_URL": self.primary.url("strata"),
            "STRATA_DATABASE_READ_URL": self.replica.url("strata"),
            "STRATA_DATA_DIR": str(data_dir),
        }

    async def has_caught_up(self) -> bool:
        position = await self.primary.fetch("SELECT pg_current_wal_lsn()::text")
        return bool(await self.replica.fetch(f"SELECT pg_last_wal_replay_lsn() >= '{position}'"))


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with open_site() as site:
        yield site


@pytest.fixture
async def pair(site: Site) -> AsyncIterator[Pair]:
    primary = site.primary()
    await primary.fetch("CREATE DATABASE strata")
    options = DatabaseOptions(url=primary.url("strata"))
    await migrate_up(options)
    replica = site.standby(primary)
    database = Database(options)
    store, tenant = PostgresStore(database), await PostgresKeyRing(database).create_tenant("acme")
    conversation = await create_conversation(store, tenant.id)
    await take_exchange(store, tenant.id, conversation.id, "Hello.")
    await database.close()
    pair = Pair(primary=primary, replica=replica, tenant=tenant, conversation_id=conversation.id)
    await come_true(pair.has_caught_up)
    yield pair
    primary.stop()
    replica.stop()


async def port_of(database: Database) -> int:
    [row] = await database.run(PORT)
    port: int = row["port"]
    return port


async def count_calls(inspector: PostgresInspector, tenant_id: str) -> int:
    now = datetime.now(UTC)
    report = await inspector.report_usage(
        tenant_id, UsageBy.DAY, since=now - timedelta(days=2), until=now + timedelta(days=1)
    )
    return report.total.call_count


async def test_reports_read_the_replica_and_the_primary_while_it_is_gone(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replica_module, "_RETRY_SECONDS", 0.0)
    primary = Database(DatabaseOptions(url=pair.primary.url("strata")))
    replica = ReplicaDatabase(DatabaseOptions(url=pair.replica.url("strata"), is_replica=True), primary)
    inspector = PostgresInspector(primary, replica)
    assert await port_of(replica) == pair.replica.port
    assert await count_calls(inspector, pair.tenant.id) == 1

    pair.replica.stop()
    for _ in range(3):
        assert await port_of(replica) == pair.primary.port
        assert await count_calls(inspector, pair.tenant.id) == 1
    assert not replica.is_available
    assert [record.message for record in caplog.records].count("postgres.replica_lost") == 1

    pair.replica.start()
    assert await port_of(replica) == pair.replica.port
    assert replica.is_available
    assert await count_calls(inspector, pair.tenant.id) == 1
    await replica.close()
    await primary.close()


async def test_a_replica_that_was_lost_is_left_alone_for_a_while(pair: Pair) -> None:
    primary = Database(DatabaseOptions(url=pair.primary.url("strata")))
    replica = ReplicaDatabase(DatabaseOptions(url=pair.replica.url("strata"), is_replica=True), primary)
    pair.replica.stop()
    assert await port_of(replica) == pair.primary.port
    pair.replica.start()
    assert await port_of(replica) == pair.primary.port
    await replica.close()
    await primary.close()


async def test_what_was_just_written_is_read_from_the_primary(pair: Pair, tmp_path: Path) -> None:
    """Make the replica lag: it stops applying changes."""
    await pair.replica.fetch("SELECT pg_wal_replay_pause()")
    async with open_program(pair.settings(tmp_path)) as program:
        inspector = PostgresInspector(program.database, program.replica)
        await take_exchange(program.store, pair.tenant.id, pair.conversation_id, "And now?")
        timeline = await inspector.load_timeline(pair.tenant.id, pair.conversation_id)
        assert timeline.last_seq == 4
        assert await count_calls(inspector, pair.tenant.id) == 1
        await pair.replica.fetch("SELECT pg_wal_replay_resume()")
        await come_true(pair.has_caught_up)
        assert await count_calls(inspector, pair.tenant.id) == 2


async def test_commands_that_only_read_take_the_replica(pair: Pair, tmp_path: Path) -> None:
    await pair.replica.fetch("SELECT pg_wal_replay_pause()")
    primary = Database(DatabaseOptions(url=pair.primary.url("strata")))
    await take_exchange(PostgresStore(primary), pair.tenant.id, pair.conversation_id, "And now?")
    await primary.close()
    assert _count_used(pair, tmp_path) == 1
    pair.replica.stop()
    assert _count_used(pair, tmp_path) == 2


def _count_used(pair: Pair, data_dir: Path) -> int:
    done = strata_here("usage", "--json", env=pair.env(data_dir))
    assert done.returncode == 0, done.stdout + done.stderr
    count: int = json.loads(done.stdout)["total"]["calls"]
    return count


async def test_verify_reads_a_replica(pair: Pair, tmp_path: Path) -> None:
    pair.primary.stop()
    done = strata_here("replay", "verify", "--workers", "1", env=pair.env(tmp_path))
    # The bytes of this answer were not written by a provider, so it cannot be proven.
    assert done.returncode == 1, done.stdout + done.stderr
    assert "in 1 calls of 1 conversations" in done.stdout


async def test_several_hosts_are_tried_in_their_order(pair: Pair) -> None:
    url = pair.replica.url("strata").replace(
        f"127.0.0.1:{pair.replica.port}", f"127.0.0.1:9,127.0.0.1:{pair.replica.port}"
    )
    database = Database(DatabaseOptions(url=url, is_replica=True))
    assert await port_of(database) == pair.replica.port
    await database.close()
    assert not await is_reachable(DatabaseOptions(url="postgresql://127.0.0.1:9/strata", is_replica=True))
