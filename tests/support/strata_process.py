"""`strata` as a real process, which is always stopped after the test."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from click.testing import CliRunner

from server.cli import main
from server.providers.choice import KEY_VARIABLES
from tests.support.fakes.log_capture import logs_put_back

PROJECT = Path(__file__).parents[2]


def strata(*arguments: str, env: Mapping[str, str], stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "server", *arguments],
        env=environment(env),
        cwd=PROJECT,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def strata_here(*arguments: str, env: Mapping[str, str], stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command inside this process, if it needs no separate one: importing a command takes seconds. It runs in a
    thread, since it has its own event loop.
    """
    wanted = environment(env)
    changes: dict[str, str | None] = {name: None for name in os.environ if name not in wanted}
    with logs_put_back(), ThreadPoolExecutor(1) as thread:
        result = thread.submit(CliRunner().invoke, main, arguments, input=stdin, env=changes | dict(env)).result(120)
    if not isinstance(result.exception, SystemExit | None):
        raise result.exception
    return subprocess.CompletedProcess(arguments, result.exit_code, result.stdout, result.stderr)


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of this process without any setting of Strata or key of a provider, and with these variables."""
    ours = ("STRATA_", *(name for names in KEY_VARIABLES.values() for name in names))
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)} | dict(extra)


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    """Poll until the condition holds; the error names what was waited for."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.02)


class StrataProcess:
    """A command that runs until it is stopped, with its output so far."""

    def __init__(self, *arguments: str, env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "server", *arguments],
            env=environment(env),
            cwd=PROJECT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()
        self._reader.join()
        if self._process.stdout is not None:
            self._process.stdout.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> str:
        return "".join(self._lines)

    def find(self, pattern: str, seconds: float = 60) -> str:
        """Wait until the pattern matches the output. Returns its first group."""
        compiled = re.compile(pattern)

        def there() -> bool:
            if self._process.poll() is not None and compiled.search(self.output) is None:
                self._reader.join()
                if compiled.search(self.output) is None:
                    raise AssertionError(f"strata ended with {self._process.returncode}: {self.output}")
            return compiled.search(self.output) is not None

        wait_until(there, f"{pattern!r} in {self.output!r}", seconds)
        match = compiled.search(self.output)
        assert match is not None
        return match[1] if match.groups() else match[0]

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self, seconds: float = 60) -> int:
        """The exit code."""
        code = self._process.wait(seconds)
        self._reader.join()
        return code

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)
