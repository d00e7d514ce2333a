"""Logs: everything goes through the standard `logging`, structlog is the formatter behind it.

Any module writes `logging.getLogger("strata.<room>").info("conversation.created", extra={"conversation_id": ...})`:
the event is dotted and in the past tense, the facts are fields. What a request carries along (its id, the tenant, the
trace) is kept in context variables and appears on every line written on its behalf, also by a task that it started.

Libraries write through the same formatter but only from `warning` upwards, also when our level is `debug`: at their
lower levels HTTP clients write headers and URLs, and SQLAlchemy writes parameters.
"""

import logging
import sys
from typing import Any, Final, Literal, TextIO

import structlog
from structlog.typing import EventDict, Processor

from server.telemetry.redaction import redact_event
from server.telemetry.tracebacks import render_traceback

LogFormat = Literal["auto", "pretty", "json"]

_OWN_LOGGERS: Final = ("strata",)
_SILENT_LOGGERS: Final = ("uvicorn.access", "opentelemetry")
"""The access log is `http.request_finished`, without the query string; what the span exporter has to say is said by
`spans`, once and not with every batch."""


def configure_logs(level: str, log_format: LogFormat = "auto", *, stream: TextIO | None = None) -> None:
    """Sends all logs of this process to the stream (standard error unless given), replacing any earlier set-up."""
    target = stream or sys.stderr
    pretty = log_format == "pretty" or (log_format == "auto" and target.isatty())
    handler = logging.StreamHandler(target)
    handler.setFormatter(_build_formatter(pretty=pretty, coloured=pretty and target.isatty()))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    threshold = logging.getLevelNamesMapping()[level.upper()]
    _set_levels(_OWN_LOGGERS, threshold)
    _set_levels(_SILENT_LOGGERS, logging.CRITICAL + 1)
    logging.captureWarnings(capture=True)


def begin_log_context(**fields: str) -> None:
    """Forgets what an earlier request bound in this context and binds the fields of a new one.

    A pipelined request runs in a copy of its predecessor's context, hence the forgetting.
    """
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(**fields)


def extend_log_context(**fields: str) -> None:
    """Adds fields to every line that is written on behalf of the present request."""
    structlog.contextvars.bind_contextvars(**fields)


def _set_levels(names: tuple[str, ...], level: int) -> None:
    """A library may have been set up before us (uvicorn, alembic's ini): its own handlers would write a second line."""
    for name in names:
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.handlers = []
        logger.propagate = True
        logger.disabled = False


def _build_formatter(*, pretty: bool, coloured: bool) -> logging.Formatter:
    renderer: Processor
    if pretty:
        renderer = structlog.dev.ConsoleRenderer(colors=coloured, exception_formatter=structlog.dev.plain_traceback)
    else:
        renderer = structlog.processors.JSONRenderer(ensure_ascii=False, default=str)
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            structlog.contextvars.merge_contextvars,
            structlog.stdlib.ExtraAdder(),
            structlog.stdlib.add_logger_name,
            structlog.stdlib.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
        ],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            _render_exception,
            redact_event,
            renderer,
        ],
    )


def _render_exception(_logger: Any, _method: str, event: EventDict) -> EventDict:
    event.pop("color_message", None)  # uvicorn repeats its message with escape codes
    exc_info = event.pop("exc_info", None)
    if isinstance(exc_info, tuple) and isinstance(exc_info[1], BaseException):
        event["exception"] = render_traceback(exc_info[1])
    return event
