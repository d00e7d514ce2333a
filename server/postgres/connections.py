"""Connecting to Postgres: the choice of a host, the settings of a session, and the translation of errors."""

import asyncio
import re
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import asyncpg
from asyncpg import exceptions as pg

from server.conversation.errors import DatabaseUnavailable, DatabaseUnsupported, SettingsInvalid, StrataError

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record] | asyncpg.pool.PoolConnectionProxy[asyncpg.Record]"

OLDEST_VERSION: Final = 15
_KEEP_ALIVE_IDLE_SECONDS: Final = 30
_KEEP_ALIVE_INTERVAL_SECONDS: Final = 5
_KEEP_ALIVE_COUNT: Final = 3
"""Both sides end a connection 45 s after the other has disappeared."""
_NUMBERS: Final = re.compile(r"\[[^\]]*\] | \(_ssl\.c:\d+\)")
_CHECK_URL: Final = "Check STRATA_DATABASE_URL."
_MALFORMED: Final = "it is malformed"
"""Without details: parts of a password may be in the position of a host or a port."""
_SESSION_ATTRIBUTES: Final = ("read-write", "primary", "any")
"""The values that select a host which accepts writes."""
_REPLICA_ATTRIBUTES: Final = ("any", "prefer-standby", "standby", "read-only")

