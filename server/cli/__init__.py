"""The `strata` command: reads options, runs a command, prints its result.

The room owns the texts, tables, progress bars and exit codes of the terminal. It promises that `strata --help` imports
no SDK, no web framework and no database driver: `StrataGroup` imports a command when it is used. Each command is in the
module of its name (`import` in `import_`), in a function of the same name.

No other room imports a module of this one. `server.__main__` and the console script use `main`.
"""

import click

from server import __version__
from server.cli.group import StrataGroup


@click.group(
    cls=StrataGroup,
    commands_by_name={
        "serve": "Serve the HTTP API.",
        "demo": "Serve with an embedded Postgres, a tenant and its keys.",
        "chat": "Hold a conversation in the terminal.",
        "worker": "Run background jobs until stopped.",
        "compact": "Compact conversations, or estimate what that would save.",
        "jobs": "Show the state of the job queue.",
        "inspect": "Inspect conversations, timelines and calls.",
        "usage": "Report tokens, cost and cache share.",
        "replay": "Verify stored conversations, or rerun them with another model.",
        "export": "Write complete conversations to a file.",
        "import": "Read conversations from a file.",
        "migrate": "Migrate the database schema.",
        "keys": "Create, list and revoke API keys.",
        "seed": "Fill the database with generated conversations.",
        "emulate": "Emulate a provider's API on this machine.",
        "simulate": "Compute what conversations would cost under each policy.",
        "doctor": "Check settings, database, keys and disk.",
        "reference": "",
    },
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="strata")
def main() -> None:
    """A stateful conversation server for Gemini and Claude.

    Settings are environment variables with the prefix STRATA_. docs/reference/settings.md lists them.
    """
