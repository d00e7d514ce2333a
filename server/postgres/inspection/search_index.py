"""The search index: facts about conversations, and the texts of turns, written after the turns.

Nothing here is on the path of a turn. `index_new` looks for turns that are newer than its last run, with some overlap,
because a turn carries the time at which its transaction began. `index_all` walks all conversations by key and finds
rows with old dates, such as an import. A conversation is counted in portions from its own watermark. Each portion is
one transaction that locks the conversation against erasure and its facts against other indexers, so any number of
indexers may run, and one that dies loses nothing.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

from server.conversation.conversation import ConversationFacts
from server.conversation.turn import Turn
from server.conversation.turn_text import read_text
from server.inspection.fact_counting import CountedCall, count_turns
from server.postgres.codec import decode_json, decode_text, encode_text
from server.postgres.connections import Connection
from server.postgres.engine import Database, Statement
from server.postgres.paging import ids_within
from server.postgres.rows import Row, turn_from, usage_from

PAGE_CONVERSATIONS: Final = 200
PAGE_TURNS: Final = 50
"""Turns per portion. A turn may be a megabyte."""
OVERLAP: Final = timedelta(minutes=2)
"""A turn whose transaction took longer is found by `index_all`."""
_BEFORE_ALL: Final = UUID(int=0)
_NAME: Final = "facts"

_LISTS: Final = ("models", "providers", "states", "stop_reasons", "error_codes", "tool_names")
_BUCKETS: Final = (
    "fresh_input_tokens",
    "cache_read_tokens",
    "cache_write_tokens",
    "output_tokens",
    "reasoning_tokens",
)
_PLAIN: Final = tuple(
    field.name for field in fields(ConversationFacts) if field.name not in {*_LISTS, "usage", "excerpt"}
)

LABEL_KINDS: Final = {
    "models": "model",
    "providers": "provider",
    "states": "state",
    "stop_reasons": "stop",
    "error_codes": "error",
    "tool_names": "tool",
}
FLAGS: Final = (
    "has_repairs",
    "has_missing_signature",
    "has_withheld_signature",
    "has_prefix_break",
    "was_recovered",
)

_BEHIND: Final = """(
    f.conversation_id IS NULL
    OR f.last_indexed_seq < c.next_seq - CASE WHEN c.lease_token IS NULL THEN 1 ELSE 2 END
    OR EXISTS (SELECT FROM calls k WHERE k.conversation_id = c.id AND k.turn_seq < f.last_indexed_background_seq
        AND k.ended_at IS NOT NULL)
)"""
_PROGRESS: Final = Statement("SELECT now() AS now, (SELECT indexed_until FROM index_progress WHERE name = :name)")
_DUE: Final = Statement(f"""
WITH moved AS (
    SELECT DISTINCT conversation_id FROM turns WHERE created_at >= :since
    UNION
    SELECT conversation_id FROM calls WHERE started_at >= :since AND turn_seq < 0
    UNION
    -- A fork is new, although its turns are not.
    SELECT id FROM conversations WHERE id >= :first_id
)
SELECT c.id FROM moved JOIN conversations c ON c.id = moved.conversation_id
LEFT JOIN conversation_facts f ON f.conversation_id = c.id
WHERE c.id > :after AND {_BEHIND}
ORDER BY c.id
LIMIT :count
""")  # noqa: S608  reason: constants of this module only
_WALK: Final = Statement(f"""
WITH page AS (SELECT * FROM conversations WHERE id > :after ORDER BY id LIMIT :count)
SELECT c.id, {_BEHIND} AS is_behind FROM page c
LEFT JOIN conversation_facts f ON f.conversation_id = c.id
ORDER BY c.id
""")  # noqa: S608  reason: constants of this module only
_ADVANCE: Final = Statement("""
INSERT INTO index_progress (name, indexed_until) VALUES (:name, :indexed_until)
ON CONFLICT (name) DO UPDATE SET indexed_until = greatest(index_progress.indexed_until, excluded.indexed_until)
""")
_HOLD: Final = Statement("""
SELECT id, tenant_id, assistant_id, created_at, coalesce(forked_from_seq, 0) AS forked_from_seq
FROM conversations WHERE id = :conversation FOR KEY SHARE
""")
_BEGIN: Final = Statement("""
INSERT INTO conversation_facts (conversation_id, tenant_id, assistant_id, last_activity_at, labels)
VALUES (:conversation, :tenant, :assistant, :created_at, :labels::text[])
ON CONFLICT (conversation_id) DO NOTHING
""")
_LOCK: Final = Statement("SELECT * FROM conversation_facts WHERE conversation_id = :conversation FOR UPDATE")
_TURNS: Final = Statement("""
SELECT seq, kind, state, blocks, provider, model, attempt, stop_reason, error_code, fresh_input_tokens,
    cache_read_tokens, cache_write_tokens, output_tokens, reasoning_tokens, cost_usd, language, args, created_at,
    revision, ending
