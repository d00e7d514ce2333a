"""Connections to Postgres: one pool per process, and what happens when the database goes away.

Statements are made once and run by asyncpg directly: between the two stands nothing that costs a round trip. A
statement is its own transaction. Most can safely be repeated, and one of these that loses its connection is run once
more on a new one: a restart or a failover between two statements is seen by nobody.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qs, urlsplit

import asyncpg
from asyncpg import exceptions as pg
from asyncpg.connect_utils import SessionAttribute
from sqlalchemy.dialects.postgresql.asyncpg import PGDialect_asyncpg
from sqlalchemy.sql import Executable

from server.errors import DatabaseUnavailable, DatabaseUnsupported, SettingsInvalid, StrataError
from server.postgres.codec import encode_text

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record] | asyncpg.pool.PoolConnectionProxy[asyncpg.Record]"

OLDEST_VERSION: Final = 15
_DIALECT: Final = PGDialect_asyncpg()  # type: ignore[no-untyped-call]  # reason: SQLAlchemy's signature
_PLACEHOLDER: Final = re.compile(r"(?<![:\w]):([a-z][a-z_]*)")
_log = logging.getLogger("strata.postgres")

LOST: Final = (
    ConnectionError,
    pg.PostgresConnectionError,
    pg.InterfaceError,
    pg.CannotConnectNowError,
    pg.AdminShutdownError,
    pg.CrashShutdownError,
    pg.IdleSessionTimeoutError,
    # The primary became a standby under an open connection.
    pg.ReadOnlySQLTransactionError,
)
"""What asyncpg raises when the connection, and not the statement, is at fault. Worth one more try at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseOptions:
    """Where the database is and how much of it one process takes."""

    url: str = field(repr=False)
    pool_size: int = 20
    pool_wait_seconds: float = 5.0
    connect_seconds: float = 5.0
    statement_seconds: float = 30.0
    application_name: str = "strata"


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

    def arguments(self, values: dict[str, Any]) -> list[object]:
        """The values in the order of the placeholders, text made storable.

        Every placeholder has to be given: a forgotten one must not become a silent NULL.
        """
        known = self._constants | values
        return [encode_text(value) if isinstance(value := known[name], str) else value for name in self._order]


async def connect(options: DatabaseOptions) -> "asyncpg.Connection[asyncpg.Record]":
    """One connection outside the pool. Raises `DatabaseUnavailable`, `DatabaseUnsupported` or `SettingsInvalid`."""
    with translated_errors():
        connection: asyncpg.Connection[asyncpg.Record] = await asyncpg.connect(
            options.url,
            timeout=options.connect_seconds,
            server_settings=_server_settings(options),
            target_session_attrs=_session_attributes(options.url),
        )
    require_supported(connection)
    return connection


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
            if not isinstance(error.__cause__, LOST):
                raise
            await self._forget_connections()
            if not repeatable:
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
            except pg.InterfaceError as error:
                # asyncpg has one class for a connection that is gone and for a wrong argument, which is a bug of ours.
                if acquired.is_closed():
                    raise DatabaseUnavailable("The database connection was lost.") from error
                raise
            finally:
                await pool.release(acquired)

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
            await asyncio.wait_for(self._pool.close(), timeout=self.options.connect_seconds)
        except TimeoutError:
            self._pool.terminate()

    def pool_counts(self) -> tuple[int, int]:
        """How many connections are open, and how many of these are in use."""
        if self._pool is None:
            return 0, 0
        size = self._pool.get_size()
        return size, size - self._pool.get_idle_size()

    async def _acquire(
        self, pool: "asyncpg.Pool[asyncpg.Record]"
    ) -> "asyncpg.pool.PoolConnectionProxy[asyncpg.Record]":
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
        pool: asyncpg.Pool[asyncpg.Record] = await asyncpg.create_pool(
            self.options.url,
            min_size=0,
            max_size=self.options.pool_size,
            timeout=self.options.connect_seconds,
            server_settings=_server_settings(self.options),
            target_session_attrs=_session_attributes(self.options.url),
            init=self._greet,
            reset=_keep,
        )
        return pool

    async def _greet(self, connection: Connection) -> None:
        require_supported(connection)
        if self._on_first_contact is not None:
            await self._on_first_contact(connection)
            self._on_first_contact = None

    async def _forget_connections(self) -> None:
        """After one connection was lost the others of the pool are suspect: each is replaced when it is next used."""
        _log.warning("postgres.connection_lost")
        if self._pool is not None:
            await self._pool.expire_connections()


