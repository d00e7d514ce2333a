"""`strata import`: conversations from a file of `strata export`."""

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
@click.option("--tenant", default="default", show_default=True, help="Tenant that will own the conversations.")
@click.option("--new-ids", is_flag=True, help="Give conversations and assistants new ids.")
@click.option("--dry-run", is_flag=True, help="Check the file without importing it.")
def import_(file: str, tenant: str, *, new_ids: bool, dry_run: bool) -> None:
    """Import conversations from a file of `strata export`. FILE can be -, which is standard input.

    The whole file is checked before anything is written. Nothing is imported if it is truncated or modified, or if the
    id of a conversation exists already. Each conversation is imported in one transaction. Conversations and assistants
    keep their ids unless --new-ids is given.

    Prints a line for each conversation: its id in the file, its new id, and its number of turns.
    """
    settings = begin_quietly()
    with _open_path(file) as path:
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
def _open_path(name: str) -> Iterator[Path]:
    """Yield the path of the file. It is read twice, so standard input is copied to a temporary file."""
    if name != PIPE:
        path = Path(name)
        if not path.is_file():
            raise click.BadParameter(f"{name} is not a file.", param_hint="FILE")
        yield path
        return
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as spool:
        shutil.copyfileobj(sys.stdin.buffer, spool)
        spool.flush()
        yield Path(spool.name)
