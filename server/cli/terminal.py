"""Output of commands: safe text, tables on standard output, progress on standard error.

Text from a model, a tool, a user or a server passes `escape_controls` or `one_line` before it is printed: a terminal
executes control characters, and a prompt can make a model write them.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic
from typing import Final

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from server.conversation.block import JsonValue

_PIPE_WIDTH: Final = 200
"""Width of a table that is not printed to a terminal. It is wide enough that no column is truncated."""
_LINE_SECONDS: Final = 30.0
MAX_ARGUMENT_CHARACTERS: Final = 500
_DELETE: Final = 0x7F
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


def _build_table() -> dict[int, str]:
    """Build the translation of `escape_controls`.

    Control characters become their Unicode control pictures, lone surrogates become replacement characters, and
    characters that change the direction of text are removed. Each character is translated on its own, so that a text
    can be translated in pieces.
    """
    table = {code: chr(0x2400 + code) for code in range(0x20)} | {_DELETE: "\N{SYMBOL FOR DELETE}"}
    table |= dict.fromkeys(range(0x80, 0xA0), _REPLACEMENT) | dict.fromkeys(range(0xD800, 0xE000), _REPLACEMENT)
    table |= dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A)), "")
    return table | {ord("\n"): "\n", ord("\t"): "\t", ord("\r"): ""}


_TABLE: Final = _build_table()


def escape_controls(text: str) -> str:
    """Replace everything that a terminal would execute, except line ends and tabs."""
    return text.translate(_TABLE)


def one_line(text: str) -> str:
    """Escape a text and put it on one line."""
    return " ".join(escape_controls(text).split())


def describe_call(name: str, arguments: Mapping[str, JsonValue]) -> str:
    """Render a tool call as a function call on one line. Long arguments are truncated."""
    written = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items())
    shown = written if len(written) <= MAX_ARGUMENT_CHARACTERS else f"{written[:MAX_ARGUMENT_CHARACTERS]}…"
    return one_line(f"{name}({shown})")


def open_console() -> Console:
    """Open standard output with the width of the terminal, or a fixed width if it is not a terminal."""
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    return Console(file=sys.stdout, highlight=False, width=width)


def open_bar() -> Progress:
    """Open a progress bar on standard error. It is disabled if standard error is not a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
        transient=True,
    )


@contextmanager
def report_progress(
    description: str, *, total: int, completed: int = 0, line_seconds: float = _LINE_SECONDS
) -> Iterator[Callable[[int], None]]:
    """Report progress as a bar on a terminal, and otherwise as a line every `line_seconds`.

    Yields a function to call with the number of items that were completed since the last call.
    """
    with open_bar() as bar:
        if bar.disable:
            yield _ProgressLines(description, total, completed, line_seconds).advance
            return
        task = bar.add_task(description, total=total, completed=completed)
        yield lambda count: bar.advance(task, count)


class _ProgressLines:
    """Progress as lines on standard error."""

    def __init__(self, description: str, total: int, completed: int, seconds: float) -> None:
        self._description = description
        self._total = total
        self._completed = completed
        self._seconds = seconds
        self._next_at = monotonic() + seconds

    def advance(self, count: int) -> None:
        self._completed += count
        now = monotonic()
        if now >= self._next_at:
            self._next_at = now + self._seconds
            click.echo(f"{self._description}: {self._completed:,} of {self._total:,}", err=True)
