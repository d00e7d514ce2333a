"""A worker, seen from the server: one process, started when it is first needed, asked one thing at a time.

Whatever a template does to it, the server gets an answer. A worker that takes too long or too much is ended, and the
next task gets a new one. One that died for another reason (somebody killed it, the machine ran out of memory) is
replaced and asked again, once: that may have had nothing to do with the template.
"""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from server.conversation.errors import Internal, ShuttingDown
from server.prompts.limits import RenderLimits

_START_SECONDS: Final = 30.0
_LEAVE_SECONDS: Final = 1.0
_PATIENCE: Final = 5
"""A worker ends itself after so much processor time; one that has not after this many times that is ended from here."""
_TIME_IS_UP: Final = -signal.SIGPROF if sys.platform != "win32" else None
_MAX_BYTES_PER_CHAR: Final = 6
"""A control character in JSON."""
_ROOM_FOR_A_FAILURE: Final = 65_536
_IMPORT_ROOT: Final = str(Path(__file__).resolve().parents[2])
"""Where this very package is imported from."""
_PASSED_ON: Final = ("LD_LIBRARY_PATH", "PYTHONHOME", "SYSTEMROOT")
"""All of the environment that an interpreter may need to start. Keys and passwords stay here."""


class WorkerProcess:
    """Owns at most one process; `close` ends it."""

    def __init__(self, limits: RenderLimits) -> None:
        self._limits = limits
        self._lock = asyncio.Lock()
        self._process: Process | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Of the process, if there is one."""
        return None if self._process is None else self._process.pid

    async def ask(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """The worker's answer to a task, or the failure that stands for none.

        Raises `Internal` if no worker can be started, which says nothing about the template, and `ShuttingDown` after
        `close`.
        """
        line = json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
        async with self._lock:
            if self._is_closed:
                raise ShuttingDown
            answer = await self._ask_once(line)
            if answer is None:
                answer = await self._ask_once(line)
        return answer if answer is not None else _failure("render", "The template ended the process that rendered it.")

    async def close(self) -> None:
        """Waits for the task that is under way, which has its limit, and ends the process."""
        self._is_closed = True
        async with self._lock:
            await self._end()

    async def _ask_once(self, line: bytes) -> Mapping[str, Any] | None:
        """None where the worker died over it."""
        process = await self._find_or_start()
        too_long = _failure("too_long", f"The template took longer than {self._limits.seconds:g} seconds.")
        try:
            async with asyncio.timeout(self._limits.seconds * _PATIENCE):
                answer = _decode(await _exchange(process, line))
        except TimeoutError:
            await self._end(busy=True)
            return too_long
        except asyncio.CancelledError:
            # The answer that nobody waits for any more would be taken for the next one's.
            await self._end(busy=True)
            raise
        if answer is None or answer.get("failure", {}).get("kind") == "too_large":
            await self._end()
        return too_long if answer is None and process.returncode == _TIME_IS_UP else answer

    async def _find_or_start(self) -> Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        await self._end()
        try:
            self._process = await self._start()
        except OSError as error:
            raise Internal("The process that renders templates cannot be started.") from error
        try:
            async with asyncio.timeout(_START_SECONDS):
                ready = _decode(await _exchange(self._process, b""))
        except TimeoutError:
            ready = None
        except asyncio.CancelledError:
            await self._end(busy=True)
            raise
        if ready is None:
            await self._end()
            raise Internal("The process that renders templates does not start.")
        return self._process

    async def _start(self) -> Process:
        limits = self._limits
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *("-s", "-P", "-m", "server.prompts.worker"),
            *(str(limits.seconds), str(limits.output_chars), str(limits.memory_bytes)),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,  # a traceback could quote a template
            limit=limits.output_chars * _MAX_BYTES_PER_CHAR + _ROOM_FOR_A_FAILURE,
            env={name: os.environ[name] for name in _PASSED_ON if name in os.environ} | {"PYTHONPATH": _IMPORT_ROOT},
            start_new_session=True,  # Ctrl-C in the server's terminal is the server's business
        )

    async def _end(self, *, busy: bool = False) -> None:
        """A worker that is not busy ends by itself when its input does, or has ended already."""
        process, self._process = self._process, None
        if process is None:
            return
        if not busy and process.stdin is not None:
            process.stdin.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LEAVE_SECONDS):
                    await process.wait()
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _exchange(process: Process, line: bytes) -> bytes:
    """Empty, or an unfinished line, where the worker is gone."""
    if process.stdin is None or process.stdout is None:
        raise Internal("The process that renders templates has no pipes.")
    with suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(line)
        await process.stdin.drain()
    try:
        return await process.stdout.readline()
    except ValueError:  # longer than any answer can be, so it is none
        return b""


def _decode(line: bytes) -> dict[str, Any] | None:
    try:
        answer = json.loads(line.decode("utf-8", "surrogatepass"))
    except ValueError:
        return None
    return answer if isinstance(answer, dict) and line.endswith(b"\n") else None


def _failure(kind: str, message: str) -> dict[str, Any]:
    return {"failure": {"kind": kind, "message": message, "line": None}}
