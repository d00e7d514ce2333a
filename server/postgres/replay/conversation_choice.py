"""The conversations that a verification reads: by tenant, by assistant, and by properties of their calls.

They are listed in the order of their ids, one page of ids per statement. Each statement is therefore short, even if few
conversations match, and an id is sufficient to continue.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

from server.conversation.errors import AssistantNotFound, ConversationNotFound
from server.conversation.identifiers import ASSISTANT, CONVERSATION, TENANT, decode_id, encode_id
from server.postgres.engine import Database, Statement
from server.replay.verify.recorded_calls import CallFilter

_WINDOW_ROWS: Final = 1_000
_BEFORE_ALL: Final = UUID(int=0)
_OWN_SQL: Final = """
    (:tenant::uuid IS NULL OR tenant_id = :tenant) AND (:assistant::uuid IS NULL OR assistant_id = :assistant)
"""
_LAST: Final = Statement("SELECT id FROM conversations ORDER BY id DESC LIMIT 1")
_FIRST_TENANT: Final = Statement("SELECT id FROM tenants ORDER BY id LIMIT 1")
_MEASURE: Final = Statement(f"""
SELECT count(*) AS conversation_count, coalesce(sum(next_seq - 1), 0)::bigint AS turn_count
FROM conversations WHERE id <= :last AND {_OWN_SQL}
""")  # noqa: S608  reason: constants of this module only
_WINDOW: Final = Statement(f"""
SELECT c.id, c.next_seq - 1 AS turn_count,
    :is_open::bool OR EXISTS (
        SELECT FROM calls
        WHERE conversation_id = c.id
            AND (:provider::text IS NULL OR provider = :provider)
            AND (:model::text IS NULL OR model = :model)
            AND (:started_after::timestamptz IS NULL OR started_at >= :started_after)
            AND (:started_before::timestamptz IS NULL OR started_at < :started_before)
    ) AS is_chosen
FROM (
    SELECT id, next_seq FROM conversations
    WHERE id > :after AND id <= :last AND {_OWN_SQL}
    ORDER BY id LIMIT :page_rows
) AS c
ORDER BY c.id
""")  # noqa: S608  reason: constants of this module only
_NAMED: Final = Statement("""
SELECT id, next_seq - 1 AS turn_count FROM conversations
WHERE id = ANY(:conversations::uuid[]) AND (:tenant::uuid IS NULL OR tenant_id = :tenant)
ORDER BY id
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationChoice:
    """Which conversations are verified. None means any."""

    tenant_id: str | None = None
    assistant_id: str | None = None
    calls: CallFilter = field(default_factory=CallFilter)
    """The conversations have at least one such call."""
    last_id: str | None = None
    """The last id. Conversations with higher ids were created later and are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenConversation:
    """A conversation with its size."""

    id: str
    turn_count: int
    is_chosen: bool = True
    """False if the conversation has no such call. It is listed nevertheless, because its turns count as progress."""


async def find_last_id(database: Database) -> str | None:
    """Return the highest id of a conversation, or None."""
    rows = await database.run(_LAST)
    return encode_id(CONVERSATION, rows[0]["id"]) if rows else None


async def find_mark(database: Database) -> str:
    """Return what identifies a database and its standbys and copies: the id of its first tenant, or an empty text."""
    rows = await database.run(_FIRST_TENANT)
    return encode_id(TENANT, rows[0]["id"]) if rows else ""


async def measure_choice(database: Database, choice: ConversationChoice) -> int:
    """Return the number of turns of the conversations, regardless of their calls. Raises `AssistantNotFound`."""
    rows = await database.run(_MEASURE, **_values(choice))
    count: int = rows[0]["turn_count"]
    return count


async def list_choice(
    database: Database, choice: ConversationChoice, *, after_id: str | None = None
) -> AsyncIterator[ChosenConversation]:
    """List the conversations after an id, in the order of ids. Raises `AssistantNotFound`."""
    values = _values(choice)
    after = _BEFORE_ALL if after_id is None else _decode(after_id)
    calls = choice.calls
    while rows := await database.run(
        _WINDOW,
        **values,
        after=after,
        page_rows=_WINDOW_ROWS,
        is_open=calls.is_open,
        provider=calls.provider,
        model=calls.model,
        started_after=calls.started_after,
        started_before=calls.started_before,
    ):
        for row in rows:
            yield ChosenConversation(
                id=encode_id(CONVERSATION, row["id"]), turn_count=row["turn_count"], is_chosen=row["is_chosen"]
            )
        after = rows[-1]["id"]


async def find_named(
    database: Database, conversation_ids: Sequence[str], *, tenant_id: str | None
) -> list[ChosenConversation]:
    """Return those that exist, in the order of ids. Raises `ConversationNotFound` for a malformed id."""
    ids = [_decode(each) for each in conversation_ids]
    tenant = None if tenant_id is None else decode_id(TENANT, tenant_id)
    return [
        ChosenConversation(id=encode_id(CONVERSATION, row["id"]), turn_count=row["turn_count"])
        for row in await database.run(_NAMED, conversations=ids, tenant=tenant)
    ]


def _values(choice: ConversationChoice) -> dict[str, Any]:
    assistant = None if choice.assistant_id is None else decode_id(ASSISTANT, choice.assistant_id)
    if choice.assistant_id is not None and assistant is None:
        raise AssistantNotFound
    return {
        "tenant": None if choice.tenant_id is None else decode_id(TENANT, choice.tenant_id),
        "assistant": assistant,
        "last": _BEFORE_ALL if choice.last_id is None else _decode(choice.last_id),
    }


def _decode(conversation_id: str) -> UUID:
    found = decode_id(CONVERSATION, conversation_id)
    if found is None:
        raise ConversationNotFound(f"There is no conversation {conversation_id}.")
    return found
