"""Tracebacks that can be logged.

Python's own rendering ends in the exception's text, and that text quotes whatever was at hand: pydantic repeats the
input, a database driver the parameters, `int()` the string. So a traceback here has the frames, the lines of code and
the names of the exceptions, and their texts only where these are known to hold no value: our own errors promise it,
and the few built-in ones below speak of names and files. Local variables are never shown.
"""

import traceback
from collections.abc import Iterator
from typing import Final

from server.conversation.errors import StrataError

_PLAIN_BUILTINS: Final = (OSError, AttributeError, NameError, ImportError)
_CHAIN_LIMIT: Final = 8
_FRAME_LIMIT: Final = 40


def render_traceback(error: BaseException) -> str:
    """The error and what led to it, the cause first."""
    return "\n\n".join(_render_one(link) for link in reversed(list(_chain(error))))


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen and len(seen) < _CHAIN_LIMIT:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _render_one(error: BaseException) -> str:
    frames = traceback.StackSummary.extract(traceback.walk_tb(error.__traceback__), limit=-_FRAME_LIMIT)
    lines = [line.rstrip("\n") for line in frames.format()]
    lines.append(_headline(error))
    if isinstance(error, BaseExceptionGroup):
        lines.extend(
            f"  | {line}" for part in error.exceptions[:_CHAIN_LIMIT] for line in render_traceback(part).split("\n")
        )
    return "\n".join(lines)


def _headline(error: BaseException) -> str:
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{name}: {error}" if _is_plain(error) else name


def _is_plain(error: BaseException) -> bool:
    """Libraries derive from OSError too, and put URLs into their texts: only Python's own ones are plain."""
    builtin = type(error).__module__ == "builtins"
    return isinstance(error, StrataError) or (builtin and isinstance(error, _PLAIN_BUILTINS))
