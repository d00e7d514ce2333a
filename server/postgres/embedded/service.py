"""The embedded Postgres: one cluster per data directory, shared by all Strata processes that use the directory.

    <data_dir>/postgres/                 the cluster (PGDATA)
    <data_dir>/log/                      its log, one file per weekday, each overwritten after a week
    <data_dir>/postgres.*.lock           four kernel locks (flock), which are released when a process dies
    <data_dir>/postgres.supervisor.log   the log of the supervisor, with the output of Postgres before its log is open

Every process that uses the cluster holds `users.lock` shared. The supervisor, the process that keeps Postgres running
while there are users (supervisor.py), holds `supervisor.lock` exclusively. `start.lock` serialises the processes that
open the cluster, and the supervisor takes it to stop; `leave.lock` serialises those that close it. Lock files have no
content and no process id is stored, so nothing has to be cleaned up after a crash: the locks are the state.

Postgres does not listen on TCP. The socket has mode 0700, so the operating system decides who may connect, and
Postgres trusts every connection.
"""

import atexit
import dataclasses
import functools
import json
import logging
import os
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self
from urllib.parse import quote

from server.conversation.errors import DataDirectoryForbidden, EmbeddedStartFailed, Setup
from server.postgres.embedded import cluster
from server.postgres.embedded.binaries import explain_output, explained
from server.postgres.embedded.cluster import (
    DATABASE,
    PORT,
    ROLE,
    DataDirectory,
    KernelLock,
    is_free,
    kernel_lock,
    open_own,
)

if sys.platform != "win32":
    from server.postgres.embedded import supervisor

START_LIMIT_SECONDS: Final = 300.0
"""Failures are reported at once. Only crash recovery takes long, and would start over if it were interrupted."""
STOP_LIMIT_SECONDS: Final = 90.0
ARRIVAL_LIMIT_SECONDS: Final = START_LIMIT_SECONDS + STOP_LIMIT_SECONDS
WATCH_SECONDS: Final = 0.5
POLL_SECONDS: Final = 0.02
FULL_DISK_SECONDS: Final = 10.0
"""The supervisor retries on a full disk; a process that opens the cluster gets an error after this time."""
SLOW_START_SECONDS: Final = 3.0
SLOW_REPEAT_SECONDS: Final = 10.0
SUPERVISOR_OPTIONS: Final = ("-I", "-S", "-W", "ignore::DeprecationWarning")
"""Isolated. Python 3.12 warns of code that runs between fork and exec; the supervisor's takes no locks."""
SUPERVISOR_ATTEMPTS: Final = 3
"""How often a supervisor is started again that died before it reported."""

_log = logging.getLogger("strata.postgres")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedState:
    """The state of a data directory, determined without starting anything."""

    pgdata: Path
    exists: bool
    readable: bool
    """False if this account may not read the directory; then the rest is unknown."""
    major_version: str | None
    running: bool
    pid: int | None
    size_bytes: int | None
    free_bytes: int | None


