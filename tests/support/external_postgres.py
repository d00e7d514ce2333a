"""A Postgres server from the packages of the system, over TCP, with passwords and TLS, and with standbys.

Each cluster has a separate temporary directory and belongs to an account without privileges. A shell runs between the
tests and the server and stops the server when the tests end, even if they are killed.
"""

import asyncio
import os
import pwd
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import asyncpg
import psutil
import pytest

USER: Final = "strata"
PASSWORD: Final = "s3cret%2Fpass"
"""The encoded form in a URL."""
LIMIT_SECONDS: Final = 30.0
VERSIONS: Final = range(15, 18)
"""The versions for tests of an external server: from the oldest supported one to the one before the embedded one."""

# Stops the server when its input ends: when the tests close it, and also when they are killed.
_KEEPER: Final = '"$@" & server=$!; read -r _; kill -QUIT $server 2>/dev/null; wait $server'
_BELOW_EPHEMERAL: Final = range(15000, 32000)
_SETTINGS: Final = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "shared_buffers": "16MB",
    "max_connections": "60",
    "ssl": "on",
    "timezone": "Europe/Oslo",
    "fsync": "off",
    "wal_keep_size": "64MB",
    # A polling test should not wait for the delays of Postgres.
    "wal_retrieve_retry_interval": "100ms",
}
_HBA: Final = """\
host all,replication all 127.0.0.1/32 scram-sha-256
"""


