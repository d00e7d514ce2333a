"""The list of conversations for operators, with filters that combine, in a bounded number of rows.

Filters that few conversations pass are answered by an index: labels and words each have one, and at most `CAP` rows are
read from it. An index reads all its entries for a word or label before it returns the first row, so it is not used if
the planner expects very many. Filters that many conversations pass are answered by a scan of the conversations from the
newest back, one window at a time: matches are then frequent, or the page reports how far it has searched. Either way
the number of rows read does not depend on how many conversations there are.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

from server.conversation.conversation import ConversationState
from server.conversation.errors import CursorInvalid
from server.conversation.identifiers import ASSISTANT, CONVERSATION, TENANT, decode_id, encode_id
from server.inspection.conversation_list import InspectedConversation, InspectedState, InspectionFilter, InspectionPage
from server.postgres.codec import decode_cursor, decode_text, encode_cursor
from server.postgres.engine import ReportPart, Statement
from server.postgres.inspection.search_index import FLAGS, facts_from, label, tenant_label, tenant_word
from server.postgres.paging import bounded
from server.postgres.rows import Row, text_or_none

CAP: Final = 2000
"""Maximum number of rows that one page reads from an index."""
WINDOW: Final = 2000
"""Maximum number of conversations that one page scans."""
TEXT_WINDOW: Final = 200
"""The same for a scan that has to search texts."""
MANY: Final = 4000
"""An index is not used if the planner expects more rows than this."""
ENTRIES: Final = 50_000
"""Nor if even the rarest word has more entries than this: all of them are read before other words exclude any."""
_MAX_WORDS: Final = 8
_WORD: Final = re.compile(r"(-?)(\w+)")
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
_SCAN_SQL: Final = f"""
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
        -- As a subquery per conversation: a join would start with all texts that contain the words.
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
_SCAN_ONE: Final = Statement(_SCAN_SQL.replace("%mine%", "tenant_id = :tenant AND"))
_SCAN_ALL: Final = Statement(_SCAN_SQL.replace("%mine%", ""))
_ESTIMATE_LABELS: Final = Statement(
    "EXPLAIN (FORMAT JSON) SELECT FROM conversation_facts WHERE labels @> :labels::text[]"
)
_ESTIMATE_ALL: Final = Statement("EXPLAIN (FORMAT JSON) SELECT FROM conversation_facts WHERE true")
_ESTIMATE_WORDS: Final = Statement("""
EXPLAIN (FORMAT JSON) SELECT FROM turn_texts
WHERE tsv @@ (websearch_to_tsquery('simple', :words) && plainto_tsquery('simple', :phrase)
    && CASE WHEN :tenant_word::text IS NULL THEN ''::tsquery ELSE ('''' || :tenant_word || '''')::tsquery END)
""")
_TENANT: Final = Statement("SELECT tenant_id FROM conversations WHERE id = :conversation")


@dataclass(frozen=True, slots=True)
class _Position:
    """The conversation after which a page starts."""

    at: datetime = _END_OF_TIME
    before: UUID = _ABOVE_ALL_IDS

    @property
    def cursor(self) -> str:
        micros = (self.at - _EPOCH) // timedelta(microseconds=1)
        return encode_cursor(f"{micros}:{self.before.hex}")