def _server_settings(options: DatabaseOptions) -> dict[str, str]:
    return {
        "application_name": options.application_name,
        "statement_timeout": str(round(options.statement_seconds * 1000)),
        "timezone": "UTC",
        # Plans of short statements cost less than their compilation.
        "jit": "off",
    }


def _session_attributes(url: str) -> SessionAttribute | None:
    """With several hosts and no word on it, the one that takes writes is meant; libpq would take any."""
    parts = urlsplit(url)
    several = "," in parts.netloc or "," in "".join(parse_qs(parts.query).get("host", []))
    return SessionAttribute.read_write if several and "target_session_attrs" not in parse_qs(parts.query) else None


async def _keep(connection: Connection) -> None:
    """Instead of asyncpg's reset, which is a round trip per use: no statement here changes a session."""


def require_supported(connection: Connection) -> None:
    """Raises `DatabaseUnsupported` for a Postgres that is too old or a database that is not UTF-8."""
    version = connection.get_server_version()
    if version.major < OLDEST_VERSION:
        raise DatabaseUnsupported(f"The database runs PostgreSQL {version.major}; {OLDEST_VERSION} is the oldest.")
    encoding = connection.get_settings().server_encoding
    if encoding.upper() not in {"UTF8", "UTF-8"}:
        raise DatabaseUnsupported(f"The database has the encoding {encoding}.")


class translated_errors:  # noqa: N801  reason: reads as a statement where it is used
    """Turns what asyncpg raises into our errors, without secrets: its messages name hosts and users, not passwords."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None or isinstance(error, StrataError):
            return
        translated = translate(error)
        if translated is not None:
            raise translated from error


def translate(error: BaseException) -> StrataError | None:
    """Our word for an error of asyncpg, or None for one that is a bug of ours."""
    match error:
        case pg.InvalidPasswordError() | pg.InvalidAuthorizationSpecificationError() | pg.InvalidCatalogNameError():
            return DatabaseUnavailable(
                f"The database refuses the connection: {error}.", hint="Check STRATA_DATABASE_URL."
            )
        case pg.ClientConfigurationError():
            return SettingsInvalid(f"STRATA_DATABASE_URL is not usable: {error}.")
        case pg.QueryCanceledError():
            return DatabaseUnavailable("The database did not finish a statement within the time limit.")
        case pg.DiskFullError():
            return DatabaseUnavailable("The database's disk is full.", hint="Free some space on it.")
        case pg.TooManyConnectionsError():
            return DatabaseUnavailable("The database has no connection left.", hint="Lower STRATA_DATABASE_POOL_SIZE.")
        case pg.TargetServerAttributeNotMatched():
            return DatabaseUnavailable("None of the database hosts takes writes.")
        case TimeoutError():
            return DatabaseUnavailable("The database does not answer in time.")
        case pg.ReadOnlySQLTransactionError():
            return DatabaseUnavailable("The database has become read-only.")
        case OSError() | pg.PostgresConnectionError() | pg.OperatorInterventionError():
            return DatabaseUnavailable(f"The database cannot be reached: {_reason(error)}.")
        case _:
            return None


def _reason(error: BaseException) -> str:
    text = (str(error) or type(error).__name__).strip().rstrip(".")
    return text.splitlines()[0]
