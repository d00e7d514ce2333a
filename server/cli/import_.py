"""`strata import`: reads back what `strata export` has written."""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from server.app.database import open_database
from server.app.settings import Settings
from server.archive.file import ImportedConversation
from server.cli.archive_files import PIPE, read_lines
from server.cli.run import begin_quietly, run
from server.cli.terminal import open_bar
from server.postgres.access.key_ring import PostgresKeyRing
from server.postgres.archive.importer import Importer, ImportOptions


@click.command("import")
@click.argument("file", metavar="FILE")
@click.option("--tenant", default="default", show_default=True, help="Whose the conversations become.")
@click.option("--new-ids", is_flag=True, help="Give conversations and assistants new ids.")
@click.option("--dry-run", is_flag=True, help="Check everything, change nothing.")
def import_(file: str, tenant: str, *, new_ids: bool, dry_run: bool) -> None:
    """Import conversations from a file that `strata export` has written; - is standard input.

    The file is checked as a whole before anything is written: a file that is cut off or altered, or that has a
    conversation whose id is there already, leaves nothing behind. Each conversation is then there whole or not at all.
    Conversations keep their ids, and so do their assistants, unless --new-ids is given.

    Prints a line for each conversation: the id in the file, the id here, and how many turns it has.
    """
    settings = begin_quietly()
    with _local(file) as path:
        imported = run(_import(settings, path, tenant, new_ids=new_ids, dry_run=dry_run))
    for each in imported:
        click.echo(f"{each.source_id}\t{each.conversation_id}\t{each.turn_count}")
    verb = "would be imported" if dry_run else "imported"
    click.echo(f"{len(imported)} conversations {verb}.", err=True)


async def _import(
    settings: Settings, path: Path, tenant: str, *, new_ids: bool, dry_run: bool
) -> list[ImportedConversation]:
    async with open_database(settings) as database:
        tenant_id = (await PostgresKeyRing(database).load_tenant(tenant)).id
        importer = Importer(database, ImportOptions(tenant_id=tenant_id, new_ids=new_ids, dry_run=dry_run))
        with open_bar() as progress:
            checking = progress.add_task("checking", total=None)
            found = await importer.check(read_lines(path))
            progress.remove_task(checking)
            task = progress.add_task("importing", total=len(found))
            imported = []
            async for each in importer.import_archive(read_lines(path)):
                imported.append(each)
                progress.advance(task)
    return imported


@contextmanager
def _local(name: str) -> Iterator[Path]:
    """The file, which is read twice; what comes through a pipe is put into one first."""
    if name != PIPE:
        path = Path(name)
        if not path.is_file():
            raise click.BadParameter(f"There is no file {name}.", param_hint="FILE")
        yield path
        return
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as spool:
        shutil.copyfileobj(sys.stdin.buffer, spool)
        spool.flush()
        yield Path(spool.name)
