"""The tables of the search index for operators, derived in the background from turns and calls, and of alarms.

`server.postgres.tables` has the rules for all tables.
"""

from typing import Any

from sqlalchemy import ARRAY, UUID, BigInteger, Boolean, Column, Index, Integer, Table, Text, text
from sqlalchemy.dialects.postgresql import TSVECTOR

from server.postgres.tables import INSTANT, MONEY, metadata, now


def _labels(name: str, comment: str) -> Column[Any]:
    return Column(name, ARRAY(Text), nullable=False, server_default="{}", comment=comment)


def _count(name: str, comment: str | None = None, *, wide: bool = True) -> Column[Any]:
    return Column(name, BigInteger if wide else Integer, nullable=False, server_default="0", comment=comment)


def _flag(name: str, comment: str) -> Column[Any]:
    return Column(name, Boolean, nullable=False, server_default="false", comment=comment)


conversation_facts = Table(
    "conversation_facts",
    metadata,
    Column("conversation_id", UUID, primary_key=True),
    Column("tenant_id", UUID, nullable=False),
    Column("assistant_id", UUID, nullable=False),
    _count("last_indexed_seq", "The newest indexed turn."),
    _count("last_indexed_background_seq", "The same for calls without a turn, which have negative numbers."),
    _count("turn_count"),
    _count("call_count", "All attempts. A fork counts only its own calls, not the copied ones."),
    _labels("models", "Models that answered."),
    _labels("providers", "Providers that answered."),
    _labels("states", "States of its model turns."),
    _labels("stop_reasons", "Stop reasons of its model turns."),
    _labels("error_codes", "Error codes of model turns and of all attempts."),
    _labels("tool_names", "Tools that were called."),
    _flag("has_repairs", "A payload contained repairs of the history."),
    _flag("has_missing_signature", "The model returned a tool call without a required signature."),
    _flag("has_withheld_signature", "Signatures were withheld from a model that does not accept them."),
    _flag("has_prefix_break", "A request did not begin with the prefix of the previous one."),
    _flag("was_recovered", "A turn was ended by another process than the one that ran it."),
    _count("fresh_input_tokens", "Tokens of all indexed calls, including failed ones."),
    _count("cache_read_tokens"),
    _count("cache_write_tokens"),
    _count("output_tokens"),
    _count("reasoning_tokens"),
    Column("cost_usd", MONEY, nullable=False, server_default="0", comment="Cost of the calls with a known price."),
    _count("unpriced_count", "Calls without a known price; `cost_usd` is a lower bound if there are any."),
    Column("slowest_call_ms", BigInteger, comment="Null before the first call."),
    Column("last_activity_at", INSTANT, nullable=False, comment="Time of the newest turn, or of the creation."),
    Column("excerpt", Text, nullable=False, server_default="", comment="The beginning of the first user task."),
    _labels("labels", "All values that can be filtered by equality, as `kind:value`, including the tenant."),
    now("indexed_at", "When the row was last updated."),
    # Lists the conversations of a tenant by activity, and those of all tenants.
    Index(
        "ix_conversation_facts_tenant_activity",
        "tenant_id",
        text("last_activity_at DESC"),
        text("conversation_id DESC"),
    ),
    Index("ix_conversation_facts_activity", text("last_activity_at DESC"), text("conversation_id DESC")),
    # Finds conversations by filters that few of them pass.
    Index(None, "labels", postgresql_using="gin"),
    comment="Search index of conversations, derived from turns and calls in the background. Rebuildable.",
)

turn_texts = Table(
    "turn_texts",
    metadata,
    Column("conversation_id", UUID, primary_key=True),
    Column("seq", BigInteger, primary_key=True),
    Column("tenant_id", UUID, nullable=False),
    Column("text", Text, nullable=False, comment="The readable text of the turn, truncated if very long."),
    Column("tsv", TSVECTOR, nullable=False, comment="The words of the text, and a word for the tenant."),
    # Search.
    Index(None, "tsv", postgresql_using="gin"),
    comment="Texts of turns for search, written in the background. Rebuildable.",
)

index_progress = Table(
    "index_progress",
    metadata,
    Column("name", Text, primary_key=True, comment="The indexer."),
    Column("indexed_until", INSTANT, nullable=False, comment="Turns created before this time are indexed."),
    comment="Progress of the background indexers.",
)

compaction_alarms = Table(
    "compaction_alarms",
    metadata,
    Column("conversation_id", UUID, primary_key=True),
    Column("tenant_id", UUID, nullable=False),
    Column("reason", Text, nullable=False, comment="Why the conversation cannot be compacted."),
    Column("request_tokens", BigInteger, nullable=False, comment="Estimated tokens of the request that is too long."),
    Column(
        "seq",
        BigInteger,
        nullable=False,
        comment="The model turn after which it was found; a later one ends the alarm.",
    ),
    Column("epoch", Integer, nullable=False, comment="The epoch in which it was found; the next one ends the alarm."),
    now("began_at", "When the alarm began."),
    # Lists the alarms of a tenant.
    Index("ix_compaction_alarms_tenant", "tenant_id", text("began_at DESC")),
    comment="Conversations that must be compacted and cannot be.",
)
