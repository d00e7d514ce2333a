"""Whether the database can be used now."""

from typing import Final

from server.postgres.engine import Database, Statement

_ASK: Final = Statement("SELECT 1")


class DatabaseProbe:
    """Implements `server.readiness.Probe`. The first contact also checks the schema, see `Database`."""

    name = "database"

    def __init__(self, database: Database) -> None:
        self._database = database

    async def check(self) -> None:
        await self._database.run(_ASK)
