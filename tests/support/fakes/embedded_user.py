"""A process that uses the embedded Postgres, and functions that examine the processes of a data directory."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import psutil
import pytest

import server
from server.postgres.embedded.binaries import find_programs
from server.postgres.embedded.service import open_embedded
from server.postgres.embedded.supervisor import cluster_name

LIMIT_SECONDS = 30.0
NOBODY = 65534
"""Postgres runs under this account when the tests run as root, and so do the users without privileges."""

USER_PROGRAM = """
import json, logging, os, signal, sys
from pathlib import Path
from server.conversation.errors import StrataError
from server.postgres.embedded.service import open_embedded

def say(**facts):
    print(json.dumps(facts), flush=True)

logging.basicConfig(level="INFO", format="%(message)s")
try:
    held = open_embedded(Path(sys.argv[1]), user="nobody", extra_settings={"fsync": "off"})
except StrataError as error:
    say(error=type(error).__name__, sentence=str(error))
    sys.exit(3)
say(url=held.url)
for line in sys.stdin:
    if line == "fork\\n":
        child = os.fork()
        if child == 0:
            signal.pause()
        say(child=child)
    if line == "close\\n":
        held.close()
        say(closed=True)
"""


class EmbeddedUser:
    """A process that uses the embedded Postgres of a data directory."""

    def __init__(self, data_dir: Path, uid: int | None = None, python: str = sys.executable) -> None:
        self.data_dir = data_dir
        places = [str(Path(server.__file__).parents[1]), str(find_programs().bin_dir.parents[2])]
        self.process = subprocess.Popen(
            [python, "-c", USER_PROGRAM, str(data_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(places), "HOME": "/"},
            cwd="/",
            user=uid,
            group=uid,
            extra_groups=None if uid is None else [],
        )

    def answer(self) -> dict[str, str | int]:
        line = _stream(self.process.stdout).readline()
        assert line, _stream(self.process.stderr).read()
        answer: dict[str, str | int] = json.loads(line)
        return answer

    def url(self) -> str:
        answer = self.answer()
        assert "url" in answer, answer
        return str(answer["url"])

    def ask(self, word: str) -> dict[str, str | int]:
        stdin = _stream(self.process.stdin)
        stdin.write(f"{word}\n")
        stdin.flush()
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT_SECONDS)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()

    def leave(self) -> str:
        """Stop it properly. Returns what it logged."""
        _, log = self.process.communicate(timeout=LIMIT_SECONDS)
        return log


def _stream(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


@contextlib.contextmanager
def open_base_dir() -> Iterator[Path]:
    """A directory that every account can enter, which `tmp_path` is not. At the end nothing below it runs."""
    base = Path(tempfile.mkdtemp(prefix="strata-test-")).resolve()
    base.chmod(0o755)
    try:
        yield base
    finally:
        eventually(lambda: not kill_below(base))
        shutil.rmtree(base)


@contextlib.contextmanager
def open_seed_dir() -> Iterator[Path]:
    """A data directory with a cluster to copy from, for tests that are not about creating one."""
    with open_base_dir() as base:
        open_embedded(base / "data", user="nobody", extra_settings={"fsync": "off"}).close()
        yield base / "data"


def copy_seed(seed: Path, data_dir: Path) -> None:
    subprocess.run(["/bin/cp", "-a", str(seed), str(data_dir)], check=True)


def kill_below(base: Path) -> bool:
    """Returns whether there was anything to kill."""
    processes = processes_below(base)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return bool(processes)


def processes_below(base: Path) -> list[psutil.Process]:
    """All processes of data directories here: users, supervisors, and Postgres with all its processes."""
    made = [path for pattern in ("postgres", "*/postgres", "*/*/postgres") for path in base.glob(pattern)]
    removed = [
        base / "postgres",
        base / "data" / "postgres",
    ]  # A test may have removed them while their processes still run.
    titles = tuple(f"postgres: {cluster_name(str(path))}: " for path in (*made, *removed))
    return [
        process
        for process in psutil.process_iter(["cmdline", "status"])
        if (line := " ".join(process.info["cmdline"] or [])).startswith(titles)
        or (str(base) in line and process.info["status"] != psutil.STATUS_ZOMBIE)
    ]


def supervisors_below(base: Path) -> list[psutil.Process]:
    return [process for process in processes_below(base) if "supervisor.py" in " ".join(process.info["cmdline"])]


def eventually(condition: Callable[[], bool], seconds: float = LIMIT_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.05)


def python_for_nobody() -> str:
    """The interpreter of the tests may be in the home of root. Any other works, as only our code is imported."""
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        code = f"import sys, os; os.listdir({str(find_programs().bin_dir)!r}); sys.exit(sys.version_info < (3, 11))"
        try:
            if subprocess.run([python, "-c", code], user=NOBODY, cwd="/", check=False).returncode == 0:
                return python
        except OSError:
            continue
    pytest.skip("needs root: with an interpreter and a wheel that other accounts can read")
