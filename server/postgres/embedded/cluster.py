"""The cluster of the embedded Postgres on disk: paths and locks, its creation, and the command line of the server."""

import contextlib
import functools
import logging
import os
import secrets
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from server.conversation.errors import DataDirectoryForbidden, DataDirectoryIncompatible, DiskFull, EmbeddedStartFailed
from server.postgres.embedded.binaries import (
    MAJOR_VERSION,
    UNFINISHED,
    Account,
    Programs,
    choose_account,
    explain_output,
    explained,
    find_programs,
    reachable_programs,
    require_entry,
    run_program,
)

if sys.platform != "win32":
    import fcntl

    from server.postgres.embedded.supervisor import cluster_name, wait_until

ROLE: Final = "strata"
DATABASE: Final = "strata"
PORT: Final = 5432
"""Only a part of the name of the socket's file."""
MINIMUM_FREE_BYTES: Final = 128 * 1024 * 1024
"""A new cluster takes 50 MB; with less space than this the disk would soon be full."""
RUNNING_FREE_BYTES: Final = 32 * 1024 * 1024
"""Two segments of the write-ahead log. If a server does not start with less than this, the disk is full."""
SOCKET_PATH_LIMIT: Final = 103
"""Maximum length of the path of a Unix socket in bytes: 107 on Linux, 103 on macOS."""
_REMOVE_SECONDS: Final = 5.0
_LOG_TAIL_BYTES: Final = 8192
_WEEK_SECONDS: Final = 6 * 24 * 3600.0
_log = logging.getLogger("strata.postgres")

