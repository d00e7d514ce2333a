"""Reading turns, calls, chunks and blobs. Lists select no large column."""

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import BigInteger, Integer, bindparam, select, true, tuple_

from server.conversation.block import Blob
from server.conversation.call import Call, Chunk
from server.conversation.errors import ConversationNotFound, TurnNotFound
from server.conversation.identifiers import CONVERSATION, TENANT, decode_id
from server.conversation.page import Page
from server.conversation.turn import Native, Turn
from server.postgres.codec import decode_cursor, decode_text
from server.postgres.engine import Database, Statement, StorePart
from server.postgres.paging import ABOVE_ALL_SEQS, bounded, in_call_range, in_range, page_of
from server.postgres.payload.manifests import ManifestReader
from server.postgres.rows import call_from, turn_from
from server.postgres.tables import blob_references, blobs, call_chunks, calls, conversations, turns

_THIS: Final = (
    conversations.c.id == bindparam("conversation"),
    (conversations.c.tenant_id == bindparam("tenant")).is_(true()),
)
_READABLE: Final = [column for column in turns.c if column.name not in {"native", "idempotency_key", "body_hash"}]


def _of_conversation(table: Any, columns: Any, *conditions: Any) -> Any:
    """Select the rows of a table that belong to the conversation, or one row of NULLs if it exists and has none."""
    joined = conversations.outerjoin(table, (table.c.conversation_id == bindparam("conversation")) & _all(conditions))
    return select(*columns).select_from(joined).where(*_THIS)


def _all(conditions: tuple[Any, ...]) -> Any:
    result = conditions[0]
    for condition in conditions[1:]:
        result &= condition
    return result


_TURN: Final = Statement(_of_conversation(turns, _READABLE, turns.c.seq == bindparam("seq", type_=BigInteger)))
_NATIVE: Final = Statement(
    _of_conversation(
        turns, [turns.c.seq, turns.c.dialect, turns.c.native], turns.c.seq == bindparam("seq", type_=BigInteger)
    )
)
_OLDEST_TURNS: Final = Statement(
    _of_conversation(turns, _READABLE, turns.c.seq > bindparam("place", type_=BigInteger))
    .order_by(turns.c.seq)
    .limit(bindparam("count", type_=Integer))
)
_NEWEST_TURNS: Final = Statement(
    _of_conversation(turns, _READABLE, turns.c.seq < bindparam("place", type_=BigInteger))
    .order_by(turns.c.seq.desc())
    .limit(bindparam("count", type_=Integer))
)
_TURNS_BETWEEN: Final = Statement(
    _of_conversation(
        turns,
        _READABLE,
        turns.c.seq.between(bindparam("first_seq", type_=BigInteger), bindparam("last_seq", type_=BigInteger)),
    ).order_by(turns.c.seq)
)
_CALLS: Final = Statement(
    _of_conversation(calls, [calls], calls.c.turn_seq == bindparam("turn_seq", type_=BigInteger)).order_by(
        calls.c.attempt
    )
)
_CHUNKS: Final = Statement(
    _of_conversation(
        call_chunks,
        [call_chunks.c.attempt, call_chunks.c.byte_offset, call_chunks.c.data],
        call_chunks.c.turn_seq == bindparam("turn_seq", type_=BigInteger),
        tuple_(call_chunks.c.attempt, call_chunks.c.byte_offset)
        >= tuple_(bindparam("attempt", type_=Integer), bindparam("from_offset", type_=BigInteger)),
    ).order_by(call_chunks.c.attempt, call_chunks.c.byte_offset)
)
_REFERRED: Final = select(blob_references.c.seq).where(
    blob_references.c.tenant_id == blobs.c.tenant_id, blob_references.c.sha256 == blobs.c.sha256
)


def _blob_statement(*conditions: Any) -> Statement:
    return Statement(
        select(blobs.c.sha256, blobs.c.media_type, blobs.c.data).where(
            blobs.c.tenant_id == bindparam("tenant"),
            blobs.c.sha256 == bindparam("sha256"),
            _REFERRED.where(*conditions).exists(),
        )
    )