def find_bin_dir() -> Path:
    """The directory with the programs of the newest suitable server. Skips the test if there is none."""
    found = {
        int(path.parents[1].name): path.parent
        for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")
        if path.parents[1].name.isdecimal()
    }
    with suppress(FileNotFoundError):
        place = Path(_output(["pg_config", "--bindir"]))
        version = re.search(r"\d+", _output(["pg_config", "--version"]))
        if version and (place / "initdb").exists():
            found.setdefault(int(version[0]), place)
    suitable = [version for version in found if version in VERSIONS]
    if not suitable:
        pytest.skip("needs a Postgres server from the system's packages, version 15 to 17")
    return found[max(suitable)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """A certificate authority, a server certificate for 127.0.0.1, and an untrusted authority."""

    authority: Path
    stranger: Path
    server: Path
    server_key: Path


class Cluster:
    """A server with its data, initially stopped."""

    def __init__(self, base: Path, bin_dir: Path, certificates: Certificates, port: int) -> None:
        self.base = base
        self.port = port
        self.data = base / f"data-{port}"
        self._bin_dir = bin_dir
        self._certificates = certificates
        self._keeper: subprocess.Popen[str] | None = None

    def url(self, database: str = "postgres", *, host: str = "127.0.0.1", **query: str) -> str:
        options = "&".join(f"{name}={value}" for name, value in query.items())
        return f"postgresql://{USER}:{PASSWORD}@{host}:{self.port}/{database}{'?' if options else ''}{options}"

    def initialize(self) -> None:
        password_file = self.base / "password"
        password_file.write_text(PASSWORD.replace("%2F", "/"))
        give(password_file)
        self.run(
            *("initdb", "--no-sync", "--encoding=UTF8", "--locale=C.UTF-8", "--auth=scram-sha-256"),
            *(f"--username={USER}", f"--pwfile={password_file}", f"--pgdata={self.data}"),
        )
        (self.data / "pg_hba.conf").write_text(_HBA)

    def copy_of(self, primary: "Cluster") -> None:
        """Make this cluster a standby of the other."""
        self.run(
            "pg_basebackup", "--no-sync", "-c", "fast", "-R", "-D", str(self.data), "-d", primary.url("replication")
        )

    def run(self, program: str, *arguments: str) -> None:
        """A program of this server, under its account."""
        command = [str(self._bin_dir / program), *arguments]
        done = subprocess.run(
            command, check=False, capture_output=True, cwd=self.base, timeout=LIMIT_SECONDS, **_account()
        )
        assert done.returncode == 0, done.stderr.decode()

    def start(self, **settings: str) -> None:
        """Start it, and return when it accepts connections."""
        options = {
            **_SETTINGS,
            "port": str(self.port),
            "ssl_cert_file": str(self._certificates.server),
            "ssl_key_file": str(self._certificates.server_key),
            **settings,
        }
        arguments = [word for name, value in options.items() for word in ("-c", f"{name}={value}")]
        command = [str(self._bin_dir / "postgres"), "-D", str(self.data), *arguments]
        with (self.base / f"log-{self.port}").open("ab") as log:
            self._keeper = subprocess.Popen(
                ["/bin/sh", "-c", _KEEPER, "keeper", *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                cwd=self.base,
                **_account(),
            )
        wait_until(self._takes_connections)

    def stop(self) -> None:
        """Stop it at once, without a checkpoint. It need not be running."""
        if self._keeper is None:
            return
        self._keeper.communicate(timeout=LIMIT_SECONDS)
        self._keeper = None

    def kill(self) -> None:
        """Send SIGKILL to all its processes, which leaves what a machine failure leaves."""
        postmaster = psutil.Process(self._postmaster())
        processes = [postmaster, *postmaster.children(recursive=True)]
        postmaster.send_signal(signal.SIGSTOP)  # Otherwise it would start new ones.
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        wait_until(lambda: not any(map(_runs, processes)))
        self._remove_shared_memory()
        self.stop()

    async def fetch(self, sql: str, database: str = "postgres") -> Any:
        """The first value of the first row."""
        connection = await asyncpg.connect(self.url(database))
        try:
            return await connection.fetchval(sql)
        finally:
            await connection.close()

    def log(self) -> str:
        return (self.base / f"log-{self.port}").read_text()

    def _postmaster(self) -> int:
        return int((self.data / "postmaster.pid").read_text().splitlines()[0])

    def _takes_connections(self) -> bool:
        assert self._keeper is not None
        pid_file = self.data / "postmaster.pid"
        lines = pid_file.read_text().splitlines() if pid_file.exists() else []
        if len(lines) > 7 and lines[7].strip() == "ready":
            return True
        children = psutil.Process(self._keeper.pid).children()
        assert not lines or children, self.log()
        return False

    def _remove_shared_memory(self) -> None:
        """Postgres keeps a few bytes of it as a lock; only another start with the same data would remove them."""
        words = (self.data / "postmaster.pid").read_text().splitlines()[6].split()
        subprocess.run(["ipcrm", "-m", words[1]], check=False, capture_output=True)


class Site:
    """A directory for clusters that share certificates."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.certificates = _make_certificates(base)
        self._bin_dir = find_bin_dir()
        self._clusters: list[Cluster] = []

    def primary(self, **settings: str) -> Cluster:
        """A new running cluster."""
        cluster = self._place()
        cluster.initialize()
        cluster.start(**settings)
        return cluster

    def standby(self, primary: Cluster) -> Cluster:
        """A running streaming standby of a running cluster."""
        cluster = self._place()
        cluster.copy_of(primary)
        cluster.start()
        return cluster

    def close(self) -> None:
        for cluster in self._clusters:
            cluster.stop()

    def _place(self) -> Cluster:
        cluster = Cluster(self.base, self._bin_dir, self.certificates, free_port())
        self._clusters.append(cluster)
        return cluster


@contextmanager
def open_site(directory: Path | None = None) -> Iterator[Site]:
    """At the end all processes are stopped and all files removed. `directory` selects the disk."""
    find_bin_dir()
    # Not the temporary directory of pytest: the account that Postgres runs under for root cannot enter it.
    base = Path(tempfile.mkdtemp(prefix="strata-external-", dir=directory))
    try:
        base.chmod(0o755)
        give(base)
        site = Site(base)
        try:
            yield site
        finally:
            site.close()
    finally:
        shutil.rmtree(base)


def wait_until(condition: Callable[[], bool], seconds: float = LIMIT_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


async def come_true(condition: Callable[[], bool | Awaitable[bool]], seconds: float = LIMIT_SECONDS) -> None:
    """The same without blocking the loop, for conditions that have to be awaited."""
    deadline = time.monotonic() + seconds
    while True:
        met = condition()
        if met if isinstance(met, bool) else await met:
            return
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(0.02)


def give(path: Path) -> None:
    """Give a file or directory to the account that Postgres runs under."""
    path.chmod(0o755 if path.is_dir() else 0o600)
    account = _account()
    if account:
        os.chown(path, account["user"], account["group"])


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _account() -> Mapping[str, Any]:
    """Postgres refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    names = {entry.pw_name: entry for entry in pwd.getpwall()}
    entry = names.get("postgres") or names["nobody"]
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}


def free_port() -> int:
    """A port below the ephemeral range of the kernel, so that no other process takes it before Postgres does."""
    while True:
        port = random.SystemRandom().choice(_BELOW_EPHEMERAL)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _make_certificates(base: Path) -> Certificates:
    made = Certificates(
        authority=base / "authority.crt",
        stranger=base / "stranger.crt",
        server=base / "server.crt",
        server_key=base / "server.key",
    )
    for name in ("authority", "stranger"):
        _openssl(base, "-subj", f"/CN=Strata test {name}", "-keyout", f"{name}.key", "-out", f"{name}.crt")
    _openssl(
        base,
        *("-subj", "/CN=strata-test", "-keyout", "server.key", "-out", "server.crt"),
        *("-CA", "authority.crt", "-CAkey", "authority.key", "-addext", "basicConstraints=critical,CA:FALSE"),
        # Valid for the address, not for the name localhost.
        *("-addext", "subjectAltName=IP:127.0.0.1"),
    )
    give(made.server_key)
    return made


def _openssl(base: Path, *arguments: str) -> None:
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    ]
    subprocess.run([*command, *arguments], check=True, capture_output=True, cwd=base)


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip()
