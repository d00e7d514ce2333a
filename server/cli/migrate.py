"""`strata migrate`: migrate the database schema."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from server.app.database import open_database_options
from server.app.settings import Settings
from server.cli.run import begin_quietly, run
from server.conversation.errors import SchemaAhead
from server.postgres.distribution import distribute_tables, list_local_tables, plan_distribution
from server.postgres.migrations import (
    SchemaState,
    find_drift,
    migrate_down_one,
    migrate_up,
    read_schema_state,
    write_revision,
)
from server.postgres.partitions import CopyProgress, abandon_partitioning, partition_tables

if TYPE_CHECKING:
    # A type of click that it does not export.
    from click._termui_impl import ProgressBar


@click.group()
def migrate() -> None:
    """Migrate the database schema to this release, or show its state."""


@migrate.command()
def up() -> None:
    """Apply all pending revisions. Servers of the previous release can keep running."""
    settings = begin_quietly()
    before, after = run(_up(settings))
    if before.current == after.current:
        click.echo(f"Nothing to do. The database is at {after.current}.")
        return
    for revision in before.pending:
        click.echo(f"applied {revision}")
    click.echo(f"The database is at {after.current}.")


@migrate.command()
@click.option("--yes", is_flag=True, help="Do not ask for confirmation. Data in dropped tables and columns is lost.")
def down(*, yes: bool) -> None:
    """Revert one revision."""
    settings = begin_quietly()
    if not yes:
        click.confirm("This drops what the revision added, with its data. Continue?", abort=True)
    state = run(_down(settings))
    click.echo(f"The database is at {state.current or 'no revision'}.")


@migrate.command()
def current() -> None:
    """Show the revision of the database and the pending revisions."""
    settings = begin_quietly()
    state = run(_read(settings))
    click.echo(f"database: {state.current or 'no revision'}")
    click.echo(f"release:  {state.head}")
    for revision in state.pending:
        click.echo(f"pending:  {revision}")
    if not state.known:
        click.echo("The database is newer than this release.")


@migrate.command()
def check() -> None:
    """Exit with 1 unless the schema is at the revision of this release and matches the code."""
    settings = begin_quietly()
    state, drift = run(_check(settings))
    if not state.known:
        raise SchemaAhead(f"The database is at revision {state.current}, which is unknown to this release.")
    for revision in state.pending:
        click.echo(f"pending: {revision}")
    for difference in drift:
        click.echo(f"differs: {difference}")
    if state.pending or drift:
        sys.exit(1)
    click.echo(f"The database is at {state.current} and matches the code.")


@migrate.command()
@click.argument("name")
def new(name: str) -> None:
    """Create a revision named NAME in a checkout. For developers."""
    click.echo(f"Wrote {write_revision(name)}")


@migrate.command()
@click.option(
    "--count",
    type=click.IntRange(1, 256),
    default=8,
    show_default=True,
    help="The number of partitions of each table. It cannot be changed later.",
)
@click.option("--abandon", is_flag=True, help="Remove the copies of a conversion that was not finished.")
def partition(*, count: int, abandon: bool) -> None:
    """Convert the tables of turns, calls and chunks to hash partitions.

    Servers may run meanwhile. An interrupted conversion continues where it was.
    """
    settings = begin_quietly()
    if abandon:
        abandoned = run(_abandon(settings))
        click.echo(f"Removed the copies of: {', '.join(abandoned)}." if abandoned else "There is no copy to remove.")
        return
    converted = run(_partition(settings, count))
    click.echo(f"Partitioned: {', '.join(converted)}." if converted else "The tables are partitioned already.")


@migrate.command()
@click.option("--dry-run", is_flag=True, help="Show what would be done, without a connection.")
@click.option("--yes", is_flag=True, help="Do not ask: no server may write meanwhile.")
def distribute(*, dry_run: bool, yes: bool) -> None:
    """Distribute the tables over the nodes of a Citus cluster, by conversation.

    The database needs the extension. Servers and workers must be stopped.
    """
    if dry_run:
        for step in plan_distribution():
            click.echo(f"{step.sql};")
        click.echo(f"-- on the coordinator: {', '.join(list_local_tables())}")
        return
    settings = begin_quietly()
    if not yes:
        click.confirm("Citus blocks writes while it distributes a table. Are all servers stopped?", abort=True)
    distributed = run(_distribute(settings))
    click.echo("The tables are distributed." if distributed else "The tables are distributed already.")


async def _up(settings: Settings) -> tuple[SchemaState, SchemaState]:
    async with open_database_options(settings) as options:
        return await read_schema_state(options), await migrate_up(options)


async def _down(settings: Settings) -> SchemaState:
    async with open_database_options(settings) as options:
        return await migrate_down_one(options)


async def _partition(settings: Settings, count: int) -> list[str]:
    with ExitStack() as stack:
        bars: dict[str, tuple[ProgressBar[int], int]] = {}

        def show(progress: CopyProgress) -> None:
            bar, shown = bars.get(progress.table) or (None, 0)
            if bar is None:
                stack.close()
                bar = stack.enter_context(click.progressbar(length=progress.estimated_rows, label=progress.table))
            bar.update(progress.copied_rows - shown)
            bars[progress.table] = bar, progress.copied_rows

        async with open_database_options(settings) as options:
            return await partition_tables(options, count=count, on_progress=show)


async def _distribute(settings: Settings) -> Sequence[str]:
    async with open_database_options(settings) as options:
        return await distribute_tables(options, on_table=lambda table: click.echo(f"distributed {table}"))


async def _abandon(settings: Settings) -> list[str]:
    async with open_database_options(settings) as options:
        return await abandon_partitioning(options)


async def _read(settings: Settings) -> SchemaState:
    async with open_database_options(settings) as options:
        return await read_schema_state(options)


async def _check(settings: Settings) -> tuple[SchemaState, list[str]]:
    async with open_database_options(settings) as options:
        state = await read_schema_state(options)
        return state, [] if state.pending or not state.known else await find_drift(options)