SETTINGS: Final[Mapping[str, str]] = {
    "listen_addresses": "",
    "port": str(PORT),
    "unix_socket_permissions": "0700",
    "fsync": "on",
    "full_page_writes": "on",
    "synchronous_commit": "on",
    "shared_buffers": "128MB",
    "max_connections": "100",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "logging_collector": "on",
    "log_filename": "postgres-%a.log",
    "log_file_mode": "0600",
    "log_rotation_age": "1d",
    "log_rotation_size": "0",
    "log_truncate_on_rotation": "on",
    # No content of conversations in the log: no statements, no parameters, no DETAIL with the values of a row.
    "log_statement": "none",
    "log_min_error_statement": "panic",
    "log_min_duration_statement": "-1",
    "log_error_verbosity": "terse",
    "log_parameter_max_length": "0",
    "log_parameter_max_length_on_error": "0",
}
"""Passed on the command line at every start, which overrides what an older release or ALTER SYSTEM wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataDirectory:
    """The paths in a data directory."""

    data_dir: Path

    @property
    def pgdata(self) -> Path:
        return self.data_dir / "postgres"

    @property
    def log_dir(self) -> Path:
        return self.data_dir / "log"

    @property
    def supervisor_log(self) -> Path:
        return self.data_dir / "postgres.supervisor.log"

    def lock(self, name: str) -> Path:
        return self.data_dir / f"postgres.{name}.lock"


class KernelLock:
    """A kernel lock (flock) on a file. Programs that are started do not inherit it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = open_own(path, os.O_RDWR)

    def acquire(self, *, shared: bool, seconds: float = 0.0) -> bool:
        """Return whether it was acquired in time. A lock of the other kind is converted, or lost."""
        operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        return wait_until(lambda: self._try(operation), seconds)

    def release(self) -> None:
        fcntl.flock(self.fd, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self.fd)

    def _try(self, operation: int) -> bool:
        try:
            fcntl.flock(self.fd, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


@contextlib.contextmanager
def kernel_lock(path: Path) -> Iterator[KernelLock]:
    lock = KernelLock(path)
    try:
        yield lock
    finally:
        lock.close()


def open_own(path: Path, flags: int) -> int:
    """Open or create a file in the data directory.

    Root gives it to the directory's owner, who could not use it otherwise, and follows no link, which the owner could
    have placed there.
    """
    descriptor = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    if os.geteuid() == 0:
        owner = path.parent.stat()
        os.fchown(descriptor, owner.st_uid, owner.st_gid)
    return descriptor


def is_free(path: Path) -> bool:
    with kernel_lock(path) as lock:
        return lock.acquire(shared=True)


def make_data_dir(data_dir: Path) -> None:
    """Create the data directory if it is missing, private to this account.

    If this account is root, others may enter it, because Postgres runs under another account. Existing directories are
    not changed.
    """
    missing = [path for path in (data_dir, *data_dir.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        if os.geteuid() == 0:
            path.chmod(0o755)  # regardless of the umask
        elif path == data_dir:
            path.chmod(0o700)
    if not data_dir.is_dir():
        raise DataDirectoryForbidden(f"{data_dir} is not a directory.", path=str(data_dir))


def prepare(directory: DataDirectory, user: str, extra_settings: Mapping[str, str]) -> tuple[list[str], Account | None]:
    """Create or check all that a start needs, and return the command line and the account to run it under."""
    remove_unfinished(directory.data_dir)
    exists = require_own_cluster(directory.pgdata)
    account = choose_account(directory.pgdata, user, exists=exists)
    require_entry(directory.data_dir, account)
    programs = reachable_programs(find_programs(), account, directory.data_dir)
    if not exists:
        make_cluster(programs, account, directory.pgdata, sync=extra_settings.get("fsync") != "off")
    make_log_dir(directory.log_dir, account)
    command = server_command(
        programs,
        directory,
        socket_dir=choose_socket_dir(directory.pgdata, account),
        extra_settings=extra_settings,
    )
    return command, account


def require_own_cluster(pgdata: Path) -> bool:
    """Return whether there is a cluster. Raises if the directory has other content, or another major version."""
    with explained(pgdata):
        try:
            version = (pgdata / "PG_VERSION").read_text(encoding="ascii", errors="replace").strip()
        except FileNotFoundError:
            if not pgdata.exists() or not any(pgdata.iterdir()):
                return False
            raise DataDirectoryForbidden(
                f"{pgdata} is in the way: it is not empty and no data directory of PostgreSQL.", path=str(pgdata)
            ) from None
    if version != str(MAJOR_VERSION):
        raise DataDirectoryIncompatible(
            f"{pgdata} is a data directory of PostgreSQL {version or '(unknown)'}; this release of Strata runs "
            f"PostgreSQL {MAJOR_VERSION}.",
            path=str(pgdata),
        )
    return True


def require_space(data_dir: Path, needed: int) -> None:
    free = shutil.disk_usage(data_dir).free
    if free < needed:
        raise DiskFull(
            f"There is no space left in {data_dir}: {free >> 20} MB are free, {needed >> 20} MB are needed.",
            path=str(data_dir),
        )


def make_cluster(programs: Programs, account: Account | None, pgdata: Path, *, sync: bool) -> None:
    """Create a cluster with our role and database. It appears at `pgdata` when it is complete, or not at all.

    A process that is killed meanwhile leaves a directory with another name, which is not used again and which
    `remove_unfinished` removes: its `initdb` may live on for a moment and must not write into the next attempt.
    """
    require_space(pgdata.parent, MINIMUM_FREE_BYTES)
    part = pgdata.with_name(f"{pgdata.name}{UNFINISHED}{secrets.token_hex(4)}")
    with explained(pgdata):
        part.mkdir(mode=0o700)
        if account is not None:
            os.chown(part, account.uid, account.gid)
        try:
            for command, stdin in _steps_to_a_cluster(programs, part, sync=sync):
                result = run_program(command, account, stdin)
                if (
                    result.returncode != 0 or "ERROR: " in result.stdout
                ):  # a single-user backend survives a failed statement
                    raise explain_output(result.stdout, pgdata)
            part.rename(pgdata)
            _sync_directory(pgdata.parent)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    _log.info("postgres.initialized", extra={"pgdata": str(pgdata)})


def _steps_to_a_cluster(programs: Programs, part: Path, *, sync: bool) -> list[tuple[list[str], str]]:
    """Return commands, each with its input. All files are synced once, at the end."""
    make = ["--pgdata", str(part), "--username", ROLE, "--auth=trust", "--no-sync", "--no-instructions"]
    locale = ["--encoding=UTF8", "--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
    steps = [
        ([programs.initdb, *make, *locale], ""),
        (
            [programs.postgres, "--single", "-D", str(part), "-c", "fsync=off", "template1"],
            f"CREATE DATABASE {DATABASE};\n",
        ),
    ]
    return [*steps, ([programs.initdb, "--sync-only", "--pgdata", str(part)], "")] if sync else steps


def _sync_directory(directory: Path) -> None:
    """Make the rename durable: without it the directory could be empty again after a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_unfinished(data_dir: Path) -> None:
    """Remove what killed processes left unfinished. The caller must hold the lock for starting.

    Repeated, because an `initdb` whose parent was killed still writes until its directory is gone.
    """
    for path in (*data_dir.glob(f"*{UNFINISHED}*"), *data_dir.glob(f"postgres.programs/{UNFINISHED}*")):
        wait_until(functools.partial(_remove, path), _REMOVE_SECONDS)


def _remove(path: Path) -> bool:
    shutil.rmtree(path, ignore_errors=True)
    return not path.exists()


def make_log_dir(log_dir: Path, account: Account | None) -> None:
    """Create the directory for the account, and remove the files of the previous week.

    Postgres truncates a file only if it runs at midnight; otherwise it would append to the same seven files for ever.
    """
    if not log_dir.is_dir():
        log_dir.mkdir(mode=0o700)
    if account is not None:
        os.chown(log_dir, account.uid, account.gid, follow_symlinks=False)
    for path in log_dir.glob("postgres-*.log"):
        if time.time() - path.lstat().st_mtime > _WEEK_SECONDS:
            path.unlink()


def log_sizes(log_dir: Path) -> dict[Path, int]:
    return {path: path.stat().st_size for path in log_dir.glob("postgres-*.log")}


def new_log(log_dir: Path, sizes: Mapping[Path, int]) -> str:
    """Return the end of what Postgres wrote to its log since the sizes were read, newest last."""
    text = ""
    for path, size in sorted(log_sizes(log_dir).items(), key=lambda item: item[0].stat().st_mtime):
        with path.open("rb") as file:
            file.seek(max(sizes.get(path, 0), size - _LOG_TAIL_BYTES))
            text += file.read().decode(errors="replace")
    return text


def choose_socket_dir(pgdata: Path, account: Account | None) -> Path:
    """Return the directory of the socket: the cluster, or a private one with a short name if the path is too long.

    Also if the path contains a comma, which separates hosts in a URL. The short name is derived from the long one and
    does not depend on the environment, so that a restart by another process does not change the URL.
    """
    if _can_hold_socket(pgdata):
        return pgdata
    uid = account.uid if account else os.geteuid()
    for parent in (Path("/tmp"), Path(tempfile.gettempdir())):  # noqa: S108  reason: the owner is checked below
        path = parent / cluster_name(str(pgdata))
        if _can_hold_socket(path) and _make_private(path, account) and path.lstat().st_uid == uid:
            return path
    raise EmbeddedStartFailed(
        f"The path {pgdata} is too long for a Unix socket, and no private directory for it could be made in /tmp.",
        hint="Choose a shorter path with STRATA_DATA_DIR.",
    )


def _can_hold_socket(directory: Path) -> bool:
    path = str(directory / f".s.PGSQL.{PORT}")
    try:
        return "," not in path and len(path.encode()) <= SOCKET_PATH_LIMIT
    except UnicodeEncodeError:  # a name that is not UTF-8
        return False


def _make_private(path: Path, account: Account | None) -> bool:
    """Create a directory that only its owner can enter. False if another account has taken the name in /tmp."""
    try:
        path.mkdir(mode=0o700)
        if account is not None:
            os.chown(path, account.uid, account.gid, follow_symlinks=False)
    except FileExistsError:
        pass
    except OSError:
        return False
    mode = path.lstat().st_mode
    return stat.S_ISDIR(mode) and not mode & 0o077


def size_of(pgdata: Path) -> int:
    """Return the bytes on disk. Files that a running server removes meanwhile are not counted."""
    total = 0
    for folder, _, names in os.walk(pgdata):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += Path(folder, name).lstat().st_blocks * 512
    return total


def server_command(
    programs: Programs, directory: DataDirectory, *, socket_dir: Path, extra_settings: Mapping[str, str]
) -> list[str]:
    """Return the command line of the postmaster. `-D` comes first, because `processes_of` looks for it there."""
    quoted = str(socket_dir).replace('"', '""')
    settings = {
        **SETTINGS,
        "cluster_name": cluster_name(str(directory.pgdata)),
        "log_directory": str(directory.log_dir),
        "unix_socket_directories": f'"{quoted}"',
        **extra_settings,
    }
    options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    return [programs.postgres, "-D", str(directory.pgdata), *options]
