"""The connection pool of a process, statements, readiness, and the behaviour when the database is unavailable.

A statement is compiled once, when its module is imported, and asyncpg runs it without further round trips, in a
transaction of its own. Most statements can be repeated safely: if one loses its connection, it is run once more on a
new one, so that a restart or a failover between two statements has no effect on callers. If the database does not
answer, every wait has a limit: to connect, for a free connection, for a result.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import asyncpg
from asyncpg import exceptions as pg
from sqlalchemy.dialects.postgresql.asyncpg import PGDialect_asyncpg
from sqlalchemy.sql import Executable

from server.conversation.errors import DatabaseUnavailable
from server.postgres.codec import encode_text
from server.postgres.connections import (
    Connection,
    DatabaseOptions,
    connect_to_one,
    read_hosts,
    require_supported,
    translate,
    translated_errors,
)

_DIALECT: Final = PGDialect_asyncpg()  # type: ignore[no-untyped-call]  # reason: SQLAlchemy's signature
_PLACEHOLDER: Final = re.compile(r"(?<![:\w]):([a-z][a-z_]*)")
_log = logging.getLogger("strata.postgres")

LOST: Final = (
    ConnectionError,
    pg.PostgresConnectionError,
    pg.InterfaceError,
    # The server has closed an idle connection, and the end of the stream has not arrived yet.
    pg.InternalClientError,
    pg.CannotConnectNowError,
    pg.AdminShutdownError,
    pg.CrashShutdownError,
    pg.IdleSessionTimeoutError,
    pg.IdleInTransactionSessionTimeoutError,
    # The primary became a standby under an open connection.
    pg.ReadOnlySQLTransactionError,
)
"""Errors of the connection and not of the statement. The statement is retried once, immediately."""


class Statement:
    """A statement, compiled once when its module is imported.

    It is written in SQLAlchemy Core, or in SQL with `:name` for a value. The long ones of the request path are SQL:
    they are read, and pasted into EXPLAIN, more often than they are changed.
    """

    __slots__ = ("_constants", "_order", "sql")

    def __init__(self, source: Executable | str) -> None:
        self._constants: dict[str, Any] = {}
        if isinstance(source, str):
            names = dict.fromkeys(_PLACEHOLDER.findall(source))
            self._order = tuple(names)
            parameters = {name: f"${number}" for number, name in enumerate(names, start=1)}
            self.sql = _PLACEHOLDER.sub(lambda match: parameters[match.group(1)], source)
        else:
            compiled = source.compile(dialect=_DIALECT)  # type: ignore[attr-defined]  # reason: every statement here has it
            self.sql = str(compiled)
            self._order = tuple(compiled.positiontup or ())
            self._constants = {name: value for name, value in compiled.params.items() if value is not None}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the values."""
        return self._order

    def arguments(self, values: dict[str, Any]) -> list[object]:
        """Return the values in the order of the placeholders, with text escaped.

        Raises `KeyError` for a missing value, which must not silently become NULL.
        """
        known = self._constants | values
        return [encode_text(value) if isinstance(value := known[name], str) else value for name in self._order]

    async def fetch(self, connection: Connection, **values: Any) -> list[asyncpg.Record]:
        """Run the statement on a connection, usually within a transaction."""
        return await connection.fetch(self.sql, *self.arguments(values))


_READ_ONLY: Final = Statement("SELECT current_setting('transaction_read_only') = 'on' AS read_only")


