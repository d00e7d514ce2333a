"""What every command needs: settings, logs, the event loop, the limit of open files."""

import asyncio
import logging
import resource
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

import uvloop

from server.app.settings import Settings, read_settings
from server.telemetry.logs import configure_logs

Result = TypeVar("Result")

_OTHER_FILES: Final = 200
"""Allowance for listening sockets, logs, libraries and template workers."""
_MAX_FILES: Final = 1024 * 1024

_log = logging.getLogger("strata.program")


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine on uvloop and return its result."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def begin(**overrides: object) -> Settings:
    """Read the settings and configure logs. `overrides` that are not None take precedence over the environment."""
    settings = read_settings(**overrides)
    configure_logs(settings.log_level, settings.log_format)
    return settings


def begin_quietly(level: str = "warning") -> Settings:
    """Read the settings and log only from `level` up, for commands whose output is read by users and programs."""
    settings = read_settings()
    configure_logs(level, settings.log_format)
    return settings


def raise_file_limit(settings: Settings, *, connections: int = 0) -> None:
    """Raise the soft limit of open files to the hard limit.

    Logs a warning if that is too low for the settings and this number of client `connections`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    max_files = _MAX_FILES if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < max_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, hard))
        soft = max_files
    needed = connections + settings.provider_call_limit + settings.database_pool_size + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        _log.warning("program.file_limit_low", extra={"limit": soft, "needed": needed})