_BLOB: Final = _blob_statement()
_BLOB_OF_CONVERSATION: Final = _blob_statement(blob_references.c.conversation_id == bindparam("conversation"))


class TurnStore(StorePart):
    """Reads turns, calls, chunks and blobs."""

    async def load_turn(self, tenant_id: str, conversation_id: str, seq: int) -> Turn:
        rows = await _rows(self._database, _TURN, "seq", tenant_id, conversation_id, seq=in_range(seq))
        if not rows:
            raise TurnNotFound
        return turn_from(rows[0])

    async def load_native(self, tenant_id: str, conversation_id: str, seq: int) -> Native:
        rows = await _rows(self._database, _NATIVE, "seq", tenant_id, conversation_id, seq=in_range(seq))
        if not rows:
            raise TurnNotFound
        return Native(dialect=decode_text(rows[0]["dialect"]), data=rows[0]["native"])

    async def list_turns(
        self,
        tenant_id: str,
        conversation_id: str,
        *,
        cursor: str | None = None,
        limit: int = 20,
        newest_first: bool = False,
    ) -> Page[Turn]:
        statement, start = (_NEWEST_TURNS, ABOVE_ALL_SEQS) if newest_first else (_OLDEST_TURNS, 0)
        place = start if cursor is None else in_range(decode_cursor(cursor, int))
        rows = await _rows(
            self._database, statement, "seq", tenant_id, conversation_id, place=place, count=bounded(limit) + 1
        )
        return page_of(rows, limit, turn_from, lambda turn: turn.seq)

    async def load_turns(self, tenant_id: str, conversation_id: str, first_seq: int, last_seq: int) -> Sequence[Turn]:
        rows = await _rows(
            self._database,
            _TURNS_BETWEEN,
            "seq",
            tenant_id,
            conversation_id,
            first_seq=in_range(first_seq),
            last_seq=in_range(last_seq),
        )
        return [turn_from(row) for row in rows]

    async def list_calls(self, tenant_id: str, conversation_id: str, turn_seq: int) -> Sequence[Call]:
        rows = await _rows(
            self._database, _CALLS, "attempt", tenant_id, conversation_id, turn_seq=in_call_range(turn_seq)
        )
        manifests = ManifestReader(self._database)
        conversation = decode_id(CONVERSATION, conversation_id)
        return [
            call_from(row, await manifests.expand(conversation, row["turn_seq"], row["attempt"], row["manifest"]))
            for row in rows
        ]

    async def list_chunks(
        self, tenant_id: str, conversation_id: str, turn_seq: int, *, attempt: int, from_offset: int = 0
    ) -> Sequence[Chunk]:
        rows = await _rows(
            self._database,
            _CHUNKS,
            "attempt",
            tenant_id,
            conversation_id,
            turn_seq=in_range(turn_seq),
            attempt=attempt,
            from_offset=from_offset,
        )
        return [Chunk(attempt=row["attempt"], offset=row["byte_offset"], data=row["data"]) for row in rows]

    async def load_blob(self, tenant_id: str, sha256: bytes, *, conversation_id: str | None = None) -> Blob | None:
        values: dict[str, Any] = {"tenant": decode_id(TENANT, tenant_id), "sha256": sha256}
        if conversation_id is None:
            rows = await self._database.run(_BLOB, **values)
        else:
            rows = await self._database.run(
                _BLOB_OF_CONVERSATION, conversation=decode_id(CONVERSATION, conversation_id), **values
            )
        if not rows:
            return None
        row = rows[0]
        return Blob(sha256=row["sha256"], media_type=decode_text(row["media_type"]), data=row["data"])


async def _rows(
    database: Database, statement: Statement, present: str, tenant_id: str, conversation_id: str, **values: Any
) -> list[Any]:
    """Return the rows without the row of NULLs. Raises `ConversationNotFound`."""
    rows = await database.run(
        statement,
        conversation=decode_id(CONVERSATION, conversation_id),
        tenant=decode_id(TENANT, tenant_id),
        **values,
    )
    if not rows:
        raise ConversationNotFound
    return [row for row in rows if row[present] is not None]
