"""The group of all commands. It imports a command when it is used, and prints its errors."""

import importlib
import keyword
import sys
from collections.abc import Mapping
from typing import Any

import click

from server.cli.exit_codes import exit_code_of
from server.conversation.errors import StrataError


class StrataGroup(click.Group):
    """Imports each command on first use, so that a command does not load the dependencies of the others.

    A `StrataError` becomes one line on standard error and an exit code. Any other exception is a bug and keeps its
    traceback.
    """

    def __init__(self, *args: Any, commands_by_name: Mapping[str, str], **attributes: Any) -> None:
        """`commands_by_name`: the summary of each command. A command with an empty summary is not listed."""
        super().__init__(*args, **attributes)
        self._summaries = commands_by_name

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  reason: click's signature
        return list(self._summaries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002  reason: click's signature
        if cmd_name not in self._summaries:
            return None
        # `import` is a keyword of Python, so its module and function have an underscore.
        name = f"{cmd_name}_" if keyword.iskeyword(cmd_name) else cmd_name
        found: click.Command = getattr(importlib.import_module(f"server.cli.{name}"), name)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002  reason: click's signature
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, summary in self._summaries.items() if summary])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except StrataError as error:
            click.secho(f"strata: {error} [{error.code}]", fg="red", err=True)
            sys.exit(exit_code_of(type(error)))
