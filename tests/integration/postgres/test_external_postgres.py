"""An external Postgres, over TCP and in the oldest supported version, with everything that an operator can
configure.
"""

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest

from server.conversation.api_key import Tenant
from server.conversation.errors import DatabaseUnavailable, DatabaseUnsupported, SettingsInvalid
from server.postgres import connections as connecting
from server.postgres.access.key_ring import PostgresKeyRing
from server.postgres.connections import OLDEST_VERSION, DatabaseOptions, connect
from server.postgres.engine import Database, Statement
from server.postgres.migrations import find_drift, migrate_down_one, migrate_up, read_schema_state
from server.postgres.schema import metadata
from server.postgres.store import PostgresStore
from tests.contracts.store_contract import StoreContract, other_tenant
from tests.support.external_postgres import PASSWORD, VERSIONS, Cluster, Site, come_true, open_site

__all__ = ["other_tenant"]

SECRETS = (PASSWORD, PASSWORD.replace("%2F", "/"))
SLEEP = Statement("SELECT pg_sleep(:seconds)")
EMPTY_ALL = "; ".join(str(table.delete()) for table in reversed(metadata.sorted_tables))

_numbers = itertools.count()


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with open_site() as site:
        yield site


@pytest.fixture(scope="module")
def cluster(site: Site) -> Cluster:
    return site.primary()


@pytest.fixture(scope="module")
async def options(cluster: Cluster) -> DatabaseOptions:
    """A migrated database."""
    await cluster.fetch("CREATE DATABASE strata")
    options = DatabaseOptions(url=cluster.url("strata", sslmode="require"), application_name="strata-external")
    await migrate_up(options)
    return options


@pytest.fixture(scope="module")
async def external_database(options: DatabaseOptions) -> AsyncIterator[Database]:
    database = Database(options)
    yield database
    await database.close()


@pytest.fixture
async def database(external_database: Database) -> Database:
    async with external_database.connection() as connection:
        await connection.execute(EMPTY_ALL)
    return external_database


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
async def new_database(cluster: Cluster) -> DatabaseOptions:
    """An empty database for a single test."""
    name = f"strata_{next(_numbers)}"
    await cluster.fetch(f"CREATE DATABASE {name}")
    return DatabaseOptions(url=cluster.url(name))


class TestStoreOnTheOldestPostgres(StoreContract):
    """See the contract."""


async def test_the_server_has_the_expected_version(options: DatabaseOptions) -> None:
    connection = await connect(options)
    try:
        assert connection.get_server_version().major in VERSIONS
        assert min(VERSIONS) == OLDEST_VERSION
    finally:
        await connection.close()


class TestSchema:
    async def test_all_migrations_go_up_and_down_and_up_again(self, new_database: DatabaseOptions) -> None:
        up = await migrate_up(new_database)
        assert up.current == up.head
        assert await find_drift(new_database) == []
        state = up
        while state.current is not None:
            state = await migrate_down_one(new_database)
        again = await migrate_up(new_database)
        assert again == up == await read_schema_state(new_database)
        assert await find_drift(new_database) == []


class TestTls:
    @staticmethod
    async def _cipher(url: str) -> str | None:
        connection = await connect(DatabaseOptions(url=url))
        try:
            cipher: str | None = await connection.fetchval(
                "SELECT cipher FROM pg_stat_ssl WHERE pid = pg_backend_pid() AND ssl"
            )
            return cipher
        finally:
            await connection.close()

    @pytest.mark.parametrize("sslmode", ["require", "prefer"])
    async def test_the_connection_is_encrypted(self, cluster: Cluster, sslmode: str) -> None:
        assert await self._cipher(cluster.url(sslmode=sslmode))

    async def test_it_is_encrypted_by_default_and_plain_only_on_request(self, cluster: Cluster) -> None:
        assert await self._cipher(cluster.url())
        assert await self._cipher(cluster.url(sslmode="disable")) is None

    @pytest.mark.parametrize("sslmode", ["verify-ca", "verify-full"])
    async def test_the_right_authority_is_trusted(self, site: Site, cluster: Cluster, sslmode: str) -> None:
        assert await self._cipher(cluster.url(sslmode=sslmode, sslrootcert=str(site.certificates.authority)))

    @pytest.mark.parametrize("sslmode", ["verify-ca", "verify-full"])
    async def test_a_wrong_authority_is_not_trusted(self, site: Site, cluster: Cluster, sslmode: str) -> None:
        url = cluster.url(sslmode=sslmode, sslrootcert=str(site.certificates.stranger))
        message = await _refusal(url, DatabaseUnavailable)
        assert message.startswith("The database's certificate is not trusted: ")

    async def test_a_certificate_for_another_host_is_not_trusted(self, site: Site, cluster: Cluster) -> None:
        authority = str(site.certificates.authority)
        url = cluster.url(host="localhost", sslmode="verify-full", sslrootcert=authority)
        assert "localhost" in await _refusal(url, DatabaseUnavailable)
        assert await self._cipher(cluster.url(host="localhost", sslmode="verify-ca", sslrootcert=authority))

    async def test_an_unreadable_file_is_an_invalid_setting(self, site: Site, cluster: Cluster) -> None:
        url = cluster.url(sslmode="verify-full", sslrootcert=str(site.base / "nothing.crt"))
        assert "sslrootcert" in await _refusal(url, SettingsInvalid)
        url = cluster.url(sslmode="verify-full", sslrootcert=str(site.base / "password"))
        assert "sslrootcert" in await _refusal(url, SettingsInvalid)
        url = cluster.url(sslmode="require", sslcert=str(site.base / "nothing.crt"))
        assert "sslcert" in await _refusal(url, SettingsInvalid)


