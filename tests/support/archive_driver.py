"""Drives conversations to export through everything that can happen to one, and compares them row by row."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hypothesis import strategies as st

from server.archive.file import ArchiveWriter
from server.compaction.compactor import Compactor
from server.conversation.errors import CompactionNotFound, ConversationBusy
from server.conversation.identifiers import CONVERSATION, decode_id
from server.emulator.reply import FaultKind
from server.postgres.archive.exporter import PostgresArchives, export_records
from server.postgres.archive.fields import ARCHIVED, FIELDS
from server.postgres.archive.importer import Importer, ImportOptions
from server.postgres.engine import Database
from tests.support import turn_steps
from tests.support.conversation_driver import ConversationDriver, text_reply
from tests.support.emulators import BOTH

steps = turn_steps.steps | st.tuples(st.just("compact")) | st.tuples(st.just("undo")) | st.tuples(st.just("reject"))


async def take_step(driver: ConversationDriver, compactor: Compactor, step: tuple[Any, ...]) -> None:
    match step:
        case ("compact",):
            await compactor.compact(driver.tenant_id, driver.conversation_id, force=True)
        case ("undo",):
            with suppress(CompactionNotFound, ConversationBusy):
                await compactor.undo(driver.tenant_id, driver.conversation_id)
        case ("reject",):
            for provider in BOTH:
                driver.emulated[provider].inject_fault(FaultKind.SIGNATURE_REJECTED)
            await driver.task("Rejected?", text_reply("Not any more."), abandons_calls=True)
        case _:
            await turn_steps.take_step(driver, step)


async def rows_of(database: Database, conversation_id: str) -> dict[str, list[str]]:
    """Every archived row of a conversation, all columns, as Postgres prints them."""
    conversation = decode_id(CONVERSATION, conversation_id)
    found = {}
    async with database.connection() as connection:
        for table in ARCHIVED.values():
            match table.name:
                case "conversations":
                    which = "id = $1"
                case "assistants":
                    which = """(id, version) IN (
                        SELECT assistant_id, assistant_version FROM conversations WHERE id = $1
                        UNION SELECT c.assistant_id, e.assistant_version FROM conversations c
                        JOIN epochs e ON e.conversation_id = c.id WHERE c.id = $1
                    )"""
                case "templates":
                    which = "hash IN (SELECT template_hash FROM epochs WHERE conversation_id = $1)"
                case "blobs":
                    which = "sha256 IN (SELECT sha256 FROM blob_references WHERE conversation_id = $1)"
                case _:
                    which = "conversation_id = $1"
            rows = await connection.fetch(
                f"SELECT t::text AS row FROM {table.name} t WHERE {which} ORDER BY 1",  # noqa: S608
                conversation,
            )
            found[table.name] = [row["row"] for row in rows]
    return found


async def forget_shared(database: Database) -> None:
    """Erase the conversation and everything that erasing leaves for others, as in a database that never had it."""
    async with database.connection() as connection:
        await connection.execute("DELETE FROM assistants; DELETE FROM templates")


async def export_lines(database: Database, tenant_id: str, conversation_id: str) -> list[bytes]:
    return [line async for line in PostgresArchives(database).export_conversation(tenant_id, conversation_id)]


async def export_several(database: Database, conversation_ids: Sequence[str]) -> list[bytes]:
    writer = ArchiveWriter(FIELDS)
    lines = [writer.header()]
    for conversation_id in conversation_ids:
        lines += [line async for line in export_records(database, writer, conversation_id, tenant_id=None)]
    return [*lines, writer.close()]


async def import_lines(database: Database, tenant_id: str, lines: Sequence[bytes], **options: Any) -> list[str]:
    """Check the whole file and import it, as the command does. Returns the ids of what was imported."""
    importer = Importer(database, ImportOptions(tenant_id=tenant_id, **options))
    await importer.check(lines)
    return [imported.conversation_id async for imported in importer.import_archive(lines)]
