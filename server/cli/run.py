"""Running async work from a command."""

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
"""Listening sockets, logs, libraries, template workers."""
_ENOUGH_FILES: Final = 1024 * 1024

_log = logging.getLogger("strata.program")


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Runs the work on uvloop to its end."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def begin(**overrides: object) -> Settings:
    """The settings of this command, logs set up by them. What no option gives comes from the environment."""
    settings = read_settings(**overrides)
    configure_logs(settings.log_level, settings.log_format)
    return settings


def begin_quietly(level: str = "warning") -> Settings:
    """The same for commands whose output is their answer: only what is as bad as `level` is logged."""
    settings = read_settings()
    configure_logs(level, settings.log_format)
    return settings


def raise_file_limit(settings: Settings, *, connections: int = 0) -> None:
    """Raises the soft limit for open files to the hard one.

    Logs a warning if that is too low for the settings and so many `connections` of clients.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = _ENOUGH_FILES if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < highest:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
        soft = highest
    needed = connections + settings.provider_call_limit + settings.database_pool_size + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        _log.warning("program.file_limit_low", extra={"limit": soft, "needed": needed})
