"""Replays as they are run, and a schema for the conversations that they write.

Rules: this runs while the previous release serves, so it must be usable by that release. It waits at most 4 s for a
lock and works at most 60 s in one statement; what needs longer is split, or raises the limit below with the reason.
NOT NULL comes in three steps: nullable, fill, set. Indexes on large tables are made CONCURRENTLY, outside a
transaction. Once landed, this file is never edited.

The tables `replays` and `replay_items` are made anew: no release has ever written a row of them.
"""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision: str = "20261116_12"
down_revision: str | None = "20261116_11"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_INSTANT = sa.DateTime(timezone=True)
_MONEY = sa.Numeric(20, 10)
_NOW = sa.text("now()")
_SHADOWED = (
    "assistants",
    "blob_references",
    "blobs",
    "call_chunks",
    "calls",
    "compaction_alarms",
    "conversation_facts",
    "conversations",
    "epochs",
    "provider_cache_uses",
    "provider_caches",
    "segments",
    "templates",
    "turn_texts",
    "turns",
    "waiting_turns",
)


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '4s'")
    op.execute("SET LOCAL statement_timeout = '60s'")
    op.drop_table("replay_items")
    op.drop_table("replays")
    _create_replays()
    _create_items()
    _create_results()
    op.create_table(
        "provider_holds",
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("held_until", _INSTANT, nullable=False),
        sa.PrimaryKeyConstraint("provider", name=op.f("pk_provider_holds")),
        comment="Providers that have asked for patience: until then no call of a replay leaves for them.",
    )
    op.execute("CREATE SCHEMA replay")
    for table in _SHADOWED:
        _copy_shape(table)


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '4s'")
    op.execute("SET LOCAL statement_timeout = '60s'")
    for table in _SHADOWED:
        op.drop_table(table, schema="replay")
    op.execute("DROP SCHEMA replay")
    for table in ("provider_holds", "replay_results", "replay_items", "replays"):
        op.drop_table(table)
    _create_former_tables()


def _copy_shape(table: str) -> None:
    """A table in schema replay with the columns, constraints, indexes, storage and comments that the live one has."""
    live, shadow = _quote(table), f"replay.{_quote(table)}"
    op.execute(f"CREATE TABLE {shadow} (LIKE {live} INCLUDING ALL EXCLUDING INDEXES)")
    connection = op.get_bind()
    of_live = {"live": table}
    for name, definition in connection.execute(
        sa.text(
            "SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint "
            "WHERE conrelid = CAST(CAST(:live AS text) AS regclass) AND contype IN ('p', 'f') ORDER BY contype DESC"
        ),
        of_live,
    ).all():
        op.execute(f"ALTER TABLE {shadow} ADD CONSTRAINT {_quote(name)} {definition}")
    for name, definition in connection.execute(
        sa.text(
            "SELECT c.relname, pg_get_indexdef(i.indexrelid) FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid "
            "WHERE i.indrelid = CAST(CAST(:live AS text) AS regclass) AND NOT i.indisprimary"
        ),
        of_live,
    ).all():
        # CREATE [UNIQUE] INDEX name ON schema.table USING ...: all but the table is as it was.
        head, _, tail = definition.partition(" USING ")
        kind = head.partition(" INDEX ")[0]
        op.execute(sa.text(f"{kind} INDEX {_quote(name)} ON {shadow} USING {tail}".replace(":", r"\:")))
    comment, options = connection.execute(
        sa.text(
            "SELECT obj_description(oid, 'pg_class'), array_to_string(reloptions, ', ') FROM pg_class "
            "WHERE oid = CAST(CAST(:live AS text) AS regclass)"
        ),
        of_live,
    ).one()
    op.create_table_comment(table, comment, schema="replay")
    if options:
        op.execute(f"ALTER TABLE {shadow} SET ({options})")


def _quote(name: str) -> str:
    return f'"{name}"'


