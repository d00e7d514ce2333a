"""Connections to Postgres: one pool per process, and what happens when the database goes away.

Statements are made once and run by asyncpg directly: between the two stands nothing that costs a round trip. A
statement is its own transaction. Most can safely be repeated, and one of these that loses its connection is run once
more on a new one: a restart or a failover between two statements is seen by nobody. Where the database falls silent
instead, every wait has an end: to connect, for a free connection, for an answer.
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
    # The server has said goodbye on an idle connection, and its end has not arrived yet.
    pg.InternalClientError,
    pg.CannotConnectNowError,
    pg.AdminShutdownError,
    pg.CrashShutdownError,
    pg.IdleSessionTimeoutError,
    pg.IdleInTransactionSessionTimeoutError,
    # The primary became a standby under an open connection.
    pg.ReadOnlySQLTransactionError,
)
"""What asyncpg raises when the connection, and not the statement, is at fault. Worth one more try at once."""


class Statement:
    """A statement, made once when its module is loaded.

    From SQLAlchemy Core, or from SQL with `:name` where a value goes. The long ones of the request path are SQL: they
    are read, and pasted into EXPLAIN, more often than they are changed.
    """

    __slots__ = ("_constants", "_order", "sql")

    def __init__(self, source: Executable | str) -> None:
        self._constants: dict[str, Any] = {}
        if isinstance(source, str):
            names = dict.fromkeys(_PLACEHOLDER.findall(source))
            self._order = tuple(names)
            places = {name: f"${place}" for place, name in enumerate(names, start=1)}
            self.sql = _PLACEHOLDER.sub(lambda match: places[match.group(1)], source)
        else:
            compiled = source.compile(dialect=_DIALECT)  # type: ignore[attr-defined]  # reason: every statement here has it
            self.sql = str(compiled)
            self._order = tuple(compiled.positiontup or ())
            self._constants = {name: value for name, value in compiled.params.items() if value is not None}

    @property
    def names(self) -> tuple[str, ...]:
        """What has to be given."""
        return self._order

    def arguments(self, values: dict[str, Any]) -> list[object]:
        """The values in the order of the placeholders, text made storable.

        Every placeholder has to be given: a forgotten one must not become a silent NULL.
        """
        known = self._constants | values
        return [encode_text(value) if isinstance(value := known[name], str) else value for name in self._order]


class Database:
    """The pool of one process. Making it connects to nothing: an unreachable database is found out by using it."""

    def __init__(
        self, options: DatabaseOptions, *, on_first_contact: Callable[[Connection], Awaitable[None]] | None = None
    ) -> None:
        """`on_first_contact` runs on the first connection that is made, and again on the next as long as it raises."""
        self.options = options
        self._on_first_contact = on_first_contact
        self._pool: asyncpg.Pool[asyncpg.Record] | None = None
        self._opening = asyncio.Lock()

    async def run(self, statement: Statement, *, repeatable: bool = True, **values: Any) -> list[asyncpg.Record]:
        """One round trip. Raises `DatabaseUnavailable`.

        `repeatable`: running it twice has the effect of once, so a lost connection is no reason to give up.
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
        """A connection of the pool. Raises `DatabaseUnavailable`, also for errors within the block."""
        with translated_errors():
            pool = await self._opened()
            acquired = await self._acquire(pool)
            try:
                yield acquired
            except (*LOST, TimeoutError) as error:
                # asyncpg has one class for a connection that is gone and for a wrong argument, which is a bug of ours.
                if isinstance(error, pg.InterfaceError) and not _is_gone(acquired):
                    raise
                await self._forget_connections(acquired)
                raise translate(error) or DatabaseUnavailable("The database connection was lost.") from error
            finally:
                await self._release(pool, acquired)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Connection]:
        """A connection in a transaction of its own."""
        async with self.connection() as connection, connection.transaction():
            yield connection

    async def close(self) -> None:
        """Ends all connections; those in use get the time of one statement."""
        if self._pool is None:
            return
        try:
            async with asyncio.timeout(self.options.connect_seconds):
                await self._pool.close()
        except (OSError, pg.PostgresError, pg.InterfaceError, pg.InternalClientError):
            self._pool.terminate()

    def pool_counts(self) -> tuple[int, int]:
        """How many connections are open, and how many of these are in use."""
        if self._pool is None:
            return 0, 0
        size = self._pool.get_size()
        return size, size - self._pool.get_idle_size()

    async def _release(
        self,
        pool: "asyncpg.Pool[asyncpg.Record]",
        acquired: "asyncpg.pool.PoolConnectionProxy[asyncpg.Record]",
    ) -> None:
        """Gives a connection back to the pool. Raises `CancelledError` when it is cancelled, and nothing else.

        It runs in a `finally`: an exception from here would replace the one under way, which may be the cancellation
        of the task. The statement's outcome is known by now, and asyncpg has ended a connection that it could not
        reset, so an error here concerns no caller.
        """
        try:
            await pool.release(acquired, timeout=self.options.connect_seconds)
        except Exception as error:  # noqa: BLE001  reason: see above; a cancellation is no Exception and passes
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
        hosts = read_hosts(self.options.url)
        limit = self.options.statement_seconds

        async def connect_host(*_: object, **arguments: Any) -> "asyncpg.Connection[asyncpg.Record]":
            return await connect_to_one(hosts, self.options, **arguments)

        pool: asyncpg.Pool[asyncpg.Record] = await asyncpg.create_pool(
            min_size=0,
            max_size=self.options.pool_size,
            # For a server that does not answer at all: one that does has cancelled the statement before.
            command_timeout=limit + self.options.connect_seconds if limit else None,
            connect=connect_host,
            init=self._greet,
            reset=_keep,
        )
        return pool

    async def _greet(self, connection: Connection) -> None:
        require_supported(connection)
        if self._on_first_contact is not None:
            await self._on_first_contact(connection)
            self._on_first_contact = None

    async def _forget_connections(self, lost: "asyncpg.pool.PoolConnectionProxy[asyncpg.Record]") -> None:
        """After one connection was lost the others of the pool are suspect: each is replaced when it is next used."""
        _log.warning("postgres.connection_lost")
        if not _is_gone(lost):
            # At once: a silent server would not answer a request to cancel either.
            lost.terminate()
        if self._pool is not None:
            await self._pool.expire_connections()


class StorePart:
    """Base of the classes that make up `PostgresStore` and `PostgresInspector`: methods over one database."""

    def __init__(self, database: Database) -> None:
        self._database = database


async def _keep(connection: Connection) -> None:
    """Instead of asyncpg's reset, which is a round trip per use: no statement here changes a session."""


def _is_gone(acquired: "asyncpg.pool.PoolConnectionProxy[asyncpg.Record]") -> bool:
    """Whether a connection of the pool was lost while it was in use; asyncpg has taken it back then."""
    try:
        return acquired.is_closed()
    except pg.InterfaceError:
        return True