class ConversationReader(ReportPart):
    """Lists conversations; see `server.inspection.port.Inspector`."""

    async def find_tenant(self, conversation_id: str) -> str | None:
        rows = await self._database.run(_TENANT, conversation=decode_id(CONVERSATION, conversation_id))
        return encode_id(TENANT, rows[0]["tenant_id"]) if rows else None

    async def list_conversations(
        self,
        tenant_id: str | None,
        *,
        filters: InspectionFilter = InspectionFilter(),  # noqa: B008  reason: frozen
        cursor: str | None = None,
        limit: int = 20,
    ) -> InspectionPage:
        tenant = None if tenant_id is None else decode_id(TENANT, tenant_id)
        labels = _labels_of(tenant, filters)
        if labels is None or (tenant_id is not None and tenant is None):
            return InspectionPage(items=[], next_cursor=None, estimated_count=0, is_count_exact=True)
        values = _values_of(tenant, labels, filters, _read_cursor(cursor), limit)
        estimate = await self._estimate_count(labels)
        is_rare = len(labels) > (tenant is not None) and estimate <= MANY
        ids = await self._find_candidates(values, is_rare=is_rare)
        if ids is None:
            return await self._scan(values, _window_of(values, filters), limit, estimate)
        rows = await self._reports.run(_AMONG, ids=ids, **_only(_AMONG, values))
        return InspectionPage(
            items=_page_of(rows, limit),
            next_cursor=_cursor_of(rows, limit),
            estimated_count=rows[0]["total"] if rows else 0,
            is_count_exact=cursor is None,
        )

    async def _scan(self, values: dict[str, Any], window: int, limit: int, estimated_count: int) -> InspectionPage:
        statement = _SCAN_ALL if values["tenant"] is None else _SCAN_ONE
        rows = await self._reports.run(statement, window=window, **_only(statement, values))
        edge = rows[0]
        found = [row for row in rows if row["conversation_id"] is not None]
        next_cursor, searched_until = _cursor_of(found, limit), None
        if next_cursor is None and edge["seen_count"] == window:
            searched_until = edge["edge_at"]
            next_cursor = _Position(edge["edge_at"], edge["edge_id"]).cursor
        return InspectionPage(
            items=_page_of(found, limit),
            next_cursor=next_cursor,
            estimated_count=estimated_count,
            is_count_exact=False,
            searched_until=searched_until,
        )

    async def _find_candidates(self, values: dict[str, Any], *, is_rare: bool) -> list[UUID] | None:
        """Return a superset of the matching conversations, or None if no index has few enough."""
        words, phrase = values["words"], values["phrase"]
        if (words or phrase) and await self._are_words_rare(words, phrase, values["tenant_word"]):
            row = (await self._reports.run(_WITH_WORDS, cap=CAP, **_only(_WITH_WORDS, values)))[0]
            if not row["is_capped"]:
                ids: list[UUID] = row["ids"]
                return ids
        # Texts are searched by the scan only.
        if not is_rare or words or phrase:
            return None
        rows = await self._reports.run(_WITH_LABELS, labels=values["labels"], cap=CAP)
        return None if len(rows) > CAP else [row["conversation_id"] for row in rows]

    async def _estimate_count(self, labels: list[str]) -> int:
        """Return the planner's estimate of the number of conversations, without reading rows."""
        if labels:
            return _planned_rows(await self._reports.run(_ESTIMATE_LABELS, labels=labels))
        return _planned_rows(await self._reports.run(_ESTIMATE_ALL))

    async def _are_words_rare(self, words: str, phrase: str, tenant_word: str | None) -> bool:
        """Whether the planner expects few enough entries for the words to read them from the index."""
        if await self._estimate_texts(words, phrase, tenant_word) > MANY:
            return False
        required = list_required(words, phrase)
        for word in required:
            if await self._estimate_texts("", word, tenant_word) <= ENTRIES:
                return True
        return not required

    async def _estimate_texts(self, words: str, phrase: str, tenant_word: str | None) -> int:
        return _planned_rows(
            await self._reports.run(_ESTIMATE_WORDS, words=words, phrase=phrase, tenant_word=tenant_word)
        )


def list_required(words: str, phrase: str) -> Sequence[str]:
    """List the words that a text must contain, longest first, since long words are usually rare. Empty with `or`."""
    found = [word for minus, word in _WORD.findall(words) if not minus]
    if any(word.lower() == "or" for word in found):
        found = []
    return sorted({*found, *(word for _, word in _WORD.findall(phrase))}, key=len, reverse=True)[:_MAX_WORDS]


def _planned_rows(rows: Sequence[Row]) -> int:
    """Return the row estimate of an EXPLAIN."""
    plan: dict[str, Any] = json.loads(rows[0][0])[0]["Plan"]
    return int(plan["Plan Rows"])


def _labels_of(tenant: UUID | None, filters: InspectionFilter) -> list[str] | None:
    """List the labels that a conversation must have, or None if no conversation can have them."""
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
    tenant: UUID | None, labels: list[str], filters: InspectionFilter, position: _Position, limit: int
) -> dict[str, Any]:
    return {
        "tenant": tenant,
        "tenant_word": None if tenant is None else tenant_word(tenant),
        "labels": labels,
        # Quoted phrases have a filter of their own, whose cost is bounded.
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
        "at": position.at,
        "before": position.before,
        "count": bounded(limit) + 1,
    }


def _since(filters: InspectionFilter) -> datetime:
    after = filters.active_after or _BEGINNING
    return after if filters.active_within is None else max(after, datetime.now(UTC) - filters.active_within)


def _window_of(values: dict[str, Any], filters: InspectionFilter) -> int:
    """How many conversations to scan: one page if every conversation matches."""
    if values["words"] or values["phrase"]:
        return TEXT_WINDOW
    is_filtered = len(values["labels"]) > (values["tenant"] is not None) or filters.state in _LIVE_STATES
    ranges = ("cost_from", "cost_to", "tokens_from", "tokens_to")
    count: int = values["count"]
    return WINDOW if is_filtered or any(values[name] is not None for name in ranges) else count


def _only(statement: Statement, values: dict[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in statement.names if name in values}


def _read_cursor(cursor: str | None) -> _Position:
    if cursor is None:
        return _Position()
    micros, _, hexed = decode_cursor(cursor, str).partition(":")
    try:
        return _Position(_EPOCH + timedelta(microseconds=int(micros)), UUID(hex=hexed))
    except (ValueError, OverflowError) as error:
        raise CursorInvalid from error


def _cursor_of(rows: list[Row], limit: int) -> str | None:
    shown = bounded(limit)
    if len(rows) <= shown:
        return None
    last = rows[shown - 1]
    return _Position(last["last_activity_at"], last["conversation_id"]).cursor


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
