"""The list of conversations for operators, with filters that combine, in a bounded number of rows.

What few conversations pass is found by index: labels and words each have one, and at most a cap of rows is taken from
it. An index reads all its entries of a word or label before the first row comes of it, so it is not asked where the
planner knows that there are very many. What more than the cap pass is found by walking the conversations from the
newest back, a window at a time: then matches are frequent and a window has them, or the page says how far it has
looked. Either way the rows that are read do not depend on how many there are.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

from server.conversation.conversation import ConversationState
from server.conversation.errors import CursorInvalid
from server.conversation.identifiers import ASSISTANT, CONVERSATION, TENANT, decode_id, encode_id
from server.inspection.port import InspectedConversation, InspectedState, InspectionFilter, InspectionPage
from server.postgres.codec import decode_cursor, decode_text, encode_cursor
from server.postgres.engine import Database, Statement
from server.postgres.inspection.fact_rows import FLAGS, facts_from, label, tenant_label, tenant_word
from server.postgres.inspection.text_estimate import MANY, are_rare, planned_rows
from server.postgres.paging import bounded
from server.postgres.rows import Row, text_or_none

CAP: Final = 2000
"""More rows than this are not taken from an index for one page."""
WINDOW: Final = 2000
TEXT_WINDOW: Final = 200
"""Of a walk that has to look into texts."""
_END_OF_TIME: Final = datetime(9999, 12, 31, tzinfo=UTC)
_BEGINNING: Final = datetime(1, 1, 2, tzinfo=UTC)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_ABOVE_ALL_IDS: Final = UUID(int=(1 << 128) - 1)

_QUERY: Final = """(
    SELECT websearch_to_tsquery('simple', :words) AS words, phraseto_tsquery('simple', :phrase) AS phrase,
        plainto_tsquery('simple', :phrase) AS loose,
        CASE WHEN :tenant_word::text IS NULL THEN ''::tsquery ELSE ('''' || :tenant_word || '''')::tsquery END AS own
)"""
_SAYS: Final = """
    (:words = '' OR x.tsv @@ q.words)
    AND (:phrase = '' OR x.tsv @@ q.phrase AND strpos(lower(x.text), lower(:phrase)) > 0)
"""
_WITH_WORDS: Final = Statement(f"""
WITH q AS MATERIALIZED {_QUERY},
near AS (
    SELECT x.conversation_id, x.text, x.tsv FROM turn_texts x
    WHERE x.tsv @@ (SELECT q.words && q.loose && q.own FROM q WHERE numnode(q.words && q.loose) > 0)
    LIMIT :cap + 1
)
SELECT (SELECT count(*) FROM near) > :cap AS is_capped,
    ARRAY(SELECT DISTINCT x.conversation_id FROM near x, q WHERE {_SAYS}) AS ids
""")  # noqa: S608  reason: constants of this module only
_WITH_LABELS: Final = Statement("""
SELECT conversation_id FROM conversation_facts WHERE labels @> :labels::text[] LIMIT :cap + 1
""")
_SHOWN: Final = """
    f.*, c.identifier, c.created_at AS conversation_created_at, c.next_seq, c.pending_call_ids, c.lease_token,
    c.assistant_id AS shown_assistant_id, n.name AS tenant_name,
    (SELECT a.name FROM assistants a WHERE a.id = c.assistant_id ORDER BY a.version DESC LIMIT 1) AS assistant_name
"""
_PASSES: Final = """
    f.labels @> :labels::text[]
    AND (:cost_from::numeric IS NULL OR f.cost_usd >= :cost_from)
    AND (:cost_to::numeric IS NULL OR f.cost_usd <= :cost_to)
    AND (:tokens_from::bigint IS NULL OR f.total_tokens >= :tokens_from)
    AND (:tokens_to::bigint IS NULL OR f.total_tokens <= :tokens_to)
    AND (:running::boolean IS NULL OR (c.lease_token IS NOT NULL) = :running)
    AND (:awaiting::boolean IS NULL OR (c.lease_token IS NULL AND c.pending_call_ids <> '{}') = :awaiting)
"""
_FACTS: Final = """
    SELECT *, fresh_input_tokens + cache_read_tokens + cache_write_tokens + output_tokens + reasoning_tokens
        AS total_tokens
    FROM conversation_facts
"""
_AMONG: Final = Statement(f"""
WITH found AS (
    SELECT {_SHOWN}
    FROM ({_FACTS} WHERE conversation_id = ANY(:ids::uuid[])) AS f
    JOIN conversations c ON c.id = f.conversation_id JOIN tenants n ON n.id = f.tenant_id
    WHERE (:tenant::uuid IS NULL OR f.tenant_id = :tenant)
        AND f.last_activity_at >= :since AND f.last_activity_at < :until AND {_PASSES}
)
SELECT *, (SELECT count(*) FROM found) AS total FROM found
WHERE (last_activity_at, conversation_id) < (:at, :before)
ORDER BY last_activity_at DESC, conversation_id DESC
LIMIT :count
""")  # noqa: S608  reason: constants of this module only
_WALK_SQL: Final = f"""
WITH q AS MATERIALIZED {_QUERY},
seen AS MATERIALIZED (
    {_FACTS}
    WHERE %mine% last_activity_at >= :since AND last_activity_at < :until
        AND (last_activity_at, conversation_id) < (:at, :before)
    ORDER BY last_activity_at DESC, conversation_id DESC
    LIMIT :window
),
edge AS (
    SELECT min(last_activity_at) AS edge_at, count(*) AS seen_count FROM seen
),
found AS (
    SELECT {_SHOWN}
    FROM seen f JOIN conversations c ON c.id = f.conversation_id JOIN tenants n ON n.id = f.tenant_id
    WHERE {_PASSES}
        -- One by one: as a join it would begin with all texts that have the words.
        AND (:words = '' AND :phrase = '' OR (
            SELECT true FROM turn_texts x, q WHERE x.conversation_id = f.conversation_id AND {_SAYS} LIMIT 1
        ) IS TRUE)
    ORDER BY f.last_activity_at DESC, f.conversation_id DESC
    LIMIT :count
)
SELECT edge.edge_at, edge.seen_count,
    (SELECT conversation_id FROM seen ORDER BY last_activity_at, conversation_id LIMIT 1) AS edge_id, found.*
FROM edge LEFT JOIN found ON true
ORDER BY found.last_activity_at DESC, found.conversation_id DESC
"""  # noqa: S608  reason: constants of this module only
_WALK_ONE: Final = Statement(_WALK_SQL.replace("%mine%", "tenant_id = :tenant AND"))
_WALK_ALL: Final = Statement(_WALK_SQL.replace("%mine%", ""))
_ESTIMATE: Final = Statement("EXPLAIN (FORMAT JSON) SELECT FROM conversation_facts WHERE labels @> :labels::text[]")
_ESTIMATE_ALL: Final = Statement("EXPLAIN (FORMAT JSON) SELECT FROM conversation_facts WHERE true")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a list goes on: behind this conversation."""

    at: datetime = _END_OF_TIME
    before: UUID = _ABOVE_ALL_IDS

    @property
    def cursor(self) -> str:
        micros = (self.at - _EPOCH) // timedelta(microseconds=1)
        return encode_cursor(f"{micros}:{self.before.hex}")


async def list_conversations(
    database: Database, tenant_id: str | None, filters: InspectionFilter, cursor: str | None, limit: int
) -> InspectionPage:
    """See the port."""
    tenant = None if tenant_id is None else decode_id(TENANT, tenant_id)
    labels = _labels_of(tenant, filters)
    if labels is None or (tenant_id is not None and tenant is None):
        return InspectionPage(items=[], next_cursor=None, estimated_count=0, is_count_exact=True)
    values = _values_of(tenant, labels, filters, _read_cursor(cursor), limit)
    estimate = await _estimate(database, labels)
    is_rare = len(labels) > (tenant is not None) and estimate <= MANY
    ids = await _find_candidates(database, values, is_rare=is_rare)
    if ids is not None:
        rows = await database.run(_AMONG, ids=ids, **_only(_AMONG, values))
        page = _page_of(rows, limit)
        total = rows[0]["total"] if rows else 0
        return InspectionPage(
            items=page, next_cursor=_cursor_of(rows, limit), estimated_count=total, is_count_exact=cursor is None
        )
    return await _walk(database, values, _window_of(values, filters), limit, estimate)


async def _walk(
    database: Database, values: dict[str, Any], window: int, limit: int, estimated_count: int
) -> InspectionPage:
    statement = _WALK_ALL if values["tenant"] is None else _WALK_ONE
    rows = await database.run(statement, window=window, **_only(statement, values))
    edge = rows[0]
    found = [row for row in rows if row["conversation_id"] is not None]
    next_cursor, searched_until = _cursor_of(found, limit), None
    if next_cursor is None and edge["seen_count"] == window:
        searched_until = edge["edge_at"]
        next_cursor = _Place(edge["edge_at"], edge["edge_id"]).cursor
    return InspectionPage(
        items=_page_of(found, limit),
        next_cursor=next_cursor,
        estimated_count=estimated_count,
        is_count_exact=False,
        searched_until=searched_until,
    )


async def _find_candidates(database: Database, values: dict[str, Any], *, is_rare: bool) -> list[UUID] | None:
    """The conversations of which alone a page can be made; None where no index has few enough."""
    words, phrase = values["words"], values["phrase"]
    if (words or phrase) and await are_rare(database, words, phrase, values["tenant_word"]):
        row = (await database.run(_WITH_WORDS, cap=CAP, **_only(_WITH_WORDS, values)))[0]
        if not row["is_capped"]:
            ids: list[UUID] = row["ids"]
            return ids
    # Where texts have to be looked into, the walk does that.
    if not is_rare or words or phrase:
        return None
    rows = await database.run(_WITH_LABELS, labels=values["labels"], cap=CAP)
    return None if len(rows) > CAP else [row["conversation_id"] for row in rows]


async def _estimate(database: Database, labels: list[str]) -> int:
    """The planner's idea of how many there are: no row is read for it."""
    if labels:
        rows = await database.run(_ESTIMATE, labels=labels)
    else:
        rows = await database.run(_ESTIMATE_ALL)
    return planned_rows(rows)


def _labels_of(tenant: UUID | None, filters: InspectionFilter) -> list[str] | None:
    """The labels that a conversation must have; None where no conversation can have them."""
    named = {
        "model": filters.model,
        "provider": filters.provider,
        "stop": filters.stop_reason,
        "error": filters.error_code,
        "tool": filters.tool_name,
        "state": None if filters.state in _LIVE_STATES else filters.state,
    }
    labels = [label(kind, str(value)) for kind, value in named.items() if value is not None]
    labels += [label("has", flag) for flag in FLAGS if getattr(filters, flag)]
    if filters.assistant_id is not None:
        assistant = decode_id(ASSISTANT, filters.assistant_id)
        if assistant is None:
            return None
        labels.append(label("assistant", str(assistant)))
    return labels if tenant is None else [tenant_label(tenant), *labels]


_LIVE_STATES: Final = (InspectedState.RUNNING, InspectedState.AWAITING_TOOLS)


def _values_of(
    tenant: UUID | None, labels: list[str], filters: InspectionFilter, place: _Place, limit: int
) -> dict[str, Any]:
    return {
        "tenant": tenant,
        "tenant_word": None if tenant is None else tenant_word(tenant),
        "labels": labels,
        # Phrases have a filter of their own, which stays bounded.
        "words": (filters.text or "").replace('"', " ").strip(),
        "phrase": (filters.phrase or "").strip(),
        "cost_from": filters.cost_from,
        "cost_to": filters.cost_to,
        "tokens_from": filters.tokens_from,
        "tokens_to": filters.tokens_to,
        "running": True if filters.state is InspectedState.RUNNING else None,
        "awaiting": True if filters.state is InspectedState.AWAITING_TOOLS else None,
        "since": _since(filters),
        "until": filters.active_before or _END_OF_TIME,
        "at": place.at,
        "before": place.before,
        "count": bounded(limit) + 1,
    }


def _since(filters: InspectionFilter) -> datetime:
    after = filters.active_after or _BEGINNING
    return after if filters.active_within is None else max(after, datetime.now(UTC) - filters.active_within)


def _window_of(values: dict[str, Any], filters: InspectionFilter) -> int:
    """How many are looked through: a page of them where everything passes."""
    if values["words"] or values["phrase"]:
        return TEXT_WINDOW
    is_filtered = len(values["labels"]) > (values["tenant"] is not None) or filters.state in _LIVE_STATES
    ranges = ("cost_from", "cost_to", "tokens_from", "tokens_to")
    count: int = values["count"]
    return WINDOW if is_filtered or any(values[name] is not None for name in ranges) else count


def _only(statement: Statement, values: dict[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in statement.names if name in values}


def _read_cursor(cursor: str | None) -> _Place:
    if cursor is None:
        return _Place()
    micros, _, hexed = decode_cursor(cursor, str).partition(":")
    try:
        return _Place(_EPOCH + timedelta(microseconds=int(micros)), UUID(hex=hexed))
    except (ValueError, OverflowError) as error:
        raise CursorInvalid from error


def _cursor_of(rows: list[Row], limit: int) -> str | None:
    shown = bounded(limit)
    if len(rows) <= shown:
        return None
    last = rows[shown - 1]
    return _Place(last["last_activity_at"], last["conversation_id"]).cursor


def _page_of(rows: list[Row], limit: int) -> list[InspectedConversation]:
    return [_conversation_from(row) for row in rows[: bounded(limit)]]


def _conversation_from(row: Row) -> InspectedConversation:
    is_running = row["lease_token"] is not None
    waits = ConversationState.AWAITING_TOOLS if row["pending_call_ids"] else ConversationState.IDLE
    facts = facts_from(row)
    return InspectedConversation(
        id=encode_id(CONVERSATION, row["conversation_id"]),
        tenant_id=encode_id(TENANT, row["tenant_id"]),
        tenant_name=decode_text(row["tenant_name"]),
        assistant_id=encode_id(ASSISTANT, row["shown_assistant_id"]),
        assistant_name=text_or_none(row["assistant_name"]) or "",
        identifier=text_or_none(row["identifier"]),
        state=ConversationState.RUNNING if is_running else waits,
        created_at=row["conversation_created_at"],
        facts=facts,
        is_counted=facts.last_indexed_seq >= row["next_seq"] - (2 if is_running else 1),
    )