FROM turns WHERE conversation_id = :conversation AND seq > :after ORDER BY seq LIMIT :count
""")
_CALLS: Final = Statement("""
SELECT turn_seq, error_code, fresh_input_tokens, cache_read_tokens, cache_write_tokens, output_tokens,
    reasoning_tokens, cost_usd, repairs, warnings,
    (extract(epoch FROM ended_at - started_at) * 1000)::bigint AS duration_ms
FROM calls
WHERE conversation_id = :conversation AND ended_at IS NOT NULL
    AND (turn_seq BETWEEN :first_seq AND :last_seq OR turn_seq < :background)
ORDER BY turn_seq, attempt
""")
_WRITE_TEXTS: Final = Statement("""
INSERT INTO turn_texts (conversation_id, seq, tenant_id, text, tsv)
SELECT :conversation, seq, :tenant, text, to_tsvector('simple', text) || array_to_tsvector(ARRAY[:tenant_word::text])
FROM unnest(:seqs::bigint[], :texts::text[]) AS written (seq, text)
ON CONFLICT (conversation_id, seq) DO NOTHING
""")
_WRITE_FACTS: Final = Statement("""
UPDATE conversation_facts SET last_indexed_seq = :last_indexed_seq,
    last_indexed_background_seq = :last_indexed_background_seq,
    assistant_id = :assistant, turn_count = :turn_count, call_count = :call_count, models = :models::text[],
    providers = :providers::text[], states = :states::text[], stop_reasons = :stop_reasons::text[],
    error_codes = :error_codes::text[], tool_names = :tool_names::text[], has_repairs = :has_repairs,
    has_missing_signature = :has_missing_signature, has_withheld_signature = :has_withheld_signature,
    has_prefix_break = :has_prefix_break, was_recovered = :was_recovered, fresh_input_tokens = :fresh_input_tokens,
    cache_read_tokens = :cache_read_tokens, cache_write_tokens = :cache_write_tokens, output_tokens = :output_tokens,
    reasoning_tokens = :reasoning_tokens, cost_usd = :cost_usd, unpriced_count = :unpriced_count,
    slowest_call_ms = :slowest_call_ms, last_activity_at = :last_activity_at, excerpt = :excerpt,
    labels = :labels::text[], indexed_at = now()
WHERE conversation_id = :conversation
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexReport:
    """How much a run has counted."""

    conversation_count: int = 0
    turn_count: int = 0

    def __add__(self, other: "IndexReport") -> "IndexReport":
        return IndexReport(
            conversation_count=self.conversation_count + other.conversation_count,
            turn_count=self.turn_count + other.turn_count,
        )


async def index_new(database: Database) -> IndexReport:
    """Count what is new since the last run; at the first run, everything. Raises `DatabaseUnavailable`."""
    progress = (await database.run(_PROGRESS, name=_NAME))[0]
    began_at, indexed_until = progress["now"], progress["indexed_until"]
    report = await index_all(database) if indexed_until is None else await _index_since(database, indexed_until)
    await database.run(_ADVANCE, name=_NAME, indexed_until=began_at)
    return report


async def index_all(database: Database) -> IndexReport:
    """Walk all conversations and count those that are behind. Can be interrupted and repeated."""
    report, after = IndexReport(), _BEFORE_ALL
    while rows := await database.run(_WALK, after=after, count=PAGE_CONVERSATIONS):
        report += await _index_each(database, [row["id"] for row in rows if row["is_behind"]])
        after = rows[-1]["id"]
    return report


async def index_conversation(database: Database, conversation: UUID) -> IndexReport:
    """Count what is new in one conversation. Does nothing if it is gone."""
    turn_count = 0
    while (counted := await _count_portion(database, conversation)) is not None:
        turn_count += counted
        if counted < PAGE_TURNS:
            return IndexReport(conversation_count=1, turn_count=turn_count)
    return IndexReport()


async def load_lag_seconds(database: Database) -> float:
    """Return how far the index is behind the turns, by the clock of the database. NaN before the first run."""
    row = (await database.run(_PROGRESS, name=_NAME))[0]
    indexed_until: datetime | None = row["indexed_until"]
    return float("nan") if indexed_until is None else max(0.0, (row["now"] - indexed_until).total_seconds())


