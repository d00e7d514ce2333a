"""Loading what a payload needs: one statement.

The buffered turns come as one array per column, so that the answer is a single row and nothing is sent twice. The
static text is left out where the caller holds it: it is the largest part and never changes within an epoch.
"""

from collections.abc import Sequence
from typing import Final
from uuid import UUID

import asyncpg

from server.assistant import Assistant
from server.errors import ConversationNotFound
from server.identifiers import CONVERSATION, TENANT, decode_id
from server.postgres.codec import decode_text
from server.postgres.engine import Database, Statement
from server.postgres.rows import assistant_from, conversation_from, epoch_from, json_or_none, text_or_none
from server.store import BufferedTurn, PayloadSource
from server.turn import Native, TurnKind, TurnState

_LOAD: Final = Statement("""
SELECT c.*,
    a.created_at AS assistant_created_at, a.name, a.language, a.description, a.provider, a.model,
    a.instructions, a.variables, a.tools, a.settings,
    e.number AS epoch_number, e.reason AS epoch_reason, e.assistant_version AS epoch_assistant_version,
    e.generation, e.segment_count, e.static_hash, e.template_hash, e.buffer_start_seq AS epoch_buffer_start_seq,
    e.static_hash = ANY(:held_hashes::bytea[]) AS static_held,
    CASE WHEN e.static_hash <> ALL(:held_hashes) THEN e.base_text END AS base_text,
    s.texts AS segment_texts,
    b.*
FROM conversations c
JOIN assistants a ON a.id = c.assistant_id AND a.version = c.assistant_version
LEFT JOIN epochs e ON e.conversation_id = c.id AND e.number = c.epoch
LEFT JOIN LATERAL (
    SELECT array_agg(text ORDER BY position) AS texts
    FROM segments
    WHERE conversation_id = c.id AND generation = e.generation AND position < e.segment_count
        AND e.static_hash <> ALL(:held_hashes)
) s ON true
CROSS JOIN LATERAL (
    -- In the order of the subquery, which the primary key gives for nothing; ORDER BY in each would sort each.
    SELECT array_agg(seq) AS turn_seqs,
        array_agg(kind) AS turn_kinds,
        array_agg(state) AS turn_states,
        array_agg(native) AS turn_natives,
        array_agg(dialect) AS turn_dialects,
        array_agg(provider) AS turn_providers,
        array_agg(model) AS turn_models,
        array_agg(account) AS turn_accounts,
        array_agg(language) AS turn_languages,
        array_agg(args) AS turn_args,
        array_agg(dynamic) AS turn_dynamics
    FROM (
        SELECT t.seq, t.kind, t.state, t.native, t.dialect, t.provider, t.model, t.account, t.language, t.args,
            -- Not a join: the planner thinks the buffer a third of the conversation, and would read all its calls.
            (SELECT k.dynamic FROM calls k
             WHERE k.conversation_id = t.conversation_id AND k.turn_seq = t.seq AND k.attempt = t.attempt) AS dynamic
        FROM turns t
        WHERE t.conversation_id = c.id AND t.seq >= c.buffer_start_seq
        ORDER BY t.seq
    ) AS turn
) b
WHERE c.id = :conversation AND (c.tenant_id = :tenant) IS TRUE
""")


class HeldAssistants:
    """Versions that have been read before: they never change, and reading one costs more than fetching it."""

    def __init__(self, limit: int = 500) -> None:
        self._limit = limit
        self._held: dict[tuple[UUID, int], Assistant] = {}

    def read(self, row: asyncpg.Record) -> Assistant:
        """The assistant of a payload source's row."""
        key = (row["assistant_id"], row["assistant_version"])
        held = self._held.get(key)
        if held is None:
            if len(self._held) >= self._limit:
                self._held.clear()
            held = self._held[key] = assistant_from(row)
        return held


async def load_payload_source(
    database: Database,
    assistants: HeldAssistants,
    tenant_id: str,
    conversation_id: str,
    held_static_hashes: Sequence[bytes],
) -> PayloadSource:
    """See the port."""
    rows = await database.run(
        _LOAD,
        conversation=decode_id(CONVERSATION, conversation_id),
        tenant=decode_id(TENANT, tenant_id),
        held_hashes=list(held_static_hashes),
    )
    if not rows:
        raise ConversationNotFound
    row = rows[0]
    epoch = None if row["epoch_number"] is None else epoch_from(row)
    static_text = None
    if epoch is not None and not row["static_held"]:
        static_text = epoch.base_text + "".join(decode_text(text) for text in row["segment_texts"] or ())
    return PayloadSource(
        conversation=conversation_from(row),
        assistant=assistants.read(row),
        epoch=epoch,
        static_text=static_text,
        buffered=_buffered(row),
    )


def _buffered(row: asyncpg.Record) -> tuple[BufferedTurn, ...]:
    return tuple(
        BufferedTurn(
            seq=seq,
            kind=TurnKind(kind),
            state=TurnState(state),
            native=Native(dialect=dialect, data=native),
            provider=text_or_none(provider),
            model=text_or_none(model),
            account=text_or_none(account),
            language=text_or_none(language),
            args=json_or_none(args),
            dynamic=dynamic,
        )
        for seq, kind, state, native, dialect, provider, model, account, language, args, dynamic in zip(
            row["turn_seqs"] or (),
            row["turn_kinds"] or (),
            row["turn_states"] or (),
            row["turn_natives"] or (),
            row["turn_dialects"] or (),
            row["turn_providers"] or (),
            row["turn_models"] or (),
            row["turn_accounts"] or (),
            row["turn_languages"] or (),
            row["turn_args"] or (),
            row["turn_dynamics"] or (),
            strict=True,
        )
    )
