"""`strata` in a terminal: a real process on a pseudo-terminal, with keys to press and a screen to read."""

import asyncio
import os
import pty
import re
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from tests.support.strata_process import PROJECT, environment

_PIECE_BYTES = 65536
_PATIENCE_SECONDS = 60.0
_SEQUENCES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*\x07|[=>])")


class Terminal:
    """The output of the process; `shown` is the output without the escape sequences of the terminal."""

    def __init__(self, master: int, process: asyncio.subprocess.Process) -> None:
        self.written = ""
        self.process = process
        self._master = master
        self._read_from = 0
        self._more = asyncio.Event()

    @property
    def shown(self) -> str:
        return _SEQUENCES.sub("", self.written)

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    async def shows(self, pattern: str) -> str:
        """Wait until the pattern matches what is shown. Returns its first group; what was shown before is not
        searched again.
        """
        compiled = re.compile(pattern)
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                while (match := compiled.search(self.shown, self._read_from)) is None:
                    self._more.clear()
                    await self._more.wait()
        except TimeoutError:
            raise AssertionError(f"{pattern!r} is not in {self.shown[self._read_from :]!r}") from None
        self._read_from = match.end()
        return match[1] if match.groups() else match[0]

    def read(self) -> None:
        """Everything that can be read now."""
        try:
            piece = os.read(self._master, _PIECE_BYTES)
        except OSError:  # The process has closed its side.
            piece = b""
        if not piece:
            asyncio.get_running_loop().remove_reader(self._master)
        self.written += piece.decode("utf-8", "replace")
        self._more.set()


@asynccontextmanager
async def open_terminal(*arguments: str, env: Mapping[str, str]) -> AsyncIterator[Terminal]:
    """A process with its own terminal, which is always stopped after the test."""
    master, slave = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "server",
        *arguments,
        # The pseudo-terminal does not answer queries for the cursor position.
        env=environment({"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", **env}),
        cwd=PROJECT,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        preexec_fn=_take_terminal,
        start_new_session=True,
    )
    os.close(slave)
    loop = asyncio.get_running_loop()
    terminal = Terminal(master, process)
    loop.add_reader(master, terminal.read)
    try:
        yield terminal
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        loop.remove_reader(master)
        os.close(master)


def _take_terminal() -> None:
    """In the new process: make its terminal the controlling one, so that Ctrl-C sends it a signal."""
    import fcntl  # noqa: PLC0415  reason: runs between fork and exec
    import termios  # noqa: PLC0415  reason: as above

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
