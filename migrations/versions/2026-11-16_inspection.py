"""What inspection reads: facts about conversations, their texts for search, and alarms.

Rules: this runs while the previous release serves, so it must be usable by that release. It waits at most 4 s for a
lock and works at most 60 s in one statement; what needs longer is split, or raises the limit below with the reason.
NOT NULL comes in three steps: nullable, fill, set. Indexes on large tables are made CONCURRENTLY, outside a
transaction. Once landed, this file is never edited.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision: str = "20261116_08"
down_revision: str | None = "20261116_07"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_NOW = sa.text("now()")


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '4s'")
    op.execute("SET LOCAL statement_timeout = '60s'")
    _create_facts()
    _create_texts()
    # Not CONCURRENTLY, which waits for all others, a second migration among them, which waits for this one. Summaries
    # of pages are made in one pass, and no release before this one has turns in any number.
    op.create_index("ix_turns_created_at", "turns", ["created_at"], postgresql_using="brin")


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '4s'")
    op.execute("SET LOCAL statement_timeout = '60s'")
    op.drop_index("ix_turns_created_at", table_name="turns")
    op.drop_table("compaction_alarms")
    op.drop_table("index_progress")
    op.drop_table("turn_texts")
    op.drop_table("conversation_facts")


def _create_facts() -> None:
    op.create_table(
        "conversation_facts",
        sa.Column("conversation_id", sa.UUID(), nullable=False),
        sa.Column("tenant_id", sa.UUID(), nullable=False),
        sa.Column("assistant_id", sa.UUID(), nullable=False),
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
        sa.Column(
            "cost_usd",
            sa.Numeric(20, 10),
            server_default="0",
            nullable=False,
            comment="Of the calls whose price is known.",
        ),
        _count("unpriced_count", "Calls whose price is not known: the cost is at least what is said above."),
        sa.Column("slowest_call_ms", sa.BigInteger(), nullable=True, comment="Null before the first call."),
        sa.Column(
            "last_activity_at",
            sa.DateTime(timezone=True),
            nullable=False,
            comment="The newest turn; before the first, the creation.",
        ),
        sa.Column("excerpt", sa.Text(), server_default="", nullable=False, comment="How the first user task begins."),
        _labels("labels", "All that can be filtered by equality, as `kind:value`, the tenant among it."),
        sa.Column(
            "counted_at",
            sa.DateTime(timezone=True),
            server_default=_NOW,
            nullable=False,
            comment="When the row was last brought up to date.",
        ),
        sa.PrimaryKeyConstraint("conversation_id", name=op.f("pk_conversation_facts")),
        comment="What operators ask of conversations, counted in the background from turns and calls. "
        "Can be made again.",
    )
    newest = [sa.text("last_activity_at DESC"), sa.text("conversation_id DESC")]
    _index("conversation_facts", "tenant_activity", ["tenant_id", *newest])
    _index("conversation_facts", "activity", newest)
    _index("conversation_facts", "labels", ["labels"], using="gin")


def _create_texts() -> None:
    op.create_table(
        "turn_texts",
        sa.Column("conversation_id", sa.UUID(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("tenant_id", sa.UUID(), nullable=False),
        sa.Column(
            "text", sa.Text(), nullable=False, comment="What people read of the turn, cut where it is very long."
        ),
        sa.Column("tsv", postgresql.TSVECTOR(), nullable=False, comment="Its words, and one that names the tenant."),
        sa.PrimaryKeyConstraint("conversation_id", "seq", name=op.f("pk_turn_texts")),
        comment="The turns' texts for search, written in the background. Can be made again.",
    )
    _index("turn_texts", "tsv", ["tsv"], using="gin")
    op.create_table(
        "index_progress",
        sa.Column("name", sa.Text(), nullable=False, comment="Which indexer."),
        sa.Column(
            "looked_until",
            sa.DateTime(timezone=True),
            nullable=False,
            comment="Turns before this moment are counted.",
        ),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_index_progress")),
        comment="How far what is counted in the background has come.",
    )
    op.create_table(
        "compaction_alarms",
        sa.Column("conversation_id", sa.UUID(), nullable=False),
        sa.Column("tenant_id", sa.UUID(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False, comment="What stands in the way."),
        sa.Column(
            "request_tokens",
            sa.BigInteger(),
            nullable=False,
            comment="Of the request that has to become shorter, about.",
        ),
        sa.Column(
            "seq",
            sa.BigInteger(),
            nullable=False,
            comment="The answer behind which it was seen; a later one ends it.",
        ),
        sa.Column("epoch", sa.Integer(), nullable=False, comment="In which it was seen; the next one ends it."),
        sa.Column("began_at", sa.DateTime(timezone=True), server_default=_NOW, nullable=False, comment="Since when."),
        sa.PrimaryKeyConstraint("conversation_id", name=op.f("pk_compaction_alarms")),
        comment="Conversations that had to be compacted and could not be, as of their newest such answer.",
    )
    _index("compaction_alarms", "tenant", ["tenant_id", sa.text("began_at DESC")])


def _index(table: str, name: str, columns: Sequence[str | sa.TextClause], *, using: str | None = None) -> None:
    op.create_index(f"ix_{table}_{name}", table, list(columns), postgresql_using=using)


def _labels(name: str, comment: str) -> "sa.Column[list[str]]":
    return sa.Column(name, sa.ARRAY(sa.Text()), server_default="{}", nullable=False, comment=comment)


def _count(name: str, comment: str | None = None) -> "sa.Column[int]":
    return sa.Column(name, sa.BigInteger(), server_default="0", nullable=False, comment=comment)


def _flag(name: str, comment: str) -> "sa.Column[bool]":
    return sa.Column(name, sa.Boolean(), server_default="false", nullable=False, comment=comment)
