"""`strata export`: complete conversations as JSON lines."""

import sys
from collections.abc import AsyncIterator, Sequence
from typing import IO

import click

from server.app.database import open_database
from server.app.settings import Settings
from server.archive.file import ArchiveWriter
from server.cli.archive_files import PIPE, writing
from server.cli.run import begin_quietly, run
from server.cli.tenants import load_tenant_id
from server.cli.terminal import open_bar
from server.conversation.audit import OPERATOR, Action
from server.conversation.errors import ConversationBusy, ConversationNotFound
from server.inspection.actions import Audit
from server.postgres.archive.exporter import count_conversations, export_records, list_conversation_ids
from server.postgres.archive.fields import FIELDS
from server.postgres.compaction.candidates import find_owner
from server.postgres.engine import Database
from server.postgres.inspection.audit_log import PostgresAuditLog


@click.command()
@click.argument("conversation_ids", nargs=-1, metavar="[CONVERSATION]...")
@click.option("--all", "everything", is_flag=True, help="Export all conversations.")
@click.option("--tenant", help="Only this tenant.  [all]")
@click.option(
    "-o", "--output", "output", default=PIPE, help="File to write; .gz and .zst are compressed.  [standard output]"
)
def export(conversation_ids: tuple[str, ...], tenant: str | None, output: str, *, everything: bool) -> None:
    """Export conversations by their ids, or all of them with --all.

    The file contains one JSON object per line: turns, calls, raw bytes in base64, images, and everything else that
    `strata import` needs to create the same conversations. The command reads the database of the settings; servers can
    keep running. A conversation with a running turn cannot be exported. With --all it is skipped and reported, and the
    exit code is 1.

    \b
    Examples:
      strata export conv_... > conversation.jsonl
      strata export --all --tenant acme -o acme.jsonl.zst
    """  # noqa: D301  reason: click's mark for lines that stay as they are
    if everything == bool(conversation_ids):
        raise click.UsageError("Give either conversation ids or --all.")
    if output == PIPE and sys.stdout.isatty():
        raise click.UsageError("Give a file with -o, or redirect standard output.")
    with writing(output) as file:
        count, skipped = run(_export(begin_quietly(), conversation_ids, tenant, file))
    click.echo(f"{count} conversations exported.", err=True)
    for conversation_id in skipped:
        click.secho(
            f"{conversation_id}: not exported, because a turn is running or the conversation was erased.",
            fg="red",
            err=True,
        )
    if skipped:
        sys.exit(1)


async def _export(
    settings: Settings, conversation_ids: Sequence[str], tenant: str | None, file: IO[bytes]
) -> tuple[int, list[str]]:
    """Return the number of exported conversations, and the ids of those that were skipped."""
    skipped: list[str] = []
    async with open_database(settings) as database:
        tenant_id = await load_tenant_id(database, tenant)
        total = len(conversation_ids) or await count_conversations(database, tenant_id)
        writer = ArchiveWriter(FIELDS)
        file.write(writer.header())
        with open_bar() as progress:
            task = progress.add_task("exporting", total=total)
            done = 0
            async for conversation_id in _list_ids(database, conversation_ids, tenant_id):
                started = False
                try:
                    async for line in _export_audited(database, writer, conversation_id, tenant_id):
                        started = True
                        file.write(line)
                    done += 1
                except (ConversationBusy, ConversationNotFound):
                    # Written lines cannot be taken back, and a conversation that was named must not be skipped.
                    if started or conversation_ids:
                        raise
                    skipped.append(conversation_id)
                progress.advance(task)
        file.write(writer.close())
    return done, skipped


async def _export_audited(
    database: Database, writer: ArchiveWriter, conversation_id: str, tenant_id: str | None
) -> AsyncIterator[bytes]:
    """Yield the lines of a conversation. Its export is in the audit log of its tenant before the first line."""
    owner = await find_owner(database, conversation_id)
    audit = Audit(log=PostgresAuditLog(database), tenant_id=owner, actor=OPERATOR)
    async with audit.record(Action.EXPORT, conversation_id):
        lines = export_records(database, writer, conversation_id, tenant_id=tenant_id)
        first = await anext(lines)
    yield first
    async for line in lines:
        yield line


async def _list_ids(database: Database, conversation_ids: Sequence[str], tenant_id: str | None) -> AsyncIterator[str]:
    if not conversation_ids:
        async for conversation_id in list_conversation_ids(database, tenant_id):
            yield conversation_id
    for conversation_id in conversation_ids:
        yield conversation_id
