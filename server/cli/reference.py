"""`strata reference`: writes the generated pages of `docs/reference`. A test compares them with the code."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from server.app.settings import ClientSettings, Settings
from server.cli.exit_codes import exit_code_of
from server.conversation.errors import every_error
from server.web.app import list_routes
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


_ROUTES: Final = """\
# Routes

This page is written by `make reference`. [The HTTP API guide](../guides/http-api.md) has examples and explains streams,
idempotency and resuming; `GET /schema` returns the OpenAPI 3.1 document.

The column `key` names the scope that an API key needs. `any` is any valid key; an empty cell means that no key is
needed.

| method | path | key | summary |
|---|---|---|---|
"""

_COMMANDS: Final = """\
# Commands

This page is written by `make reference`. `strata COMMAND --help` prints the same text.

Without `STRATA_DATABASE_URL`, every command that needs a database uses the embedded Postgres in `STRATA_DATA_DIR`. It
is started if it does not run, and it stops when the last process that uses it ends.
"""

_COMMAND_WIDTH: Final = 100


def render_errors() -> str:
    """The page docs/reference/errors.md."""
    return _ERRORS + "".join(
        f"| `{kind.code}` | {ANSWERS[kind].status} | {_cell(kind().message)} | {_cell(kind.hint)} "
        f"| {exit_code_of(kind)} |\n"
        for kind in every_error()
    )


def render_settings() -> str:
    """The page docs/reference/settings.md."""
    return _SETTINGS + _settings_table(Settings) + _CLIENT_SETTINGS + _settings_table(ClientSettings)


def render_routes() -> str:
    """The page docs/reference/routes.md."""
    return _ROUTES + "".join(
        f"| {method} | `{path}` | {scope} | {_cell(summary)} |\n" for method, path, scope, summary in list_routes()
    )


def render_commands() -> str:
    """The page docs/reference/commands.md."""
    # The group imports this module to find the command `reference`.
    from server.cli import main  # noqa: PLC0415  reason: as above

    top = click.Context(main, info_name="strata", terminal_width=_COMMAND_WIDTH, **main.context_settings)
    return _COMMANDS + "".join(
        f"\n## {context.command_path}\n\n```text\n{context.get_help()}\n```\n" for context in _list_commands(top)
    )


PAGES: Final = {
    "commands.md": render_commands,
    "errors.md": render_errors,
    "routes.md": render_routes,
    "settings.md": render_settings,
}


@click.command(hidden=True)
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
def reference(directory: Path) -> None:
    """Write the generated pages into DIRECTORY. For developers."""
    for name, render in PAGES.items():
        (directory / name).write_text(render())
        click.echo(f"wrote {directory / name}")


def _list_commands(context: click.Context) -> Iterator[click.Context]:
    """A command and everything below it, in the order of the help texts, without hidden ones."""
    command = context.command
    if command.hidden:
        return
    yield context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            if found is not None:
                yield from _list_commands(click.Context(found, parent=context, info_name=name))


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
