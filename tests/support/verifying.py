"""Verifies stored conversations in tests, also after a change that is rolled back."""

from collections.abc import Sequence
from typing import Any

import asyncpg

from server.app.providers import open_offline_providers
from server.app.settings import Settings
from server.postgres.connections import DatabaseOptions
from server.postgres.engine import Database, Statement
from server.postgres.replay.recorded_calls import PostgresRecordedCalls
from server.replay.verify.verification import Verified
from server.replay.verify.verifier import Verifier, VerifyOptions

NOWHERE: dict[str, Any] = {"gemini_base_url": "http://127.0.0.1:9", "anthropic_base_url": "http://127.0.0.1:9"}
"""An address without a listener: a call of a provider would fail."""


async def verify(database: Database, ids: Sequence[str], *, tenant_id: str | None = None, **order: Any) -> Verified:
    async with open_offline_providers(Settings(**NOWHERE)) as offline_providers:
        recorded = PostgresRecordedCalls(database, tenant_id=tenant_id)
        return await Verifier(recorded, offline_providers, VerifyOptions(**order)).verify(ids)


async def verify_damaged(database: Database, ids: Sequence[str], sql: str, *values: Any) -> Verified:
    """The findings after a change that is rolled back."""
    async with database.connection() as connection:
        transaction = connection.transaction()
        await transaction.start()
        try:
            assert (await connection.execute(sql, *values)).split()[-1] != "0", "nothing was changed"
            return await verify(_Within(connection, database.options), ids)
        finally:
            await transaction.rollback()


class _Within(Database):
    """Reads on one connection, inside its transaction."""

    def __init__(self, connection: Any, options: DatabaseOptions) -> None:
        super().__init__(options)
        self._one = connection

    async def run(self, statement: Statement, *, repeatable: bool = True, **values: Any) -> list[asyncpg.Record]:
        found: list[asyncpg.Record] = await self._one.fetch(statement.sql, *statement.arguments(values))
        return found
