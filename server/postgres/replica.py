"""Reading from a replica, with the primary as a substitute.

A replica may be behind, so only reports use it: lists, searches, overviews and usage, which are derived from the turns
in the background and lag behind them anyway. What shows the effect of a change reads the primary: conversations, calls,
assistants, views, the audit log.
"""

import asyncio
import logging
import time
from dataclasses import replace
from typing import Any, Final

import asyncpg
from asyncpg import exceptions as pg

from server.conversation.errors import DatabaseUnavailable
from server.postgres.connections import DatabaseOptions
from server.postgres.engine import Database, Statement

_CONNECT_SECONDS: Final = 2.0
"""Less than for the primary: a page waits for it before it reads the primary instead."""
_RETRY_SECONDS: Final = 10.0
"""How long a replica that failed is not tried again."""
_NOT_REPLAYED: Final = (pg.UndefinedTableError, pg.UndefinedColumnError)
"""The replica has not applied a migration of the primary yet."""
_log = logging.getLogger("strata.postgres")


class ReplicaDatabase(Database):
    """The connection pool to a replica. Statements run on the primary while the replica cannot be used.

    Only `run` does that, and only for statements that read.
    """

    def __init__(self, options: DatabaseOptions, primary: Database) -> None:
        super().__init__(replace(options, connect_seconds=min(_CONNECT_SECONDS, options.connect_seconds)))
        self._primary = primary
        self._retry_at = 0.0
        self.is_available = True
        """False from a failure of the replica until it answers again."""

    async def run(self, statement: Statement, *, repeatable: bool = True, **values: Any) -> list[asyncpg.Record]:
        if time.monotonic() < self._retry_at:
            return await self._primary.run(statement, repeatable=repeatable, **values)
        try:
            rows = await super().run(statement, repeatable=repeatable, **values)
        except (DatabaseUnavailable, *_NOT_REPLAYED) as error:
            if isinstance(error.__cause__, pg.QueryCanceledError):
                # The statement takes too long, there as well as here.
                raise
            if not isinstance(error.__cause__, pg.TransactionRollbackError):
                self._lose(error)
            return await self._primary.run(statement, repeatable=repeatable, **values)
        if not self.is_available:
            self.is_available = True
            _log.info("postgres.replica_regained")
        return rows

    def _lose(self, error: Exception) -> None:
        self._retry_at = time.monotonic() + _RETRY_SECONDS
        if self.is_available:
            # Once, and not for every attempt.
            self.is_available = False
            _log.warning("postgres.replica_lost", extra={"reason": str(error)})


async def is_reachable(options: DatabaseOptions) -> bool:
    """Return whether a replica answers now, and log it if not. For commands that choose a database once."""
    database = Database(replace(options, connect_seconds=min(_CONNECT_SECONDS, options.connect_seconds)))
    try:
        async with asyncio.timeout(2 * _CONNECT_SECONDS):
            await database.run(Statement("SELECT 1"))
    except (DatabaseUnavailable, TimeoutError) as error:
        _log.warning("postgres.replica_lost", extra={"reason": str(error)})
        return False
    finally:
        await database.close()
    return True