class EmbeddedPostgres:
    """The use of an embedded Postgres by this process, until it is closed.

    Postgres runs while there is a user: it is restarted when it is killed, and so is its supervisor. The use ends when
    the process dies. A forked child does not inherit it.
    """

    def __init__(self, directory: DataDirectory, ensure_running: Callable[[], str]) -> None:
        """Register as a user and start Postgres if it does not run. Call `open_embedded` instead."""
        self._directory = directory
        self._ensure_running = ensure_running
        self._closing = threading.Event()
        self._close_once = threading.Lock()
        self._users = KernelLock(directory.lock("users"))
        try:
            self._socket_dir = self._enter()
        except BaseException:
            self._users.close()
            raise
        self._watcher = threading.Thread(target=self._watch, name="embedded-postgres", daemon=True)
        self._watcher.start()
        _guard_forks()
        _instances.add(self)
        atexit.register(self.close)

    @property
    def url(self) -> str:
        """The URL of the database. It names the default port because PGPORT in the environment would override it."""
        host = quote(self._socket_dir, safe="")
        return f"postgresql://{ROLE}@/{DATABASE}?host={host}&port={PORT}"

    @property
    def pgdata(self) -> Path:
        return self._directory.pgdata

    @property
    def log_dir(self) -> Path:
        return self._directory.log_dir

    def close(self) -> None:
        """End the use. If it was the last one, wait until Postgres has stopped."""
        with self._close_once:
            if self._closing.is_set():
                return
            self._closing.set()
        atexit.unregister(self.close)
        _instances.discard(self)
        self._watcher.join(WATCH_SECONDS)
        try:
            if self._leave():
                self._await_stop()
        except OSError as error:  # the data directory may be gone, and closing must not fail because of that
            _log.warning("postgres.leave_failed", extra={"reason": str(error)})
        finally:
            self._users.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def detach(self) -> None:
        """Close the copy in a forked child without an effect on the parent."""
        self._closing.set()
        atexit.unregister(self.close)
        self._users.close()

    def _enter(self) -> str:
        with kernel_lock(self._directory.lock("start")) as start:
            if not start.acquire(shared=False, seconds=ARRIVAL_LIMIT_SECONDS) or not self._users.acquire(
                shared=True, seconds=STOP_LIMIT_SECONDS
            ):
                raise EmbeddedStartFailed(
                    f"Another process has been starting or stopping the Postgres in {self._directory.pgdata} for "
                    f"{ARRIVAL_LIMIT_SECONDS:.0f} s.",
                    hint=f"Its progress is in {self._directory.supervisor_log}.",
                )
            return self._ensure_running()

    def _leave(self) -> bool:
        """Return whether this was the last user. Serialised, because two at once would each see the other as a user."""
        with kernel_lock(self._directory.lock("leave")) as leave:
            leave.acquire(shared=False, seconds=STOP_LIMIT_SECONDS)
            last = self._users.acquire(shared=False)
            self._users.release()
            return last

    def _await_stop(self) -> None:
        stopped = supervisor.wait_until(
            lambda: is_free(self._directory.lock("supervisor")) or self._has_successor(), STOP_LIMIT_SECONDS
        )
        if not stopped:
            _log.warning("postgres.stop_overdue", extra={"pgdata": str(self.pgdata)})

    def _has_successor(self) -> bool:
        """Return whether there is a new user. If the lock cannot even be shared, the supervisor has it and stops."""
        found = self._users.acquire(shared=True) and not self._users.acquire(shared=False)
        self._users.release()
        return found

    def _watch(self) -> None:
        """Start a new supervisor when the old one was killed. The first user that notices does it for all."""
        pause = WATCH_SECONDS
        while not self._closing.wait(pause):
            pause = WATCH_SECONDS
            try:
                if is_free(self._directory.lock("supervisor")):
                    _log.warning("postgres.supervisor_lost", extra={"pgdata": str(self.pgdata)})
                    self._restart()
            except (Setup, OSError) as error:
                pause = supervisor.MAX_PAUSE_SECONDS
                _log.error("postgres.restart_failed", extra={"reason": str(error)})

    def _restart(self) -> None:
        """Restart an existing cluster. One that was removed while the server ran must not come back empty."""
        if not (self.pgdata / "PG_VERSION").exists():
            raise DataDirectoryForbidden(f"{self.pgdata} has been removed.", path=str(self.pgdata))
        with kernel_lock(self._directory.lock("start")) as start:
            if start.acquire(shared=False, seconds=WATCH_SECONDS):
                self._ensure_running()


_instances: weakref.WeakSet[EmbeddedPostgres] = weakref.WeakSet()


@functools.cache
def _guard_forks() -> None:
    os.register_at_fork(after_in_child=_detach_instances)


def _detach_instances() -> None:
    for instance in list(_instances):
        instance.detach()
    _instances.clear()


def open_embedded(
    data_dir: Path, *, user: str = "strata-postgres", extra_settings: Mapping[str, str] | None = None
) -> EmbeddedPostgres:
    """Open the Postgres of the data directory, and create and start it if needed. Blocks.

    `user`: the account that Postgres runs under if this process is root. `extra_settings`: used if it is started.
    Raises `DataDirectoryForbidden`, `DataDirectoryIncompatible`, `DiskFull` or `EmbeddedStartFailed`.
    """
    directory = _find_directory(data_dir)
    with explained(directory.data_dir):
        cluster.make_data_dir(directory.data_dir)
        return EmbeddedPostgres(
            directory, functools.partial(_ensure_running, directory, user, dict(extra_settings or {}))
        )


def _ensure_running(directory: DataDirectory, user: str, extra_settings: Mapping[str, str]) -> str:
    """Wait until Postgres accepts connections, and return the directory of its socket.

    The caller holds the start lock and is a user, so the server is not stopped meanwhile. A running supervisor starts
    it; if that dies, its lock is free and a new one is started here.
    """
    began_at = time.monotonic()
    attempts = 0
    while (waited := time.monotonic() - began_at) < START_LIMIT_SECONDS:
        with kernel_lock(directory.lock("supervisor")) as lock:
            if lock.acquire(shared=False):
                _require_attempts_left(directory, attempts)
                attempts += 1
                _start_supervisor(directory, lock, user, extra_settings)
        socket_dir = _find_socket_dir(directory)
        if socket_dir is not None:
            return socket_dir
        if waited > FULL_DISK_SECONDS:
            cluster.require_space(directory.data_dir, cluster.RUNNING_FREE_BYTES)
        time.sleep(POLL_SECONDS)
    raise explain_output(cluster.new_log(directory.log_dir, {}), directory.pgdata, directory.log_dir)


def _require_attempts_left(directory: DataDirectory, attempts: int) -> None:
    if attempts >= SUPERVISOR_ATTEMPTS:
        raise EmbeddedStartFailed(
            f"The supervisor of Postgres ended before Postgres was ready (log: {directory.supervisor_log})."
        )


