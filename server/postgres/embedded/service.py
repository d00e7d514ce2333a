"""The embedded Postgres: one cluster per data directory, shared by every Strata process that uses the directory.

    <data_dir>/postgres/             the cluster (PGDATA)
    <data_dir>/log/                  its log, one file per weekday, each overwritten after a week
    <data_dir>/postgres.*.lock       four locks of the kernel (flock), which a killed process cannot leave behind
    <data_dir>/postgres.supervisor.log   what the supervisor did, and what Postgres said before its log was open

`users.lock` is held shared by every user; `supervisor.lock` is held exclusively by the supervisor, the process that
keeps Postgres running while there are users (supervisor.py). Arriving is serialised by `start.lock`, which the
supervisor takes to stop, and leaving by `leave.lock`. No lock file has content, no process number is remembered,
nothing is to be tidied up after a crash: the state of the locks is the state of the system.

There is no TCP. The socket has mode 0700, so the operating system decides who may connect, and Postgres trusts that.
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
from server.postgres.embedded.cluster import DATABASE, PORT, ROLE, KernelLock, Place, is_free, kernel_lock, open_own

if sys.platform != "win32":
    from server.postgres.embedded import supervisor

START_LIMIT_SECONDS: Final = 300.0
"""A failure is reported at once; only the recovery after a crash takes long, and giving up would make it start over."""
STOP_LIMIT_SECONDS: Final = 90.0
ARRIVAL_LIMIT_SECONDS: Final = START_LIMIT_SECONDS + STOP_LIMIT_SECONDS
WATCH_SECONDS: Final = 0.5
POLL_SECONDS: Final = 0.02
FULL_DISK_SECONDS: Final = 10.0
"""On a full disk the supervisor tries again and again; whoever comes to join it is told after this time."""
SLOW_START_SECONDS: Final = 3.0
SLOW_REPEAT_SECONDS: Final = 10.0
SUPERVISOR_OPTIONS: Final = ("-I", "-S", "-W", "ignore::DeprecationWarning")
"""Isolated. Python 3.12 warns of code between fork and exec beside threads; that of the supervisor takes no locks."""
SUPERVISOR_ATTEMPTS: Final = 3
"""For a supervisor that is killed before it could report."""

_log = logging.getLogger("strata.postgres")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedState:
    """What can be said about a data directory without starting anything."""

    pgdata: Path
    exists: bool
    readable: bool
    """False if this user may not look inside; then the rest is unknown."""
    major_version: str | None
    running: bool
    pid: int | None
    size_bytes: int | None
    free_bytes: int | None


class EmbeddedPostgres:
    """One process's hold on the embedded Postgres of a data directory.

    While it is held Postgres runs: it comes back when it is killed, and so does its supervisor. The kernel ends the
    hold of a process that dies. A child made by `fork` does not inherit it.
    """

    def __init__(self, place: Place, ensure_running: Callable[[], str]) -> None:
        """Takes the hold and starts Postgres if it does not run; use `open_embedded`."""
        self._place = place
        self._ensure_running = ensure_running
        self._closing = threading.Event()
        self._close_once = threading.Lock()
        self._users = KernelLock(place.lock("users"))
        try:
            self._socket_dir = self._enter()
        except BaseException:
            self._users.close()
            raise
        self._watcher = threading.Thread(target=self._watch, name="embedded-postgres", daemon=True)
        self._watcher.start()
        _guard_forks()
        _holds.add(self)
        atexit.register(self.close)

    @property
    def url(self) -> str:
        """The port is said although it is the usual one: PGPORT in the environment would change what is usual."""
        host = quote(self._socket_dir, safe="")
        return f"postgresql://{ROLE}@/{DATABASE}?host={host}&port={PORT}"

    @property
    def pgdata(self) -> Path:
        return self._place.pgdata

    @property
    def log_dir(self) -> Path:
        return self._place.log_dir

    def close(self) -> None:
        """Ends the hold. The last one to do so returns when Postgres has stopped, everyone else at once."""
        with self._close_once:
            if self._closing.is_set():
                return
            self._closing.set()
        atexit.unregister(self.close)
        _holds.discard(self)
        self._watcher.join(WATCH_SECONDS)
        try:
            if self._leave():
                self._await_stop()
        except OSError as error:  # the data directory may be gone, and closing must not fail for it
            _log.warning("postgres.leave_failed", extra={"reason": str(error)})
        finally:
            self._users.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def forget(self) -> None:
        """In a forked child: drops the copy of the hold, and leaves the parent's alone."""
        self._closing.set()
        atexit.unregister(self.close)
        self._users.close()

    def _enter(self) -> str:
        with kernel_lock(self._place.lock("start")) as start:
            if not start.acquire(shared=False, seconds=ARRIVAL_LIMIT_SECONDS) or not self._users.acquire(
                shared=True, seconds=STOP_LIMIT_SECONDS
            ):
                raise EmbeddedStartFailed(
                    f"Another process has been starting or stopping the Postgres in {self._place.pgdata} for "
                    f"{ARRIVAL_LIMIT_SECONDS:.0f} s.",
                    hint=f"Its progress is in {self._place.supervisor_log}.",
                )
            return self._ensure_running()

    def _leave(self) -> bool:
        """Whether we were the last. Those who leave are lined up: two at once would each take the other for a user."""
        with kernel_lock(self._place.lock("leave")) as leave:
            leave.acquire(shared=False, seconds=STOP_LIMIT_SECONDS)
            last = self._users.acquire(shared=False)
            self._users.release()
            return last

    def _await_stop(self) -> None:
        stopped = supervisor.wait_until(
            lambda: is_free(self._place.lock("supervisor")) or self._has_successor(), STOP_LIMIT_SECONDS
        )
        if not stopped:
            _log.warning("postgres.stop_overdue", extra={"pgdata": str(self.pgdata)})

    def _has_successor(self) -> bool:
        """Whether somebody came as we left. If the lock cannot even be shared it is the supervisor, who is stopping."""
        found = self._users.acquire(shared=True) and not self._users.acquire(shared=False)
        self._users.release()
        return found

    def _watch(self) -> None:
        """Appoints a new supervisor when the old one was killed. Whoever of the users comes first does it for all."""
        pause = WATCH_SECONDS
        while not self._closing.wait(pause):
            pause = WATCH_SECONDS
            try:
                if is_free(self._place.lock("supervisor")):
                    _log.warning("postgres.supervisor_lost", extra={"pgdata": str(self.pgdata)})
                    self._restart()
            except (Setup, OSError) as error:
                pause = supervisor.LONGEST_PAUSE_SECONDS
                _log.error("postgres.restart_failed", extra={"reason": str(error)})

    def _restart(self) -> None:
        """Never on an empty place: a directory that was removed under a running server is not made anew, but empty."""
        if not (self.pgdata / "PG_VERSION").exists():
            raise DataDirectoryForbidden(f"{self.pgdata} has been removed.", path=str(self.pgdata))
        with kernel_lock(self._place.lock("start")) as start:
            if start.acquire(shared=False, seconds=WATCH_SECONDS):
                self._ensure_running()


