"""Running async work from a command."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

from server.settings import Settings, read_settings
from server.telemetry.logs import configure_logs

Result = TypeVar("Result")


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