class Database:
    """The connection pool of one process. It connects when it is first used."""

    def __init__(
        self, options: DatabaseOptions, *, on_first_contact: Callable[[Connection], Awaitable[None]] | None = None
    ) -> None:
        """`on_first_contact` runs on the first connection, and on each further one until it does not raise."""
        self.options = options
        self._on_first_contact = on_first_contact
        self._pool: asyncpg.Pool[asyncpg.Record] | None = None
        self._opening = asyncio.Lock()

    async def run(self, statement: Statement, *, repeatable: bool = True, **values: Any) -> list[asyncpg.Record]:
        """Run a statement in one round trip. Raises `DatabaseUnavailable`.

        `repeatable`: running it twice has the same effect as once, so it is retried if the connection is lost.
        """
        arguments = statement.arguments(values)
        try:
            async with self.connection() as connection:
                return await connection.fetch(statement.sql, *arguments)
        except DatabaseUnavailable as error:
            if not (repeatable and isinstance(error.__cause__, LOST)):
                raise
        async with self.connection() as connection:
            return await connection.fetch(statement.sql, *arguments)

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Acquire a connection of the pool. Raises `DatabaseUnavailable`, also for errors within the block."""
        with translated_errors():
            pool = await self._opened()
            acquired = await self._acquire(pool)
            try:
                yield acquired
            except (*LOST, TimeoutError) as error:
                # asyncpg uses one class for a lost connection and for a wrong argument, which is a bug of ours.
                if isinstance(error, pg.InterfaceError) and not _is_gone(acquired):
                    raise
                await self._forget_connections(acquired)
                raise translate(error) or DatabaseUnavailable("The database connection was lost.") from error
            finally:
                await self._release(pool, acquired)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Connection]:
        """Acquire a connection and begin a transaction on it."""
        async with self.connection() as connection, connection.transaction():
            yield connection

    async def close(self) -> None:
        """Close all connections, and wait for those in use up to `connect_seconds`."""
        if self._pool is None:
            return
        try:
            async with asyncio.timeout(self.options.connect_seconds):
                await self._pool.close()
        except (OSError, pg.PostgresError, pg.InterfaceError, pg.InternalClientError):
            self._pool.terminate()

    def pool_counts(self) -> tuple[int, int]:
        """Return the number of open connections, and how many of them are in use."""
        if self._pool is None:
            return 0, 0
        size = self._pool.get_size()
        return size, size - self._pool.get_idle_size()

    async def _release(
        self,
        pool: "asyncpg.Pool[asyncpg.Record]",
        acquired: "asyncpg.pool.PoolConnectionProxy[asyncpg.Record]",
    ) -> None:
        """Return a connection to the pool. Raises nothing but `CancelledError`.

        It runs in a `finally`: an exception from here would replace the current one, which may be the cancellation of
        the task. The result of the statement is known by now, and asyncpg has closed a connection that it could not
        reset, so the error is irrelevant to the caller.
        """
        try:
            await pool.release(acquired, timeout=self.options.connect_seconds)
        except Exception as error:  # noqa: BLE001  reason: see above; CancelledError is no Exception
            _log.info("postgres.release_failed", extra={"reason": type(error).__name__})

    async def _acquire(
        self, pool: "asyncpg.Pool[asyncpg.Record]"
    ) -> "asyncpg.pool.PoolConnectionProxy[asyncpg.Record]":
        if pool.is_closing():
            raise DatabaseUnavailable("The connections to the database are closed.")
        try:
            return await pool.acquire(timeout=self.options.pool_wait_seconds)
        except TimeoutError as error:
            if pool.get_size() < pool.get_max_size():
                raise
            wait = self.options.pool_wait_seconds
            raise DatabaseUnavailable(
                f"No database connection became free within {wait:g} s.",
                hint="Try again in a moment; operators can raise STRATA_DATABASE_POOL_SIZE.",
            ) from error

    async def _opened(self) -> "asyncpg.Pool[asyncpg.Record]":
        if self._pool is None:
            async with self._opening:
                if self._pool is None:
                    self._pool = await self._open()
        return self._pool

    async def _open(self) -> "asyncpg.Pool[asyncpg.Record]":
        hosts = read_hosts(self.options.url, is_replica=self.options.is_replica)
        limit = self.options.statement_seconds

        async def connect_host(*_: object, **arguments: Any) -> "asyncpg.Connection[asyncpg.Record]":
            return await connect_to_one(hosts, self.options, **arguments)

        pool: asyncpg.Pool[asyncpg.Record] = await asyncpg.create_pool(
            min_size=0,
            max_size=self.options.pool_size,
            # Only for a server that does not answer: otherwise it has cancelled the statement before.
            command_timeout=limit + self.options.connect_seconds if limit else None,
            connect=connect_host,
            init=self._check,
            reset=_keep,
        )
        return pool

    async def _check(self, connection: Connection) -> None:
        require_supported(connection)
        if self._on_first_contact is not None:
            await self._on_first_contact(connection)
            self._on_first_contact = None

    async def _forget_connections(self, lost: "asyncpg.pool.PoolConnectionProxy[asyncpg.Record]") -> None:
        """Replace the other connections of the pool when they are next used, because they are probably lost too."""
        _log.warning("postgres.connection_lost")
        if not _is_gone(lost):
            # Without a cancel request: a silent server would not answer that either.
            lost.terminate()
        if self._pool is not None:
            await self._pool.expire_connections()


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


class StorePart:
    """Base of the classes that make up `PostgresStore` and `PostgresInspector`: methods over one database."""

    def __init__(self, database: Database) -> None:
        self._database = database


class ReportPart(StorePart):
    """Base of the classes that also report over many conversations, from a replica if there is one."""

    def __init__(self, database: Database, replica: Database | None = None) -> None:
        super().__init__(database)
        self._reports = replica or database


async def _keep(connection: Connection) -> None:
    """Replace asyncpg's reset, which costs a round trip per use. No statement here changes the session."""


def _is_gone(acquired: "asyncpg.pool.PoolConnectionProxy[asyncpg.Record]") -> bool:
    """Return whether a connection was lost while it was in use; asyncpg has removed it from the pool then."""
    try:
        return acquired.is_closed()
    except pg.InterfaceError:
        return True