_holds: weakref.WeakSet[EmbeddedPostgres] = weakref.WeakSet()


@functools.cache
def _guard_forks() -> None:
    os.register_at_fork(after_in_child=_forget_holds)


def _forget_holds() -> None:
    for hold in list(_holds):
        hold.forget()
    _holds.clear()


def open_embedded(
    data_dir: Path, *, user: str = "strata-postgres", extra_settings: Mapping[str, str] | None = None
) -> EmbeddedPostgres:
    """Takes a hold on the Postgres of the data directory, which is made and started as needed. Blocks.

    `user` is the account it runs under if we are root. `extra_settings` count only if it has to be started.
    Raises `DataDirectoryForbidden`, `DataDirectoryIncompatible`, `DiskFull` or `EmbeddedStartFailed`.
    """
    place = _place(data_dir)
    with explained(place.data_dir):
        cluster.make_data_dir(place.data_dir)
        return EmbeddedPostgres(place, functools.partial(_ensure_running, place, user, dict(extra_settings or {})))


def _ensure_running(place: Place, user: str, extra_settings: Mapping[str, str]) -> str:
    """Returns the directory of the socket when Postgres answers there.

    The caller holds the start lock and is a user, so nobody stops it meanwhile. A supervisor that is there is trusted
    to bring it up. If it dies while we wait, its lock is free and we take over.
    """
    began_at = time.monotonic()
    attempts = 0
    while (waited := time.monotonic() - began_at) < START_LIMIT_SECONDS:
        with kernel_lock(place.lock("supervisor")) as lock:
            if lock.acquire(shared=False):
                _require_attempts_left(place, attempts)
                attempts += 1
                _appoint_supervisor(place, lock, user, extra_settings)
        socket_dir = _find_socket_dir(place)
        if socket_dir is not None:
            return socket_dir
        if waited > FULL_DISK_SECONDS:
            cluster.require_space(place.data_dir, cluster.RUNNING_FREE_BYTES)
        time.sleep(POLL_SECONDS)
    raise explain_output(cluster.new_log(place.log_dir, {}), place.pgdata, place.log_dir)