_WRONG_OPTION: Final = (
    pg.ClientConfigurationError,
    # Options that asyncpg does not know go to the server as settings of the session.
    pg.UndefinedObjectError,
    pg.InvalidParameterValueError,
    pg.CantChangeRuntimeParamError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseOptions:
    """The address of the database, and the limits of one process."""

    url: str = field(repr=False)
    pool_size: int = 20
    pool_wait_seconds: float = 5.0
    connect_seconds: float = 5.0
    statement_seconds: float = 30.0
    lock_seconds: float = 15.0
    """Postgres cancels a statement that waits longer for a lock; 0 means no limit."""
    idle_transaction_seconds: float = 10.0
    """Postgres ends a session whose transaction is idle for this long, such as that of a frozen process, and releases
    its locks; 0 means no limit. Less than `lock_seconds`, so that a statement that waits for such a lock gets it.
    """
    plan_cache_mode: str = "force_generic_plan"
    """How Postgres plans prepared statements; see its documentation."""
    application_name: str = "strata"
    is_replica: bool = False
    """Whether a host that takes no writes is accepted."""
    search_path: str | None = None
    """The schemas in which names are looked up; None: the default of the role."""


async def connect(options: DatabaseOptions) -> "asyncpg.Connection[asyncpg.Record]":
    """Open a connection outside the pool. Raises `DatabaseUnavailable`, `DatabaseUnsupported` or `SettingsInvalid`."""
    with translated_errors():
        connection = await connect_to_one(read_hosts(options.url, is_replica=options.is_replica), options)
    try:
        require_supported(connection)
    except DatabaseUnsupported:
        await connection.close()
        raise
    return connection


def _server_settings(options: DatabaseOptions) -> dict[str, str]:
    path = {} if options.search_path is None else {"search_path": options.search_path}
    return path | {
        "application_name": options.application_name,
        "statement_timeout": _milliseconds(options.statement_seconds),
        "lock_timeout": _milliseconds(options.lock_seconds),
        "idle_in_transaction_session_timeout": _milliseconds(options.idle_transaction_seconds),
        # Postgres detects that a client's machine is gone, and releases its locks. Ignored on a Unix socket.
        "tcp_keepalives_idle": str(_KEEP_ALIVE_IDLE_SECONDS),
        "tcp_keepalives_interval": str(_KEEP_ALIVE_INTERVAL_SECONDS),
        "tcp_keepalives_count": str(_KEEP_ALIVE_COUNT),
        "timezone": "UTC",
        # The statements are short and find rows by key: planning them each time, or compiling the plan, costs more
        # than running them. Citus chooses the node of a statement when it plans with the values, and needs `auto`.
        "jit": "off",
        "plan_cache_mode": options.plan_cache_mode,
        # A plan made while the tables are nearly empty would use sequential scans, and keep them as the tables grow
        # until the statistics are renewed. With index scans from the first row on, a turn costs the same in every
        # database. For the same reason a condition on the tenant in addition to a key is written `(tenant_id = …) IS
        # TRUE`: no index supports it, so the planner does not prefer a small index on the tenant to that of the key.
        "enable_seqscan": "off",
    }


def _milliseconds(seconds: float) -> str:
    return str(round(seconds * 1000))


def _keep_alive(connection: "asyncpg.Connection[asyncpg.Record]") -> None:
    """Enable TCP keepalive, which detects that the database's machine is gone while a connection is idle."""
    transport: asyncio.Transport = connection._transport  # type: ignore[attr-defined]  # noqa: SLF001  reason: asyncpg has no option for it
    peer = transport.get_extra_info("socket")
    if peer is None or peer.family not in {socket.AF_INET, socket.AF_INET6}:
        return
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _KEEP_ALIVE_IDLE_SECONDS),
        ("TCP_KEEPINTVL", _KEEP_ALIVE_INTERVAL_SECONDS),
        ("TCP_KEEPCNT", _KEEP_ALIVE_COUNT),
    ):
        # Not every system has all of them.
        if hasattr(socket, name):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def read_hosts(url: str, *, is_replica: bool = False) -> list[str]:
    """Split a URL with several hosts into one URL per host, in the same order. Raises `SettingsInvalid`.

    With several hosts `target_session_attrs` defaults to `read-write`, and to `any` for replicas; in libpq it is `any`.
    """
    attributes = _REPLICA_ATTRIBUTES if is_replica else _SESSION_ATTRIBUTES
    try:
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
    except ValueError:
        raise _unusable(_MALFORMED) from None
    account, at, netloc = parts.netloc.rpartition("@")
    hosts, ports = (text.split(",") for text in (netloc or query.get("host", ""), query.get("port", "")))
    several = len(hosts) > 1
    countable = len(ports) in {1, len(hosts)} and (all(hosts) or not several)
    if parts.scheme not in {"postgresql", "postgres"} or not countable:
        raise _unusable(_MALFORMED)
    if (
        query.setdefault("target_session_attrs", "read-write" if several and not is_replica else "any")
        not in attributes
    ):
        raise _unusable(f"target_session_attrs has to be one of {', '.join(attributes)}")
    _require_readable(query)
    if not several:
        return [url]
    if netloc:
        parts = parts._replace(query=urlencode(query))
        return [urlunsplit(parts._replace(netloc=f"{account}{at}{host}")) for host in hosts]
    addresses = [{"host": host, "port": port} for host, port in zip(hosts, cycle(ports), strict=False)]
    return [urlunsplit(parts._replace(query=urlencode(query | address))) for address in addresses]


def _require_readable(query: Mapping[str, str]) -> None:
    """Raise `SettingsInvalid` for a TLS file that is missing or, for the root certificates, malformed."""
    for name in sorted(query.keys() & {"sslrootcert", "sslcrl", "sslcert", "sslkey"}):
        try:
            Path(query[name]).open("rb").close()
            if name == "sslrootcert":
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(query[name])
        except OSError as error:
            raise _unusable(f"its {name} cannot be read: {_reason(error)}") from error


def _unusable(reason: str) -> SettingsInvalid:
    hint = "It looks like postgresql://user:password@host:5432/database; special characters are percent-encoded."
    return SettingsInvalid(f"STRATA_DATABASE_URL is not usable: {reason}.", hint=hint)


