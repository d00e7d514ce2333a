"""`strata reference`: the pages of the docs that are tables of the code. A test compares them with it."""

from pathlib import Path
from typing import Final

import click
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from server.app.settings import ClientSettings, Settings
from server.cli.exit_codes import exit_code_of
from server.conversation.errors import every_error
from server.web.errors import ANSWERS

_ERRORS: Final = """\
# Errors

This page is written by `make reference`.

Every error is answered as `application/problem+json` with the members `type` (`urn:strata:error:<code>`), `title`,
`status`, `code`, `detail` (a sentence for people), `hint` (what to do), `request_id` (also in the `x-request-id` header
and in the server's log) and, for `validation_failed`, `errors`: a list of `path`, `source` and `message`. Some codes
add members of their own, such as `scope`. Codes are never renamed. An unexpected error is `internal`, with no detail.

Where waiting helps there is a `retry-after` header. A 409 or 503 that cannot be helped by waiting has
`x-should-retry: false`, since client libraries repeat these by themselves; so has the problem of a turn that failed.

A command that fails says the same sentence on standard error and ends with the exit code of the last column. Beside
these, 0 is success, 1 a check that found something (`strata doctor`, `strata migrate check`), 2 a wrong command line.

| code | HTTP status | meaning | what to do | exit code |
|---|---|---|---|---|
"""

_SETTINGS: Final = """\
# Settings

This page is written by `make reference`.

Each setting is an environment variable. An empty one counts as not set. A value that cannot be used is refused at the
start, with a sentence that names the variable and never repeats the value.

"""

_TABLE: Final = """\
| variable | default | meaning |
|---|---|---|
"""

_CLIENT_SETTINGS: Final = """
## Of a client

These are read by `strata chat` alone.

"""


def render_errors() -> str:
    """The page docs/errors.md."""
    return _ERRORS + "".join(
        f"| `{kind.code}` | {ANSWERS[kind].status} | {_cell(kind().message)} | {_cell(kind.hint)} "
        f"| {exit_code_of(kind)} |\n"
        for kind in every_error()
    )


def render_settings() -> str:
    """The page docs/settings.md."""
    return _SETTINGS + _settings_table(Settings) + _CLIENT_SETTINGS + _settings_table(ClientSettings)


PAGES: Final = {"errors.md": render_errors, "settings.md": render_settings}


@click.command(hidden=True)
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
def reference(directory: Path) -> None:
    """Write the generated pages into DIRECTORY. For developers."""
    for name, render in PAGES.items():
        (directory / name).write_text(render())
        click.echo(f"wrote {directory / name}")


def _settings_table(kind: type[BaseSettings]) -> str:
    return _TABLE + "".join(
        f"| `STRATA_{name.upper()}` | {_default(field)} | {_cell(field.description or '')} |\n"
        for name, field in kind.model_fields.items()
    )


def _default(field: FieldInfo) -> str:
    value = field.default
    if field.default_factory is not None or value in (None, ()):
        return "not set"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