def _require_attempts_left(place: Place, attempts: int) -> None:
    if attempts >= SUPERVISOR_ATTEMPTS:
        raise EmbeddedStartFailed(
            f"The supervisor of Postgres ended before Postgres was ready (log: {place.supervisor_log})."
        )


def _appoint_supervisor(place: Place, lock: KernelLock, user: str, extra_settings: Mapping[str, str]) -> None:
    """Returns when it has reported that Postgres is ready, or was killed before it could. A failure is raised."""
    command, account = cluster.prepare(place, user, extra_settings)
    sizes = cluster.log_sizes(place.log_dir)
    reader, writer = os.pipe()
    orders = supervisor.SupervisorConfig(
        pgdata=str(place.pgdata),
        command=command,
        start_lock=str(place.lock("start")),
        users_lock=str(place.lock("users")),
        supervisor_lock=str(lock.path),
        uid=account.uid if account else None,
        gid=account.gid if account else None,
        supervisor_fd=lock.fd,
        report_fd=writer,
    )
    try:
        try:
            _spawn_supervisor(place, orders)
        finally:
            os.close(writer)
        report = _await_report(place, reader)
    finally:
        os.close(reader)
    match report:
        case ["ready", _]:
            _log.info("postgres.started", extra={"pgdata": str(place.pgdata)})
        case ["failed", reason]:
            raise explain_output(f"{reason}\n{cluster.new_log(place.log_dir, sizes)}", place.pgdata, place.log_dir)
        case _:
            _log.warning("postgres.supervisor_lost", extra={"pgdata": str(place.pgdata)})


def _spawn_supervisor(place: Place, orders: supervisor.SupervisorConfig) -> None:
    """In a session of its own, so that Ctrl-C in our terminal is not for it. The process that we start ends at once."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    log = open_own(place.supervisor_log, os.O_WRONLY | os.O_APPEND)
    try:
        subprocess.run(  # noqa: S603  reason: our own program
            [
                sys.executable,
                *SUPERVISOR_OPTIONS,
                str(Path(supervisor.__file__)),
                json.dumps(dataclasses.asdict(orders)),
            ],
            cwd="/",
            env=kept,  # what this interpreter may need to run, and none of our secrets: the supervisor outlives us
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=(orders.supervisor_fd, orders.report_fd),
            check=False,  # what counts is the report
        )
    finally:
        os.close(log)


def _await_report(place: Place, reader: int) -> object:
    """What the supervisor says, or None if it died. A start that takes its time is a recovery, and gets said so."""
    began_at = time.monotonic()
    wait = SLOW_START_SECONDS
    poll = select.poll()  # `select` itself fails for file numbers above 1023, and a server may have as many
    poll.register(reader, select.POLLIN)
    while not poll.poll(wait * 1000):
        seconds = round(time.monotonic() - began_at)
        if seconds > START_LIMIT_SECONDS:
            raise EmbeddedStartFailed(
                f"The embedded Postgres was not ready within {START_LIMIT_SECONDS:.0f} s (log: {place.log_dir})."
            )
        _log.warning("postgres.recovering", extra={"pgdata": str(place.pgdata), "waited_seconds": seconds})
        wait = SLOW_REPEAT_SECONDS
    with open(reader, "rb", closefd=False) as pipe:
        line = pipe.readline()
    return json.loads(line) if line else None


def _find_socket_dir(place: Place) -> str | None:
    """Where Postgres takes connections, if it does. Its file alone is no proof: after kill -9 it still says so."""
    file = supervisor.read_postmaster_file(str(place.pgdata))
    if file is None or not file.ready:
        return None
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(f"{file.socket_dir}/.s.PGSQL.{PORT}")
        except OSError:
            return None
    return file.socket_dir


def describe_embedded(data_dir: Path) -> EmbeddedState:
    """Looks, and neither starts nor makes anything."""
    place = _place(data_dir)
    pgdata = place.pgdata
    readable, version, pid, size, free = True, None, None, None, None
    try:
        free = shutil.disk_usage(place.data_dir).free
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


def _place(data_dir: Path) -> Place:
    if sys.platform == "win32":
        raise EmbeddedStartFailed(
            "The embedded Postgres does not run on Windows.", hint="Set STRATA_DATABASE_URL, or use WSL or a container."
        )
    return Place(data_dir=Path(data_dir).expanduser().resolve())