def _create_replays() -> None:
    op.create_table(
        "replays",
        sa.Column("id", sa.UUID(), nullable=False),
        sa.Column("tenant_id", sa.UUID(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        _text("state", "running, paused, done, cancelled, stopped_by_budget."),
        sa.Column(
            "draft",
            sa.JSON(),
            nullable=False,
            comment="As asked for, without the ids of its conversations and its limits.",
        ),
        sa.Column(
            "item_count",
            sa.Integer(),
            nullable=False,
            comment="When it was made; fewer are left where sources are erased.",
        ),
        sa.Column("repetitions", sa.SmallInteger(), nullable=False),
        sa.Column("parallelism", sa.SmallInteger(), nullable=False, comment="So many items run at the same time."),
        sa.Column("calls_per_minute", sa.Integer(), comment="Null: no limit."),
        sa.Column("budget_usd", _MONEY, comment="Null: no limit."),
        sa.Column("budget_tokens", sa.BigInteger(), comment="Null: no limit."),
        _sum("spent_usd", _MONEY, "Lost calls count by their estimates."),
        _sum("spent_tokens", sa.BigInteger()),
        _sum("reserved_usd", _MONEY, "The sum of what its items have open."),
        _sum("reserved_tokens", sa.BigInteger()),
        _sum("unpriced_count", sa.Integer(), "Calls without a known price."),
        sa.Column("next_call_at", _INSTANT, comment="No call leaves before; null: any time."),
        sa.Column("created_at", _INSTANT, server_default=_NOW, nullable=False, comment="For people."),
        sa.Column("created_by", sa.UUID(), comment="The key; null: the command line."),
        sa.Column("ended_at", _INSTANT),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_replays_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_replays")),
        comment="Batch runs over stored conversations: the one row that whoever runs them locks, briefly.",
        postgresql_with={"fillfactor": 50},
    )
    op.create_index("ix_replays_tenant_id", "replays", ["tenant_id", sa.text("id DESC")])
    op.create_index("ix_replays_running", "replays", ["id"], postgresql_where=sa.text("state = 'running'"))


def _create_items() -> None:
    op.create_table(
        "replay_items",
        sa.Column("conversation_id", sa.UUID(), nullable=False, comment="The source: its items go when it is erased."),
        sa.Column("replay_id", sa.UUID(), nullable=False),
        sa.Column("repetition", sa.SmallInteger(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False, comment="1, 2, 3 within the replay: the order of the work."),
        _text("state", "waiting, running, done, failed, cancelled, skipped."),
        sa.Column("shadow_id", sa.UUID(), comment="The conversation in schema replay that it writes."),
        sa.Column("error_code", sa.Text(), comment="Why it failed."),
        sa.Column(
            "diverged_at_seq", sa.BigInteger(), comment="The first recorded answer that the candidate's differs from."
        ),
        _sum("spent_usd", _MONEY),
        _sum("spent_tokens", sa.BigInteger()),
        _sum("lost_count", sa.Integer(), "Calls that their process died over."),
        sa.Column(
            "lease_token",
            sa.UUID(),
            comment="Whoever writes must know it. Stays when the item ends: a repetition is seen.",
        ),
        sa.Column("lease_owner", sa.Text(), comment="The process that runs it, for operators."),
        sa.Column("lease_expires_at", _INSTANT, comment="After it, anybody may claim the item."),
        sa.Column("call_id", sa.UUID(), comment="The call that is on its way; null: none."),
        sa.Column("call_usd", _MONEY, comment="Its estimate; null where its price is not known."),
        sa.Column("call_tokens", sa.BigInteger(), comment="The same in tokens."),
        sa.Column("started_at", _INSTANT, comment="When it was first claimed."),
        sa.Column("ended_at", _INSTANT),
        sa.ForeignKeyConstraint(["replay_id"], ["replays.id"], name=op.f("fk_replay_items_replay_id_replays")),
        sa.PrimaryKeyConstraint("conversation_id", "replay_id", "repetition", name=op.f("pk_replay_items")),
        comment="One row per source conversation and repetition.",
        postgresql_with={"fillfactor": 70},
    )
    op.create_index("ix_replay_items_replay_id_number", "replay_items", ["replay_id", "number"], unique=True)
    op.create_index("ix_replay_items_replay_id_state_number", "replay_items", ["replay_id", "state", "number"])
    op.create_index(
        "ix_replay_items_running",
        "replay_items",
        ["lease_expires_at"],
        postgresql_where=sa.text("state = 'running'"),
    )


def _create_results() -> None:
    op.create_table(
        "replay_results",
        sa.Column(
            "conversation_id", sa.UUID(), nullable=False, comment="The source: its results go when it is erased."
        ),
        sa.Column("replay_id", sa.UUID(), nullable=False),
        sa.Column("repetition", sa.SmallInteger(), nullable=False),
        sa.Column("place", sa.Integer(), autoincrement=False, nullable=False, comment="1, 2, 3 within the item."),
        sa.Column("number", sa.Integer(), nullable=False, comment="The item's."),
        sa.Column("source_seq", sa.BigInteger(), comment="The recorded answer beside it; null where there is none."),
        sa.Column("shadow_seq", sa.BigInteger(), comment="The turn of the shadow whose calls were made for it."),
        sa.Column("attempt", sa.SmallInteger(), comment="The call that gave it."),
        _text("outcome", "same, different, not_compared, failed."),
        sa.Column("kinds", sa.ARRAY(sa.Text()), nullable=False, comment="In what the answers differ."),
        sa.Column("similarity", sa.Double(), comment="Of the texts, 0 to 1."),
        sa.Column("severity", sa.Double(), nullable=False, comment="0, the same, to 1."),
        sa.Column("note", sa.Text(), comment="What is special, in a word."),
        sa.Column("recorded", postgresql.JSONB(), comment="Stop reason, usage, cost and times of the recorded answer."),
        sa.Column("candidate", postgresql.JSONB(), comment="The same of the candidate's."),
        sa.Column("assertions", postgresql.JSONB(), nullable=False, comment="How each went."),
        sa.Column("has_failed_assertion", sa.Boolean(), nullable=False),
        sa.Column("judge", postgresql.JSONB(), comment="What the judge said; null without one."),
        sa.Column(
            "blocks", postgresql.JSONB(), nullable=False, comment="What the candidate said. Never read by lists."
        ),
        sa.Column("created_at", _INSTANT, server_default=_NOW, nullable=False, comment="For people."),
        sa.ForeignKeyConstraint(["replay_id"], ["replays.id"], name=op.f("fk_replay_results_replay_id_replays")),
        sa.PrimaryKeyConstraint("conversation_id", "replay_id", "repetition", "place", name=op.f("pk_replay_results")),
        comment="What became of each answer of a candidate's. Insert-only.",
    )
    op.create_index(
        "ix_replay_results_replay_id_number_place", "replay_results", ["replay_id", "number", "place"], unique=True
    )
    op.create_index(
        "ix_replay_results_worst", "replay_results", ["replay_id", sa.text("severity DESC"), "number", "place"]
    )


def _create_former_tables() -> None:
    op.create_table(
        "replays",
        sa.Column("id", sa.UUID(), nullable=False),
        sa.Column("tenant_id", sa.UUID(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        _text("state", "queued, running, paused, finished, cancelled, failed."),
        sa.Column(
            "plan",
            sa.JSON(),
            nullable=False,
            comment="Selection, candidate, mode, repetitions, limits: as asked for.",
        ),
        sa.Column("totals", sa.JSON(), nullable=False, comment="Counts, tokens and cost so far."),
        sa.Column("created_at", _INSTANT, server_default=_NOW, nullable=False, comment="For people."),
        sa.Column("finished_at", _INSTANT),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_replays_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_replays")),
        comment="Batch runs over stored conversations. Outside the live tables.",
    )
    op.create_index("ix_replays_tenant_id", "replays", ["tenant_id", sa.text("id DESC")])
    op.create_table(
        "replay_items",
        sa.Column("conversation_id", sa.UUID(), nullable=False, comment="The source: its items go when it is erased."),
        sa.Column("replay_id", sa.UUID(), nullable=False, comment="Indexed for the report."),
        sa.Column("turn_seq", sa.BigInteger(), nullable=False, comment="The recorded model turn that was asked again."),
        sa.Column("repetition", sa.SmallInteger(), nullable=False),
        _text("state", "queued, running, done, failed: done once, billed once."),
        sa.Column("result", sa.JSON(), comment="Blocks, stop reason, usage, cost, latency, divergence."),
        sa.Column("raw_response", sa.LargeBinary(), comment="Every byte of the answer, zstd. Null past retention."),
        sa.Column("cost_usd", _MONEY),
        sa.Column("finished_at", _INSTANT),
        sa.ForeignKeyConstraint(["replay_id"], ["replays.id"], name=op.f("fk_replay_items_replay_id_replays")),
        sa.PrimaryKeyConstraint("conversation_id", "replay_id", "turn_seq", "repetition", name=op.f("pk_replay_items")),
        comment="Results of batch runs, one row per turn and repetition.",
    )
    op.create_index("ix_replay_items_replay_id", "replay_items", ["replay_id"])
    op.execute("ALTER TABLE replay_items ALTER COLUMN raw_response SET STORAGE EXTERNAL")


def _text(name: str, comment: str) -> "sa.Column[str]":
    return sa.Column(name, sa.Text(), nullable=False, comment=comment)


def _sum(name: str, kind: sa.types.TypeEngine[Any], comment: str | None = None) -> "sa.Column[Any]":
    return sa.Column(name, kind, server_default="0", nullable=False, comment=comment)
