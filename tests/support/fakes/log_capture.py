"""Captures the log of the whole process as text, and restores the configuration."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO

from server.telemetry.logs import LogFormat, configure_logs

_TOUCHED = ("", "strata", "uvicorn", "uvicorn.access", "alembic", "opentelemetry")


@contextmanager
def capture_log(level: str = "debug", log_format: LogFormat = "json") -> Iterator[StringIO]:
    """What is logged inside the block, in the format of an operator."""
    stream = StringIO()
    with logs_put_back():
        configure_logs(level, log_format, stream=stream)
        yield stream


@contextmanager
def logs_put_back() -> Iterator[None]:
    """Restore the configuration of the logs after the block."""
    loggers = [logging.getLogger(name) for name in _TOUCHED]
    before = [(logger, logger.handlers, logger.level, logger.propagate, logger.disabled) for logger in loggers]
    try:
        yield
    finally:
        logging.captureWarnings(capture=False)
        for logger, handlers, old_level, propagate, disabled in before:
            logger.handlers, logger.propagate, logger.disabled = handlers, propagate, disabled
            logger.setLevel(old_level)
