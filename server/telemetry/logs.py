"""Logs: the standard `logging` with structlog as its formatter.

Any module writes `logging.getLogger("strata.<room>").info("conversation.created", extra={"conversation_id": ...})`: the
event is dotted and in the past tense, the facts are fields. The id, the tenant and the trace of a request are kept in
context variables and are added to every line that is written while the request is handled, also by its tasks.

Libraries use the same formatter, but only from level `warning` on, even if our level is `debug`: at lower levels HTTP
clients log headers and URLs, and SQLAlchemy logs parameters.

No line contains a secret or message content. Secrets are redacted in the last step. A traceback has the frames, the
lines of code and the names of the exceptions, but not their texts, which may quote a value: pydantic repeats the input,
a database driver the parameters, `int()` the string. Exempt are our own errors and a few built-in ones, whose texts
name only files and identifiers. Local variables are never included.
"""

import logging
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, MutableMapping
from functools import lru_cache
from typing import Any, Final, Literal, TextIO

import structlog
from structlog.typing import EventDict, Processor

from server.conversation.errors import StrataError
from server.conversation.redaction import REDACTED, redact_text

LogFormat = Literal["auto", "pretty", "json"]

_OWN_LOGGERS: Final = ("strata",)
_SILENT_LOGGERS: Final = ("uvicorn.access", "opentelemetry")
"""`http.request_finished` replaces the access log, without the query string. `spans` logs failures of the span
exporter, once and not for every batch."""
_SECRET_NAME: Final = re.compile(
    r"(^|[_.-])(authorization|cookies?|passwords?|passwd|secrets?|credentials?|api_?keys?|token|dsn|database_url)$",
)
"""Fields whose values are replaced. Counts such as `input_tokens` and ids such as `api_key_id` do not match."""
_MAX_DEPTH: Final = 6
_PLAIN_BUILTINS: Final = (OSError, AttributeError, NameError, ImportError)
_MAX_CHAIN: Final = 8
_MAX_FRAMES: Final = 40


def configure_logs(level: str, log_format: LogFormat = "auto", *, stream: TextIO | None = None) -> None:
    """Send all logs of this process to the stream, by default standard error. Replaces any earlier configuration."""
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
    """Replace the fields of an earlier request by those of a new one.

    A pipelined request runs in a copy of the context of the request before it.
    """
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(**fields)


def extend_log_context(**fields: str) -> None:
    """Add fields to every line that is written while the current request is handled."""
    structlog.contextvars.bind_contextvars(**fields)


def _set_levels(names: tuple[str, ...], level: int) -> None:
    """Set the levels, and remove handlers that a library installed before (uvicorn, alembic): they would log twice."""
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


def redact_event(_logger: object, _method: str, event: MutableMapping[str, Any]) -> dict[str, Any]:
    """Replace every secret of the event, at any depth. A structlog processor."""
    return {name: _redact_field(name, value, _MAX_DEPTH) for name, value in event.items()}


def _redact_field(name: object, value: object, depth: int) -> object:
    if value is not None and _names_secret(str(name)):
        return REDACTED
    return _redact(value, depth)


@lru_cache(maxsize=1024)
def _names_secret(name: str) -> bool:
    return _SECRET_NAME.search(name.lower().replace("-", "_")) is not None


def _redact(value: object, depth: int) -> object:
    match value:
        case str():
            return redact_text(value)
        case bool() | int() | float() | None:
            return value
        case bytes() | bytearray() | memoryview():
            return f"[{len(value)} bytes]"
        case Mapping() if depth:
            return {str(name): _redact_field(name, item, depth - 1) for name, item in value.items()}
        case list() | tuple() | set() | frozenset() if depth:
            return [_redact(item, depth - 1) for item in value]
        case Mapping() | list() | tuple() | set() | frozenset():
            return "[too deep]"
        case _:
            return redact_text(str(value))


def render_traceback(error: BaseException) -> str:
    """Render the error and its causes, the first cause first."""
    return "\n\n".join(_render_one(link) for link in reversed(list(_chain(error))))


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen and len(seen) < _MAX_CHAIN:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _render_one(error: BaseException) -> str:
    frames = traceback.StackSummary.extract(traceback.walk_tb(error.__traceback__), limit=-_MAX_FRAMES)
    lines = [line.rstrip("\n") for line in frames.format()]
    lines.append(_headline(error))
    if isinstance(error, BaseExceptionGroup):
        lines.extend(
            f"  | {line}" for part in error.exceptions[:_MAX_CHAIN] for line in render_traceback(part).split("\n")
        )
    return "\n".join(lines)


def _headline(error: BaseException) -> str:
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{name}: {error}" if _is_plain(error) else name


def _is_plain(error: BaseException) -> bool:
    """Whether the text may be logged. Subclasses of OSError in libraries are excluded: their texts contain URLs."""
    builtin = type(error).__module__ == "builtins"
    return isinstance(error, StrataError) or (builtin and isinstance(error, _PLAIN_BUILTINS))
