"""The `strata` command. Each sub-command lives in a module of its own name."""

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
        "compact": "Compact conversations, or see what it would save.",
        "jobs": "Show what the job queue holds.",
        "inspect": "Look at conversations, timelines and calls.",
        "usage": "Report tokens, cost and cache share.",
        "replay": "Go through stored sessions again: verify them, or try another model.",
        "export": "Write conversations to a file, complete.",
        "import": "Read conversations back from a file.",
        "migrate": "Bring the database schema to this release.",
        "keys": "Create, list and revoke API keys.",
        "seed": "Fill the database with made-up conversations.",
        "emulate": "Emulate a provider's API on this machine.",
        "simulate": "Compute what conversations would cost under each policy.",
        "doctor": "Check everything that has to be right.",
        "reference": "",
    },
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="strata")
def main() -> None:
    """A stateful conversation server for Gemini and Claude.

    Settings come from the environment, each with the prefix STRATA_; docs/reference/settings.md lists them.
    """
