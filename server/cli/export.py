"""`strata export`: conversations as JSONL, complete."""

import sys
from collections.abc import AsyncIterator, Sequence
from typing import IO

import click

from server.app.database import open_database
from server.app.settings import Settings
from server.archive.file import ArchiveWriter
from server.cli.archive_files import PIPE, writing
from server.cli.run import begin_quietly, run
from server.cli.terminal import open_bar
from server.conversation.audit import OPERATOR, Action
from server.conversation.errors import ConversationBusy, ConversationNotFound
from server.inspection.actions import Audit
from server.postgres.access.key_ring import PostgresKeyRing
from server.postgres.archive.exporter import count_conversations, export_records, list_conversation_ids
from server.postgres.archive.fields import FIELDS
from server.postgres.compaction.candidates import find_owner
from server.postgres.engine import Database
from server.postgres.inspection.audit_log import PostgresAuditLog


@click.command()
@click.argument("conversation_ids", nargs=-1, metavar="[CONVERSATION]...")
@click.option("--all", "everything", is_flag=True, help="All conversations.")
@click.option("--tenant", help="Only this tenant's.  [every tenant's]")
@click.option("-o", "--output", "output", default=PIPE, help="A file: .gz and .zst are compressed.  [standard output]")
def export(conversation_ids: tuple[str, ...], tenant: str | None, output: str, *, everything: bool) -> None:
    """Export conversations: by their ids, or with --all.

    The file has a JSON object a line: turns, calls, raw bytes in base64, images, everything that `strata import` needs
    to make the same conversations of them. It works on the database of the settings, beside running servers. A
    conversation whose turn runs is not exported; with --all it is passed over and named, and the exit code is 1.

    \b
    Examples:
      strata export conv_... > conversation.jsonl
      strata export --all --tenant acme -o acme.jsonl.zst
    """  # noqa: D301  reason: click's mark for lines that stay as they are
    if everything == bool(conversation_ids):
        raise click.UsageError("Name conversations by their ids, or say --all.")
    if output == PIPE and sys.stdout.isatty():
        raise click.UsageError("Give a file with -o, or send standard output to one.")
    with writing(output) as file:
        count, skipped = run(_export(begin_quietly(), conversation_ids, tenant, file))
    click.echo(f"{count} conversations exported.", err=True)
    for conversation_id in skipped:
        click.secho(f"{conversation_id}: not exported, its turn runs or it was erased.", fg="red", err=True)
    if skipped:
        sys.exit(1)


async def _export(
    settings: Settings, conversation_ids: Sequence[str], tenant: str | None, file: IO[bytes]
) -> tuple[int, list[str]]:
    """How many were written, and the ids of those that could not be."""
    skipped: list[str] = []
    async with open_database(settings) as database:
        tenant_id = None if tenant is None else (await PostgresKeyRing(database).load_tenant(tenant)).id
        total = len(conversation_ids) or await count_conversations(database, tenant_id)
        writer = ArchiveWriter(FIELDS)
        file.write(writer.header())
        with open_bar() as progress:
            task = progress.add_task("exporting", total=total)
            done = 0
            async for conversation_id in _choose(database, conversation_ids, tenant_id):
                begun = False
                try:
                    async for line in _tell_and_read(database, writer, conversation_id, tenant_id):
                        begun = True
                        file.write(line)
                    done += 1
                except (ConversationBusy, ConversationNotFound):
                    # What is begun cannot be taken back, and of those that were named each is wanted.
                    if begun or conversation_ids:
                        raise
                    skipped.append(conversation_id)
                progress.advance(task)
        file.write(writer.close())
    return done, skipped


async def _tell_and_read(
    database: Database, writer: ArchiveWriter, conversation_id: str, tenant_id: str | None
) -> AsyncIterator[bytes]:
    """The lines of a conversation; the audit log of whoever owns it has a row before the first of them leaves."""
    owner = await find_owner(database, conversation_id)
    audit = Audit(log=PostgresAuditLog(database), tenant_id=owner, actor=OPERATOR)
    async with audit.record(Action.EXPORT, conversation_id):
        lines = export_records(database, writer, conversation_id, tenant_id=tenant_id)
        first = await anext(lines)
    yield first
    async for line in lines:
        yield line


async def _choose(database: Database, conversation_ids: Sequence[str], tenant_id: str | None) -> AsyncIterator[str]:
    if not conversation_ids:
        async for conversation_id in list_conversation_ids(database, tenant_id):
            yield conversation_id
    for conversation_id in conversation_ids:
        yield conversation_id