def _start_supervisor(directory: DataDirectory, lock: KernelLock, user: str, extra_settings: Mapping[str, str]) -> None:
    """Start a supervisor, and wait for its report or its death. Raises the error that it reports."""
    command, account = cluster.prepare(directory, user, extra_settings)
    sizes = cluster.log_sizes(directory.log_dir)
    reader, writer = os.pipe()
    config = supervisor.SupervisorConfig(
        pgdata=str(directory.pgdata),
        command=command,
        start_lock=str(directory.lock("start")),
        users_lock=str(directory.lock("users")),
        supervisor_lock=str(lock.path),
        uid=account.uid if account else None,
        gid=account.gid if account else None,
        supervisor_fd=lock.fd,
        report_fd=writer,
    )
    try:
        try:
            _spawn_supervisor(directory, config)
        finally:
            os.close(writer)
        report = _await_report(directory, reader)
    finally:
        os.close(reader)
    match report:
        case ["ready", _]:
            _log.info("postgres.started", extra={"pgdata": str(directory.pgdata)})
        case ["failed", reason]:
            raise explain_output(
                f"{reason}\n{cluster.new_log(directory.log_dir, sizes)}", directory.pgdata, directory.log_dir
            )
        case _:
            _log.warning("postgres.supervisor_lost", extra={"pgdata": str(directory.pgdata)})


def _spawn_supervisor(directory: DataDirectory, config: supervisor.SupervisorConfig) -> None:
    """Run it in a session of its own, which Ctrl-C in our terminal does not reach. It forks, and the parent exits."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    log = open_own(directory.supervisor_log, os.O_WRONLY | os.O_APPEND)
    try:
        subprocess.run(  # noqa: S603  reason: our own program
            [
                sys.executable,
                *SUPERVISOR_OPTIONS,
                str(Path(supervisor.__file__)),
                json.dumps(dataclasses.asdict(config)),
            ],
            cwd="/",
            env=kept,  # what the interpreter may need, and none of our secrets: the supervisor outlives this process
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=(config.supervisor_fd, config.report_fd),
            check=False,  # the report decides
        )
    finally:
        os.close(log)


def _await_report(directory: DataDirectory, reader: int) -> object:
    """Return the report of the supervisor, or None if it died. Logs a slow start, which is a crash recovery."""
    began_at = time.monotonic()
    wait = SLOW_START_SECONDS
    poll = select.poll()  # `select` fails for file descriptors above 1023, which a server may have
    poll.register(reader, select.POLLIN)
    while not poll.poll(wait * 1000):
        seconds = round(time.monotonic() - began_at)
        if seconds > START_LIMIT_SECONDS:
            raise EmbeddedStartFailed(
                f"The embedded Postgres was not ready within {START_LIMIT_SECONDS:.0f} s (log: {directory.log_dir})."
            )
        _log.warning("postgres.recovering", extra={"pgdata": str(directory.pgdata), "waited_seconds": seconds})
        wait = SLOW_REPEAT_SECONDS
    with open(reader, "rb", closefd=False) as pipe:
        line = pipe.readline()
    return json.loads(line) if line else None


def _find_socket_dir(directory: DataDirectory) -> str | None:
    """Return the directory of the socket if Postgres accepts connections. After kill -9 its file is outdated."""
    file = supervisor.read_postmaster_file(str(directory.pgdata))
    if file is None or not file.ready:
        return None
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(f"{file.socket_dir}/.s.PGSQL.{PORT}")
        except OSError:
            return None
    return file.socket_dir


def describe_embedded(data_dir: Path) -> EmbeddedState:
    """Describe the cluster of a data directory without starting or creating anything."""
    directory = _find_directory(data_dir)
    pgdata = directory.pgdata
    readable, version, pid, size, free = True, None, None, None, None
    try:
        free = shutil.disk_usage(directory.data_dir).free
        version = (pgdata / "PG_VERSION").read_text(encoding="ascii", errors="replace").strip()
        file = supervisor.read_postmaster_file(str(pgdata))
        pid = file.pid if file is not None and file.pid in supervisor.processes_of(str(pgdata)) else None
        size = cluster.size_of(pgdata)
    except PermissionError:
        readable = False
    except (FileNotFoundError, NotADirectoryError):
        pass
    return EmbeddedState(
        pgdata=pgdata,
        exists=version is not None,
        readable=readable,
        major_version=version,
        running=pid is not None,
        pid=pid,
        size_bytes=size,
        free_bytes=free,
    )


def _find_directory(data_dir: Path) -> DataDirectory:
    if sys.platform == "win32":
        raise EmbeddedStartFailed(
            "The embedded Postgres does not run on Windows.", hint="Set STRATA_DATABASE_URL, or use WSL or a container."
        )
    return DataDirectory(data_dir=Path(data_dir).expanduser().resolve())
