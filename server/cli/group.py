"""The group of all commands: it loads a command when it is asked for, and ends it with a sentence when it fails."""

import importlib
import keyword
import sys
from collections.abc import Mapping
from typing import Any

import click

from server.cli.exit_codes import exit_code_of
from server.conversation.errors import StrataError


class StrataGroup(click.Group):
    """Knows its commands by name; importing all of them would make each wait for what only one needs.

    Our errors become one sentence on standard error and an exit code. Anything else is a bug and keeps its traceback.
    """

    def __init__(self, *args: Any, commands_by_name: Mapping[str, str], **attributes: Any) -> None:
        """`commands_by_name`: the summary of each command. Without one it is not listed."""
        super().__init__(*args, **attributes)
        self._summaries = commands_by_name

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  reason: click's signature
        return list(self._summaries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002  reason: click's signature
        if cmd_name not in self._summaries:
            return None
        # `import` is a word of Python's: what it is called there has an underscore.
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
