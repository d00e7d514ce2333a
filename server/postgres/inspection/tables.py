"""The tables that operators search, counted in the background from the others: they can be made again.

See `tables` for what holds for all of them.
"""

from typing import Any

from sqlalchemy import ARRAY, UUID, BigInteger, Boolean, Column, Index, Integer, Table, Text, text
from sqlalchemy.dialects.postgresql import TSVECTOR

from server.postgres.columns import INSTANT, MONEY, metadata, now


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
    _count("through_seq", "The newest turn that is counted. What came later is not."),
    _count("through_background", "The same for calls of no turn, which have numbers below zero."),
    _count("turn_count"),
    _count("call_count", "Each attempt counts. A fork counts its own calls, not those that it brought along."),
    _labels("models", "Those that answered."),
    _labels("providers", "The same."),
    _labels("states", "Of its answers."),
    _labels("stop_reasons", "The same."),
    _labels("error_codes", "Of its answers and of all attempts."),
    _labels("tool_names", "Tools that were called."),
    _flag("has_repairs", "A payload had to mend the history."),
    _flag("has_missing_signature", "A call came without a signature where the model insists on one."),
    _flag("has_withheld_signature", "Signatures were kept back from a model that does not read them."),
    _flag("has_prefix_break", "A request did not begin as the one before it."),
    _flag("was_reaped", "A turn was ended by another process than the one that ran it."),
    _count("fresh_input_tokens", "Of the calls that are counted, those that failed included."),
    _count("cache_read_tokens"),
    _count("cache_write_tokens"),
    _count("output_tokens"),
    _count("reasoning_tokens"),
    Column("cost_usd", MONEY, nullable=False, server_default="0", comment="Of the calls whose price is known."),
    _count("unpriced_count", "Calls whose price is not known: the cost is at least what is said above."),
    Column("slowest_call_ms", BigInteger, comment="Null before the first call."),
    Column("last_activity_at", INSTANT, nullable=False, comment="The newest turn; before the first, the creation."),
    Column("excerpt", Text, nullable=False, server_default="", comment="How the first user task begins."),
    _labels("labels", "All that can be filtered by equality, as `kind:value`, the tenant among it."),
    now("counted_at", "When the row was last brought up to date."),
    # The list of a tenant's conversations by activity, and that of all tenants.
    Index(
        "ix_conversation_facts_tenant_activity",
        "tenant_id",
        text("last_activity_at DESC"),
        text("conversation_id DESC"),
    ),
    Index("ix_conversation_facts_activity", text("last_activity_at DESC"), text("conversation_id DESC")),
    # Filters that few conversations pass.
    Index(None, "labels", postgresql_using="gin"),
    comment="What operators ask of conversations, counted in the background from turns and calls. Can be made again.",
)

turn_texts = Table(
    "turn_texts",
    metadata,
    Column("conversation_id", UUID, primary_key=True),
    Column("seq", BigInteger, primary_key=True),
    Column("tenant_id", UUID, nullable=False),
    Column("text", Text, nullable=False, comment="What people read of the turn, cut where it is very long."),
    Column("tsv", TSVECTOR, nullable=False, comment="Its words, and one that names the tenant."),
    # Search.
    Index(None, "tsv", postgresql_using="gin"),
    comment="The turns' texts for search, written in the background. Can be made again.",
)

index_progress = Table(
    "index_progress",
    metadata,
    Column("name", Text, primary_key=True, comment="Which indexer."),
    Column("looked_until", INSTANT, nullable=False, comment="Turns before this moment are counted."),
    comment="How far what is counted in the background has come.",
)

compaction_alarms = Table(
    "compaction_alarms",
    metadata,
    Column("conversation_id", UUID, primary_key=True),
    Column("tenant_id", UUID, nullable=False),
    Column("reason", Text, nullable=False, comment="What stands in the way."),
    Column("request_tokens", BigInteger, nullable=False, comment="Of the request that has to become shorter, about."),
    Column("seq", BigInteger, nullable=False, comment="The answer behind which it was seen; a later one ends it."),
    Column("epoch", Integer, nullable=False, comment="In which it was seen; the next one ends it."),
    now("began_at", "Since when."),
    # The alarms of a tenant.
    Index("ix_compaction_alarms_tenant", "tenant_id", text("began_at DESC")),
    comment="Conversations that had to be compacted and could not be, as of their newest such answer.",
)
