"""Distributing the tables of conversations over the nodes of a Citus cluster, by conversation.

Each table of a conversation is distributed by the conversation's id, so that all rows of a conversation are on one node
and a statement of the request path runs there. Tables that these statements join and that do not belong to a
conversation become reference tables, with a copy on every node. All other tables stay on the coordinator.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from asyncpg import exceptions as pg
from sqlalchemy import Table

from server.conversation.errors import MigrationFailed
from server.postgres.connections import Connection, DatabaseOptions, connect, translated_errors
from server.postgres.partitions import PARTITIONED_TABLES, is_partitioned
from server.postgres.schema import metadata

REFERENCE_TABLES: Final = ("tenants", "api_keys", "assistants", "templates", "provider_caches", "blobs")
"""In the order of their foreign keys."""
_ROOT: Final = "conversations"
_IS_DISTRIBUTED: Final = "SELECT EXISTS (SELECT FROM pg_dist_partition WHERE logicalrelid = $1::text::regclass)"
_HINT: Final = "Tables that were distributed stay so: correct the cause and run `strata migrate distribute` again."
_log = logging.getLogger("strata.migrations")


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributionStep:
    """A table and the call of a Citus function that distributes it."""

    table: str
    sql: str


def plan_distribution() -> list[DistributionStep]:
    """List the steps for the tables of this release, in order."""
    steps = [
        DistributionStep(table=table, sql=f"SELECT create_reference_table('{table}')") for table in REFERENCE_TABLES
    ]
    steps.append(_distribute(_ROOT, "id", "none"))
    steps += [_distribute(table.name, "conversation_id", _ROOT) for table in metadata.sorted_tables if _is_owned(table)]
    return steps


def list_local_tables() -> list[str]:
    """List the tables that stay on the coordinator. Those of schema `replay` do as well."""
    planned = {step.table for step in plan_distribution()}
    return [table.name for table in metadata.sorted_tables if table.schema is None and table.name not in planned]


def _is_owned(table: Table) -> bool:
    """Return whether a table belongs to a conversation and can be distributed by its id.

    Every unique index must contain the id, and foreign keys may refer to distributed and reference tables only. This
    excludes the tables of replays.
    """
    keys = [table.primary_key.columns, *(index.columns for index in table.indexes if index.unique)]
    return table.schema is None and not table.foreign_keys and all("conversation_id" in key for key in keys)


def _distribute(table: str, column: str, colocated: str) -> DistributionStep:
    sql = f"SELECT create_distributed_table('{table}', '{column}', colocate_with => '{colocated}')"
    return DistributionStep(table=table, sql=sql)


async def distribute_tables(options: DatabaseOptions, *, on_table: Callable[[str], None]) -> Sequence[str]:
    """Distribute the tables that are not distributed yet, and return their names. Raises `MigrationFailed`.

    Citus blocks writes to a table while it copies the rows, so that the servers must be stopped.
    """
    connection = await connect(replace(options, statement_seconds=0, idle_transaction_seconds=0))
    try:
        with translated_errors():
            await _require_cluster(connection)
            distributed = []
            for step in plan_distribution():
                if not await connection.fetchval(_IS_DISTRIBUTED, step.table):
                    await connection.execute(step.sql)
                    _log.info("schema.table_distributed", extra={"table": step.table})
                    on_table(step.table)
                    distributed.append(step.table)
            return distributed
    except pg.PostgresError as error:
        raise MigrationFailed(f"The tables could not be distributed: {error}.", hint=_HINT) from error
    finally:
        await connection.close()


async def _require_cluster(connection: Connection) -> None:
    if not await connection.fetchval("SELECT EXISTS (SELECT FROM pg_extension WHERE extname = 'citus')"):
        raise MigrationFailed(
            "The database has no Citus extension.",
            hint="Create the extension on all nodes and add the nodes first; docs/operations/scaling.md has the steps.",
        )
    for table in PARTITIONED_TABLES:
        if await is_partitioned(connection, table):
            raise MigrationFailed(
                f"Table {table} is partitioned.", hint="A table is either partitioned or distributed, and not both."
            )
