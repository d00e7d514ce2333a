"""What commands show: tables on standard output, bars on standard error."""

import sys
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_PIPE_WIDTH: Final = 200
"""Of a table that is read by a program: no column is cut for want of a terminal."""


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