def facts_from(row: Row) -> ConversationFacts:
    """Read a row of `conversation_facts`."""
    values: dict[str, Any] = {name: row[name] for name in _PLAIN}
    values |= {name: tuple(decode_text(value) for value in row[name]) for name in _LISTS}
    return ConversationFacts(**values, usage=usage_from(row), excerpt=decode_text(row["excerpt"]))


def fact_values(facts: ConversationFacts) -> dict[str, Any]:
    """Return the columns of `conversation_facts` by name."""
    return {
        **{name: getattr(facts, name) for name in _PLAIN},
        **{name: [encode_text(value) for value in getattr(facts, name)] for name in _LISTS},
        **{name: getattr(facts.usage, name) for name in _BUCKETS},
        "excerpt": facts.excerpt,
    }


def labels_of(tenant: UUID, assistant: UUID, facts: ConversationFacts | None) -> list[str]:
    """List the labels by which a conversation can be found."""
    labels = [tenant_label(tenant), label("assistant", str(assistant))]
    return labels if facts is None else [*labels, *_labels_of_facts(facts)]


def tenant_label(tenant: UUID) -> str:
    """Return the label that all conversations of a tenant have."""
    return label("tenant", str(tenant))


def label(kind: str, value: str) -> str:
    """Return a label that can be stored."""
    return encode_text(f"{kind}:{value}")


def tenant_word(tenant: UUID) -> str:
    """Return a word that all texts of a tenant have, so that a search stays within it. It never occurs in a text."""
    return f"tenant:{tenant}"


def _labels_of_facts(facts: ConversationFacts) -> Iterator[str]:
    for name, kind in LABEL_KINDS.items():
        values: Iterable[str] = getattr(facts, name)
        yield from (label(kind, value) for value in values)
    yield from (label("has", flag) for flag in FLAGS if getattr(facts, flag))


async def _index_since(database: Database, indexed_until: datetime) -> IndexReport:
    since = indexed_until - OVERLAP
    first_id, _ = ids_within(since, None)
    report, after = IndexReport(), _BEFORE_ALL
    while rows := await database.run(_DUE, since=since, first_id=first_id, after=after, count=PAGE_CONVERSATIONS):
        report += await _index_each(database, [row["id"] for row in rows])
        after = rows[-1]["id"]
    return report


async def _index_each(database: Database, conversations: Sequence[UUID]) -> IndexReport:
    report = IndexReport()
    for conversation in conversations:
        report += await index_conversation(database, conversation)
    return report


async def _count_portion(database: Database, conversation: UUID) -> int | None:
    """Count the next turns and return their number, or None if the conversation is gone."""
    async with database.transaction() as connection:
        held = await _HOLD.fetch(connection, conversation=conversation)
        if not held:
            return None
        key = {"conversation": conversation, "tenant": held[0]["tenant_id"], "assistant": held[0]["assistant_id"]}
        labels = labels_of(held[0]["tenant_id"], held[0]["assistant_id"], None)
        await _BEGIN.fetch(connection, **key, created_at=held[0]["created_at"], labels=labels)
        facts = facts_from((await _LOCK.fetch(connection, conversation=conversation))[0])
        rows = await _TURNS.fetch(connection, conversation=conversation, after=facts.last_indexed_seq, count=PAGE_TURNS)
        turns = [turn_from(row) for row in rows]
        calls = await _CALLS.fetch(
            connection,
            conversation=conversation,
            first_seq=facts.last_indexed_seq + 1,
            last_seq=turns[-1].seq if turns else facts.last_indexed_seq,
            background=facts.last_indexed_background_seq,
        )
        counted = count_turns(
            facts, turns, [_call_from(row) for row in calls], own_from_seq=held[0]["forked_from_seq"] + 1
        )
        await _write(connection, key, turns, counted)
    return len(turns)


async def _write(connection: Connection, key: dict[str, UUID], turns: Sequence[Turn], facts: ConversationFacts) -> None:
    texts = {turn.seq: text for turn in turns if (text := read_text(turn.blocks))}
    await _WRITE_TEXTS.fetch(
        connection,
        conversation=key["conversation"],
        tenant=key["tenant"],
        tenant_word=tenant_word(key["tenant"]),
        seqs=list(texts),
        texts=list(texts.values()),
    )
    await _WRITE_FACTS.fetch(
        connection,
        conversation=key["conversation"],
        assistant=key["assistant"],
        labels=labels_of(key["tenant"], key["assistant"], facts),
        **fact_values(facts),
    )


def _call_from(row: Row) -> CountedCall:
    return CountedCall(
        turn_seq=row["turn_seq"],
        error_code=row["error_code"],
        usage=usage_from(row),
        cost_usd=row["cost_usd"],
        duration_ms=row["duration_ms"],
        repairs=decode_json(row["repairs"]),
        warnings=decode_json(row["warnings"]),
    )
