"""`strata worker`: background jobs."""

import click


@click.command()
def worker() -> None:
    """Run background jobs until stopped. Any number of workers may share one database."""
    raise click.UsageError("placeholder")
