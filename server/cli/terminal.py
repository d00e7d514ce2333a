"""What commands show: tables on standard output, bars on standard error."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Final

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_PIPE_WIDTH: Final = 200
"""Of a table that is read by a program: no column is cut for want of a terminal."""

_LINE_SECONDS: Final = 30.0


def open_console() -> Console:
    """Standard output, as wide as it is, or as wide as a table needs."""
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    return Console(file=sys.stdout, highlight=False, width=width)


def open_bar() -> Progress:
    """On standard error, and only for people."""
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
def tell_progress(
    description: str, *, total: int, completed: int = 0, line_seconds: float = _LINE_SECONDS
) -> Iterator[Callable[[int], None]]:
    """A bar for people; elsewhere a line now and then, so that a log shows that it goes on. Gives what to call with how
    much more is done.
    """
    with open_bar() as bar:
        if bar.disable:
            yield _Lines(description, total, completed, line_seconds).advance
            return
        task = bar.add_task(description, total=total, completed=completed)
        yield lambda count: bar.advance(task, count)


class _Lines:
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
