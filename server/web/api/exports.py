"""A conversation as a file, over HTTP."""

from collections.abc import AsyncIterator

from litestar import get
from litestar.di import NamedDependency
from litestar.params import FromPath, SkipValidation
from litestar.response import Stream

from server.archive.file import ARCHIVE_MEDIA_TYPE
from server.conversation.errors import (
    ConversationBusy,
    ConversationNotFound,
    DatabaseUnavailable,
    KeyRejected,
    ScopeMissing,
)
from server.inspection.operator_actions import AdminActions, Operator
from server.web.api.operator_actions import OPERATOR
from server.web.auth import admin_only
from server.web.errors import document_errors


@get(
    "/admin/api/conversations/{conversation_id:str}/export",
    guards=[admin_only],
    dependencies=OPERATOR,
    media_type=ARCHIVE_MEDIA_TYPE,
    summary="Export a conversation",
    response_description="The archive: a JSON object a line, its last line of the record `close`.",
    description="Everything of a conversation as JSONL: turns, calls, raw bytes in base64, images. `strata import` "
    "makes the same conversation of it. A file without its last line was cut off, and is refused. The audit log has a "
    "row before the first line leaves.",
    tags=["actions"],
    responses=document_errors(KeyRejected, ScopeMissing, ConversationNotFound, ConversationBusy, DatabaseUnavailable),
)
async def export_conversation(
    conversation_id: FromPath[str],
    operator: NamedDependency[SkipValidation[Operator]],
    actions: NamedDependency[SkipValidation[AdminActions]],
) -> Stream:
    """The lines as they are read."""
    return await answer_export(actions, operator, conversation_id)


async def answer_export(actions: AdminActions, operator: Operator, conversation_id: str) -> Stream:
    """The file as a download. What can be refused is refused before the first line."""
    lines = actions.export(operator, conversation_id)
    first = await anext(lines)
    headers = {
        # An id that was found is one of ours, and safe in a header.
        "content-disposition": f'attachment; filename="{conversation_id}.jsonl"',
        "cache-control": "no-store",
        "x-content-type-options": "nosniff",
    }
    return Stream(_from(first, lines), media_type=ARCHIVE_MEDIA_TYPE, headers=headers)


async def _from(first: bytes, others: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for line in others:
        yield line