async def connect_to_one(
    hosts: list[str], options: DatabaseOptions, **arguments: Any
) -> "asyncpg.Connection[asyncpg.Record]":
    """Connect to the first usable host, and move it to the front, so that the next connection tries it first.

    Each host gets an equal share of the time limit. asyncpg has one limit for all hosts, so that a dead machine at the
    front would use it up and its successor would never be tried.
    """
    arguments |= {"timeout": options.connect_seconds / len(hosts), "server_settings": _server_settings(options)}
    failures: list[Exception] = []
    for url in list(hosts):
        try:
            connection: asyncpg.Connection[asyncpg.Record] = await asyncpg.connect(url, **arguments)
        except _WRONG_OPTION as error:
            raise _unusable(_reason(error)) from error
        except pg.TargetServerAttributeNotMatched:
            failures.append(DatabaseUnavailable("None of the database hosts takes writes."))
        except (OSError, pg.PostgresError) as error:
            failures.append(error)
        except (ValueError, OverflowError):
            raise _unusable(_MALFORMED) from None
        else:
            _keep_alive(connection)
            hosts.remove(url)
            hosts.insert(0, url)
            return connection
    # The error of a server is more helpful than that another one did not answer.
    raise max(failures, key=lambda error: not isinstance(error, OSError))


def require_supported(connection: Connection) -> None:
    """Raise `DatabaseUnsupported` if Postgres is too old or the database is not UTF-8."""
    version = connection.get_server_version()
    if version.major < OLDEST_VERSION:
        raise DatabaseUnsupported(f"The database runs PostgreSQL {version.major}; {OLDEST_VERSION} is the oldest.")
    encoding = connection.get_settings().server_encoding
    if encoding.upper() not in {"UTF8", "UTF-8"}:
        raise DatabaseUnsupported(f"The database has the encoding {encoding}.")


class translated_errors:  # noqa: N801  reason: used as a statement
    """Translate errors of asyncpg into ours. Its messages contain hosts and users, but no passwords."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None or isinstance(error, StrataError):
            return
        translated = translate(error)
        if translated is not None:
            raise translated from error


_UNAVAILABLE: Final[Mapping[type[BaseException], tuple[str, str]]] = {
    pg.InvalidAuthorizationSpecificationError: ("The database refuses the connection: {}.", _CHECK_URL),
    pg.InvalidCatalogNameError: ("The database refuses the connection: {}.", _CHECK_URL),
    pg.InsufficientPrivilegeError: (
        "The database refuses access: {}.",
        "Grant the user of STRATA_DATABASE_URL access.",
    ),
    pg.QueryCanceledError: ("The database did not finish a statement within the time limit.", ""),
    pg.LockNotAvailableError: ("A row of the database stayed locked for too long.", ""),
    pg.TransactionRollbackError: ("The database rolled back a statement because of a conflict with another one.", ""),
    pg.IdleInTransactionSessionTimeoutError: ("The database ended a transaction that was idle for too long.", ""),
    pg.DiskFullError: ("The database's disk is full.", "Free some space on it."),
    pg.TooManyConnectionsError: ("The database has no connection left.", "Lower STRATA_DATABASE_POOL_SIZE."),
    pg.InsufficientResourcesError: ("The database has run out of a resource: {}.", ""),
    pg.PostgresSystemError: ("The database's system fails: {}.", ""),
    pg.ReadOnlySQLTransactionError: ("The database has become read-only.", ""),
    TimeoutError: ("The database does not answer in time.", ""),
    ssl.SSLCertVerificationError: ("The database's certificate is not trusted: {}.", _CHECK_URL),
    OSError: ("The database cannot be reached: {}.", ""),
    pg.PostgresConnectionError: ("The database cannot be reached: {}.", ""),
    pg.OperatorInterventionError: ("The database cannot be reached: {}.", ""),
}
"""Message and hint for errors of asyncpg. The first match is used."""


def translate(error: BaseException) -> StrataError | None:
    """Return our error for one of asyncpg, or None if it is a bug of ours."""
    for kind, (sentence, hint) in _UNAVAILABLE.items():
        if isinstance(error, kind):
            return DatabaseUnavailable(sentence.format(_reason(error)), hint=hint)
    return None


def _reason(error: BaseException) -> str:
    """Return the message of an error as a part of a sentence, without codes of its library."""
    text = getattr(error, "verify_message", "") or getattr(error, "strerror", "") or str(error) or type(error).__name__
    return _NUMBERS.sub("", text).strip().splitlines()[0].rstrip(".")