async def _refusal(url: str, kind: type[DatabaseUnavailable | SettingsInvalid | DatabaseUnsupported]) -> str:
    """The message for a URL without a usable database: one sentence, and nothing secret."""
    messages = set()
    database = Database(DatabaseOptions(url=url))
    attempts = (lambda: connect(database.options), lambda: database.run(SLEEP, seconds=0.0))
    for attempt in attempts:
        with pytest.raises(kind) as caught:
            await attempt()
        messages.add(caught.value.message)
    await database.close()
    [message] = messages
    for secret in SECRETS:
        assert secret not in message
    assert message.endswith(".")
    assert "\n" not in message
    assert len(message) < 250
    return message


class TestRefusals:
    async def test_a_wrong_password_is_reported(self, cluster: Cluster) -> None:
        message = await _refusal(cluster.url().replace(PASSWORD, "wr0ng"), DatabaseUnavailable)
        assert message == 'The database refuses the connection: password authentication failed for user "strata".'

    async def test_a_missing_password_is_reported(self, cluster: Cluster) -> None:
        message = await _refusal(cluster.url().replace(f":{PASSWORD}", ""), DatabaseUnavailable)
        assert message.startswith("The database refuses the connection: ")

    async def test_an_unknown_database_is_reported(self, cluster: Cluster) -> None:
        message = await _refusal(cluster.url("nowhere"), DatabaseUnavailable)
        assert message == 'The database refuses the connection: database "nowhere" does not exist.'

    async def test_a_database_without_access_for_the_user_is_reported(
        self, cluster: Cluster, new_database: DatabaseOptions
    ) -> None:
        name = new_database.url.rpartition("/")[2]
        await cluster.fetch("CREATE ROLE guest LOGIN PASSWORD 'guest'")
        await cluster.fetch(f"REVOKE ALL ON DATABASE {name} FROM public")
        message = await _refusal(new_database.url.replace(f"strata:{PASSWORD}", "guest:guest"), DatabaseUnavailable)
        assert message == f'The database refuses access: permission denied for database "{name}".'

    async def test_a_database_without_free_connections_is_reported(
        self, cluster: Cluster, new_database: DatabaseOptions
    ) -> None:
        await cluster.fetch(f"ALTER DATABASE {new_database.url.rpartition('/')[2]} CONNECTION LIMIT 0")
        await cluster.fetch("CREATE ROLE late LOGIN PASSWORD 'late'")
        url = new_database.url.replace(f"strata:{PASSWORD}", "late:late")
        assert await _refusal(url, DatabaseUnavailable) == "The database has no connection left."

    async def test_a_port_without_a_listener_is_reported(self, cluster: Cluster) -> None:
        url = cluster.url().replace(f":{cluster.port}/", ":1/")
        assert (await _refusal(url, DatabaseUnavailable)).startswith("The database cannot be reached: ")

    async def test_a_server_that_is_too_old_is_reported(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No older one is available, so this one is declared to be too old."""
        monkeypatch.setattr(connecting, "OLDEST_VERSION", max(VERSIONS) + 1)
        message = await _refusal(cluster.url(), DatabaseUnsupported)
        assert re.fullmatch(r"The database runs PostgreSQL 1[567]; 18 is the oldest\.", message)

    async def test_a_database_that_is_not_in_utf_8_is_reported(self, cluster: Cluster) -> None:
        await cluster.fetch("CREATE DATABASE ascii ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0")
        message = await _refusal(cluster.url("ascii"), DatabaseUnsupported)
        assert message == "The database has the encoding SQL_ASCII."

    @pytest.mark.parametrize(
        ("fragment", "complaint"),
        [
            ("?sslmode=mystery", "sslmode"),
            ("?target_session_attrs=mystery", "target_session_attrs"),
            ("?target_session_attrs=standby", "target_session_attrs"),
            ("?sslmode", "malformed"),
            ("?connect_timeout=10", "connect_timeout"),
            ("?ssl_min_protocol_version=SSLv3", "SSLv3"),
        ],
    )
    async def test_an_unknown_option_is_reported(self, cluster: Cluster, fragment: str, complaint: str) -> None:
        message = await _refusal(cluster.url() + fragment, SettingsInvalid)
        assert complaint in message
        assert message.startswith("STRATA_DATABASE_URL is not usable: ")

    @pytest.mark.parametrize(
        "url",
        [
            f"postgresql://strata:{SECRETS[1]}@127.0.0.1:5432/strata",  # The slash ends the host: `s3cret` is the port.
            f"postgresql://strata:{PASSWORD}@127.0.0.1:many/strata",
            f"postgresql://strata:{PASSWORD}@127.0.0.1:99999/strata",
            f"postgresql://strata:{PASSWORD}@[::1/strata",
            f"postgresql://strata:{PASSWORD}@127.0.0.1,,127.0.0.1/strata",
            f"postgresql://strata:{PASSWORD}@/strata?host=a,b&port=1,2,3",
            f"mysql://strata:{PASSWORD}@127.0.0.1/strata",
            f"strata:{PASSWORD}@127.0.0.1/strata",
            "",
        ],
    )
    async def test_an_invalid_url_is_reported(self, url: str) -> None:
        assert "s3cret" not in await _refusal(url, SettingsInvalid)


class TestSettings:
    async def test_settings_reach_the_connection(self, options: DatabaseOptions) -> None:
        connection = await connect(replace(options, application_name="strata-name", statement_seconds=1.25))
        try:
            rows = await connection.fetch(
                "SELECT name, setting, unit FROM pg_settings"
                " WHERE name IN ('application_name', 'statement_timeout', 'TimeZone')"
            )
        finally:
            await connection.close()
        assert {row["name"]: row["setting"] for row in rows} == {
            "application_name": "strata-name",
            "statement_timeout": "1250",
            "TimeZone": "UTC",
        }

    async def test_zero_means_no_limit(self, options: DatabaseOptions) -> None:
        connection = await connect(replace(options, statement_seconds=0))
        try:
            assert await connection.fetchval("SHOW statement_timeout") == "0"
        finally:
            await connection.close()

    async def test_a_statement_that_takes_too_long_is_cancelled_and_its_connection_is_kept(
        self, options: DatabaseOptions
    ) -> None:
        database = Database(replace(options, statement_seconds=1, pool_size=1))
        backend = Statement("SELECT pg_backend_pid() AS pid")
        [before] = await database.run(backend)
        with pytest.raises(DatabaseUnavailable, match="did not finish a statement within the time limit"):
            await database.run(SLEEP, seconds=5.0)
        [after] = await database.run(backend)
        assert after["pid"] == before["pid"]
        await database.close()

    async def test_the_pool_never_grows_above_its_limit(self, options: DatabaseOptions) -> None:
        database = Database(replace(options, pool_size=4, application_name="strata-narrow"))
        observed = Statement(
            "SELECT pg_sleep(0.02), (SELECT count(*)::int FROM pg_stat_activity"
            " WHERE application_name = 'strata-narrow') AS n"
        )
        answers = await asyncio.gather(*(database.run(observed) for _ in range(50)))
        assert max(row["n"] for [row] in answers) == 4
        assert database.pool_counts() == (4, 0)
        await database.close()

    async def test_waiting_for_a_connection_has_a_limit(self, options: DatabaseOptions) -> None:
        database = Database(replace(options, pool_size=1, pool_wait_seconds=0.1))
        async with database.connection():
            with pytest.raises(DatabaseUnavailable, match=r"No database connection became free within 0.1 s\."):
                await database.run(SLEEP, seconds=0.0)
        assert len(await database.run(SLEEP, seconds=0.0)) == 1
        await database.close()

    async def test_no_connection_is_left_open(self, options: DatabaseOptions, cluster: Cluster) -> None:
        """Neither by a closed pool nor by an unusable connection."""
        leaving = replace(options, application_name="strata-leaver")
        database = Database(leaving)
        await asyncio.gather(*(database.run(SLEEP, seconds=0.01) for _ in range(5)))
        await database.close()
        await cluster.fetch("CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
        latin = replace(leaving, url=cluster.url("latin"))
        unsupported = Database(latin)
        for attempt in (connect(latin), unsupported.run(SLEEP, seconds=0.0)):
            with pytest.raises(DatabaseUnsupported, match="LATIN1"):
                await attempt
        await unsupported.close()

        async def all_left() -> bool:
            sql = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'strata-leaver'"
            return bool(await cluster.fetch(sql) == 0)

        await come_true(all_left)
