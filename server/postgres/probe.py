"""The readiness check of the database."""

import asyncio
from typing import Final

from server.conversation.errors import DatabaseUnavailable
from server.postgres.engine import Database, Statement

_READ_ONLY: Final = Statement("SELECT current_setting('transaction_read_only') = 'on' AS read_only")


class DatabaseProbe:
    """Implements `server.conversation.readiness.Probe`. The first contact also checks the schema, see `Database`."""

    name = "database"

    def __init__(self, database: Database) -> None:
        self._database = database

    async def check(self) -> None:
        limit = self._database.options.connect_seconds
        try:
            async with asyncio.timeout(limit):
                rows = await self._database.run(_READ_ONLY)
        except TimeoutError as error:
            raise DatabaseUnavailable(f"The database did not answer within {limit:g} s.") from error
        if rows[0]["read_only"]:
            raise DatabaseUnavailable("The database takes no writes.")
