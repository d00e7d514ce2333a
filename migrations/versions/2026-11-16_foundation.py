"""All tables of the first release.

Rules: this runs while the previous release serves, so it must be usable by that release. It waits at most 4 s for a
lock and works at most 60 s in one statement; what needs longer is split, or raises the limit below with the reason.
NOT NULL comes in three steps: nullable, fill, set. Indexes on large tables are made CONCURRENTLY, outside a
transaction. Once landed, this file is never edited.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision: str = "20261116_01"
down_revision: str | None = None
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '4s'")
    op.execute("SET LOCAL statement_timeout = '60s'")
    op.create_table(
        "blob_references",
        sa.Column("conversation_id", sa.UUID(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.LargeBinary(), nullable=False),
        sa.Column("tenant_id", sa.UUID(), nullable=False),
        sa.PrimaryKeyConstraint("conversation_id", "seq", "sha256", name=op.f("pk_blob_references")),
        comment="Which turns show which blobs: counting these rows is the reference count.",
    )
    op.create_index(
        op.f("ix_blob_references_tenant_id_sha256"), "blob_references", ["tenant_id", "sha256"], unique=False
    )
    op.create_table(
        "call_chunks",
        sa.Column("conversation_id", sa.UUID(), nullable=False),
        sa.Column("turn_seq", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.SmallInteger(), nullable=False),
        sa.Column(
            "byte_offset", sa.BigInteger(), nullable=False, comment="Where the piece begins; a repeated write is seen."
        ),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("conversation_id", "turn_seq", "attempt", "byte_offset", name=op.f("pk_call_chunks")),
        comment="Raw bytes of running calls: what resume and crash recovery read. Gone when the call's row has them.",
    )
    op.create_table(
        "calls",
        sa.Column("conversation_id", sa.UUID(), nullable=False),
        sa.Column("turn_seq", sa.BigInteger(), nullable=False, comment="The model turn that the call is for."),
        sa.Column("attempt", sa.SmallInteger(), nullable=False, comment="1, and one more per retry."),
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("account", sa.Text(), nullable=False, comment="Fingerprint of the credentials, never the key."),
        sa.Column("epoch", sa.Integer(), nullable=False, comment="Whose static text was sent."),
        sa.Column(
            "manifest",
            postgresql.JSONB(astext_type=sa.Text()),
            nullable=False,
            comment="Blocks as sent: layer, role, hash, length, cache marker.",
        ),
        sa.Column(
            "dynamic",
            sa.LargeBinary(),
            nullable=False,
            comment="The dynamic layer as sent; it cannot be rendered again.",
        ),
        sa.Column(
            "request_hash",
            sa.LargeBinary(),
            nullable=False,
            comment="SHA-256 of the request body: what a rebuild must give.",
        ),
        sa.Column(
            "cache_expected_tokens",
            sa.Integer(),
            nullable=True,
            comment="What should have come from the provider's cache.",
        ),
        sa.Column("cache_miss_reason", sa.Text(), nullable=True, comment="Why less came, as far as it can be known."),
        sa.Column(
            "repairs",
            postgresql.JSONB(astext_type=sa.Text()),
            nullable=False,
            comment="What was mended in a broken history for this payload.",
        ),
        sa.Column(
            "template_failures",
            postgresql.JSONB(astext_type=sa.Text()),
            nullable=False,
            comment="Templates that fell back to their source.",
        ),
        sa.Column(
            "warnings",
            postgresql.JSONB(astext_type=sa.Text()),
            nullable=False,
            comment="What was assumed or done without.",
        ),
        sa.Column(
            "started_at",
            sa.DateTime(timezone=True),
            nullable=False,
            comment="When the request left; the caller's clock, for durations.",
        ),
        sa.Column("first_byte_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True, comment="Null while it runs."),
        sa.Column("status", sa.SmallInteger(), nullable=True, comment="HTTP status; null where no answer came."),
        sa.Column(
            "headers",
            postgresql.JSONB(astext_type=sa.Text()),
            nullable=True,
            comment="Response headers, request ids among them.",
        ),
        sa.Column("error_code", sa.Text(), nullable=True),
        sa.Column("fresh_input_tokens", sa.Integer(), nullable=True),
        sa.Column("cache_read_tokens", sa.Integer(), nullable=True),
        sa.Column("cache_write_tokens", sa.Integer(), nullable=True),
        sa.Column("output_tokens", sa.Integer(), nullable=True),
        sa.Column("reasoning_tokens", sa.Integer(), nullable=True),
        sa.Column(
            "usage_reported",
            postgresql.JSONB(astext_type=sa.Text()),
            nullable=True,
            comment="The provider's own usage object: the buckets can be derived again.",
        ),
        sa.Column(
            "cost_usd", sa.Numeric(precision=20, scale=10), nullable=True, comment="Null where the price is not known."
        ),
        sa.Column(
            "raw_response",
            sa.LargeBinary(),
            nullable=True,
            comment="Every byte of the body, zstd. Null while it runs, or past retention.",
        ),
        sa.Column("raw_length", sa.BigInteger(), nullable=True, comment="Bytes before compression."),
        sa.PrimaryKeyConstraint("conversation_id", "turn_seq", "attempt", name=op.f("pk_calls")),
        comment="One row per provider call and attempt. Changed when it ends, and when retention takes its bytes.",
    )
    op.create_table(
        "epochs",
        sa.Column("conversation_id", sa.UUID(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False, comment="Why the static layer changed."),
        sa.Column("assistant_version", sa.Integer(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False, comment="Whose segments follow the base text."),
        sa.Column("segment_count", sa.Integer(), nullable=False, comment="How many of them."),
        sa.Column(
            "base_text", sa.Text(), nullable=False, comment="The rendered static prompt without history. Frozen."
        ),
        sa.Column("static_hash", sa.LargeBinary(), nullable=False, comment="SHA-256 of the whole static text."),
        sa.Column(
            "template_hash", sa.LargeBinary(), nullable=False, comment="SHA-256 of the template that was rendered."
        ),
        sa.Column("buffer_start_seq", sa.BigInteger(), nullable=False, comment="Where the buffer began in this epoch."),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="For people.",
        ),
        sa.PrimaryKeyConstraint("conversation_id", "number", name=op.f("pk_epochs")),
        comment="The times in which the static layer does not change. Insert-only.",
    )
    op.create_table(
        "provider_cache_uses",
        sa.Column("conversation_id", sa.UUID(), nullable=False),
        sa.Column("cache_id", sa.UUID(), nullable=False),
        sa.PrimaryKeyConstraint("conversation_id", "cache_id", name=op.f("pk_provider_cache_uses")),
        comment="Which conversations use a cache: it is deleted with its last user. Indexed for that question.",
    )
    op.create_index(op.f("ix_provider_cache_uses_cache_id"), "provider_cache_uses", ["cache_id"], unique=False)
    op.create_table(
        "segments",
        sa.Column("conversation_id", sa.UUID(), nullable=False),
        sa.Column(
            "generation", sa.Integer(), nullable=False, comment="A new one begins when old segments are summarised."
        ),
        sa.Column("position", sa.Integer(), nullable=False, comment="0, 1, 2: only ever added at the end."),
        sa.Column("first_seq", sa.BigInteger(), nullable=False),
        sa.Column("last_seq", sa.BigInteger(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False, comment="The transcript, without reasoning. Frozen."),
        sa.Column("token_count", sa.Integer(), nullable=False),
        sa.Column(
            "summarises_generation", sa.Integer(), nullable=True, comment="For a summary: whose segments it replaces."
        ),
        sa.Column("summarises_count", sa.Integer(), nullable=True, comment="For a summary: how many of them."),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="For people.",
        ),
        sa.PrimaryKeyConstraint("conversation_id", "generation", "position", name=op.f("pk_segments")),
        comment="Compacted history. Insert-only; the turns themselves stay.",
    )
    op.create_table(
        "tenants",
        sa.Column("id", sa.UUID(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False, comment="What operators call it; one tenant per name."),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="For people.",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenants")),
        sa.UniqueConstraint("name", name=op.f("uq_tenants_name")),
        comment="Whose data it is. Every query is bound to one.",
    )
    op.create_table(
        "turns",
        sa.Column("conversation_id", sa.UUID(), nullable=False),
        sa.Column(
            "seq",
            sa.BigInteger(),
            nullable=False,
            comment="1, 2, 3 without gaps, assigned under the conversation's row.",
        ),
        sa.Column("kind", sa.Text(), nullable=False, comment="user_task, model_response, tool_response."),
        sa.Column("state", sa.Text(), nullable=False, comment="complete, interrupted, cancelled, failed."),
        sa.Column(
            "blocks",
            postgresql.JSONB(astext_type=sa.Text()),
            nullable=False,
            comment="For reading and search. Escaped; without signatures.",
        ),
        sa.Column(
            "native",
            sa.LargeBinary(),
            nullable=False,
            comment="The truth: as it goes to the provider, signatures in place.",
        ),
        sa.Column(
            "dialect", sa.Text(), nullable=False, comment="Whose JSON `native` is: strata for input, else the provider."
        ),
        sa.Column(
            "provider", sa.Text(), nullable=True, comment="Model turns: who answered; signatures are valid there alone."
        ),
        sa.Column("model", sa.Text(), nullable=True, comment="Model turns: which model."),
        sa.Column("account", sa.Text(), nullable=True, comment="Model turns: fingerprint of the credentials."),
        sa.Column("attempt", sa.SmallInteger(), nullable=True, comment="Model turns: the call that gave the answer."),
        sa.Column("stop_reason", sa.Text(), nullable=True),
        sa.Column("error_code", sa.Text(), nullable=True, comment="Why a model turn is not complete."),
        sa.Column(
            "fresh_input_tokens",
            sa.Integer(),
            nullable=True,
            comment="Usage in disjoint buckets, summed over the turn's calls.",
        ),
        sa.Column("cache_read_tokens", sa.Integer(), nullable=True),
        sa.Column("cache_write_tokens", sa.Integer(), nullable=True),
        sa.Column("output_tokens", sa.Integer(), nullable=True),
        sa.Column("reasoning_tokens", sa.Integer(), nullable=True),
        sa.Column(
            "cost_usd", sa.Numeric(precision=20, scale=10), nullable=True, comment="Null where the price is not known."
        ),
        sa.Column("language", sa.Text(), nullable=True, comment="User turns: message.language."),
        sa.Column("args", sa.JSON(), nullable=True, comment="Input turns: prompt arguments for this turn alone."),
        sa.Column(
            "idempotency_key",
            sa.Text(),
            nullable=True,
            comment="Input turns: the client's key; the same key gives the same turn.",
        ),
        sa.Column(
            "body_hash",
            sa.LargeBinary(),
            nullable=True,
            comment="Input turns: SHA-256 of the request, to tell a retry from a reused key.",
        ),
        sa.Column(
            "written_under",
            sa.UUID(),
            nullable=False,
            comment="The lease it was written under: a repeated write is seen.",
        ),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="For people; the order is seq.",
        ),
        sa.CheckConstraint("kind IN ('user_task', 'model_response', 'tool_response')", name=op.f("ck_turns_kind")),
        sa.CheckConstraint("state IN ('complete', 'interrupted', 'cancelled', 'failed')", name=op.f("ck_turns_state")),
        sa.PrimaryKeyConstraint("conversation_id", "seq", name=op.f("pk_turns")),
        comment="What was said. Insert-only: no statement of Strata updates a turn.",
    )
    op.create_index(
        op.f("ix_turns_conversation_id_idempotency_key"),
        "turns",
        ["conversation_id", "idempotency_key"],
        unique=True,
        postgresql_where=sa.text("idempotency_key IS NOT NULL"),
    )
    op.create_table(
        "api_keys",
        sa.Column(
            "id",
            sa.UUID(),
            nullable=False,
            comment="Part of the key's text: finds the row before the secret is compared.",
        ),
        sa.Column("tenant_id", sa.UUID(), nullable=False, comment="Indexed for listing."),
        sa.Column("name", sa.Text(), nullable=False, comment="What the operator called it."),
        sa.Column(
            "secret_hash",
            sa.LargeBinary(),
            nullable=False,
            comment="SHA-256 of the secret; the secret itself is nowhere.",
        ),
        sa.Column("scopes", sa.ARRAY(sa.Text()), nullable=False, comment="client, admin."),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="For people.",
        ),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True, comment="Null: never."),
        sa.Column(
            "revoked_at", sa.DateTime(timezone=True), nullable=True, comment="Set once; the row stays for the record."
        ),
        sa.Column(
            "last_used_at",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="Written at most once a minute, so that reading stays reading.",
        ),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_api_keys_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        comment="Who may come in. Hashes only.",
    )
    op.create_index(op.f("ix_api_keys_tenant_id"), "api_keys", ["tenant_id"], unique=False)
    op.create_table(
        "assistants",
        sa.Column("id", sa.UUID(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False, comment="1, 2, 3: each change adds a row, none is edited."),
        sa.Column("tenant_id", sa.UUID(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("language", sa.Text(), nullable=False),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column(
            "instructions", sa.JSON(), nullable=False, comment="roles, procedure, constraints: template sources."
        ),
        sa.Column("variables", sa.JSON(), nullable=False, comment="Defaults of the templates' arguments."),
        sa.Column(
            "tools", sa.JSON(), nullable=False, comment="json, not jsonb: the order of keys is part of the prompt."
        ),
        sa.Column("settings", sa.JSON(), nullable=False, comment="Output limit, thinking, layer order and so on."),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="For people.",
        ),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_assistants_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("id", "version", name=op.f("pk_assistants")),
        comment="One row per version. A conversation pins a version; moving to a new one starts an epoch.",
    )
    op.create_index(
        op.f("ix_assistants_tenant_id"),
        "assistants",
        ["tenant_id", sa.literal_column("id DESC"), sa.literal_column("version DESC")],
        unique=False,
    )
    op.create_table(
        "blobs",
        sa.Column("tenant_id", sa.UUID(), nullable=False, comment="Never shared between tenants."),
        sa.Column("sha256", sa.LargeBinary(), nullable=False, comment="Of the bytes: the same image is stored once."),
        sa.Column("media_type", sa.Text(), nullable=False, comment="Found in the bytes, not believed."),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="For people.",
        ),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_blobs_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("tenant_id", "sha256", name=op.f("pk_blobs")),
        comment="Images by content hash, out of line. Goes with its last reference.",
    )
    op.create_table(
        "conversations",
        sa.Column("id", sa.UUID(), nullable=False),
        sa.Column("tenant_id", sa.UUID(), nullable=False),
        sa.Column("assistant_id", sa.UUID(), nullable=False),
        sa.Column("assistant_version", sa.Integer(), nullable=False),
        sa.Column(
            "revision",
            sa.BigInteger(),
            server_default="0",
            nullable=False,
            comment="Counts every change; compare-and-set.",
        ),
        sa.Column(
            "next_seq",
            sa.BigInteger(),
            server_default="1",
            nullable=False,
            comment="The number of the next input turn.",
        ),
        sa.Column(
            "buffer_start_seq", sa.BigInteger(), server_default="1", nullable=False, comment="First turn not compacted."
        ),
        sa.Column(
            "epoch",
            sa.Integer(),
            server_default="0",
            nullable=False,
            comment="Current epoch; 0 before the first payload.",
        ),
        sa.Column(
            "pending_call_ids",
            sa.ARRAY(sa.Text()),
            server_default="{}",
            nullable=False,
            comment="Tool calls without results, in call order: lets a turn be checked without reading any turn.",
        ),
        sa.Column("identifier", sa.Text(), nullable=True, comment="The application's own name for it."),
        sa.Column("source", sa.Text(), nullable=True, comment="Prompt argument conversation.source."),
        sa.Column("direction", sa.Text(), nullable=True, comment="Prompt argument conversation.direction."),
        sa.Column("mode", sa.Text(), nullable=True, comment="Prompt argument session.mode."),
        sa.Column("args", sa.JSON(), nullable=False, comment="Prompt arguments of the whole conversation."),
        sa.Column("context", sa.JSON(), nullable=False, comment="Content of the dynamic layer, as it is now."),
        sa.Column(
            "metadata",
            postgresql.JSONB(astext_type=sa.Text()),
            server_default="{}",
            nullable=False,
            comment="The application's own; never interpreted.",
        ),
        sa.Column(
            "forked_from_id",
            sa.UUID(),
            nullable=True,
            comment="The conversation that this one began as a copy of; it may be erased.",
        ),
        sa.Column("forked_from_seq", sa.BigInteger(), nullable=True, comment="The last turn that both share."),
        sa.Column(
            "lease_token",
            sa.UUID(),
            nullable=True,
            comment="Set while a turn runs. Whoever writes must know it; it is never reused.",
        ),
        sa.Column(
            "lease_owner",
            sa.Text(),
            nullable=True,
            comment="The process that runs the turn, for operators and for shutdown.",
        ),
        sa.Column(
            "lease_expires_at",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="Moved on by the heartbeat; after it, anybody may end the turn.",
        ),
        sa.Column(
            "lease_turn_seq",
            sa.BigInteger(),
            nullable=True,
            comment="The number that the running model turn will have.",
        ),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="For people.",
        ),
        sa.Column(
            "updated_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="For people.",
        ),
        sa.CheckConstraint(
            "next_seq >= 1 AND buffer_start_seq >= 1 AND buffer_start_seq <= next_seq",
            name=op.f("ck_conversations_seq_order"),
        ),
        sa.CheckConstraint(
            "num_nonnulls(lease_token, lease_owner, lease_expires_at, lease_turn_seq) IN (0, 4)",
            name=op.f("ck_conversations_lease_whole"),
        ),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_conversations_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_conversations")),
        comment="The one row that a turn locks, briefly. Fill factor leaves room for updates in place.",
        postgresql_with={"fillfactor": 70},
    )
    op.create_index(
        "ix_conversations_running",
        "conversations",
        ["id"],
        unique=False,
        postgresql_where=sa.text("lease_token IS NOT NULL"),
    )
    op.create_index(
        op.f("ix_conversations_tenant_id"), "conversations", ["tenant_id", sa.literal_column("id DESC")], unique=False
    )
    op.create_index(
        op.f("ix_conversations_tenant_id_assistant_id"),
        "conversations",
        ["tenant_id", "assistant_id", sa.literal_column("id DESC")],
        unique=False,
    )
    op.create_index(
        op.f("ix_conversations_tenant_id_identifier"),
        "conversations",
        ["tenant_id", "identifier", sa.literal_column("id DESC")],
        unique=False,
        postgresql_where=sa.text("identifier IS NOT NULL"),
    )
    op.create_table(
        "provider_caches",
        sa.Column("id", sa.UUID(), nullable=False),
        sa.Column("tenant_id", sa.UUID(), nullable=False),
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("account", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column(
            "prefix_hash",
            sa.LargeBinary(),
            nullable=False,
            comment="SHA-256 of what the cache holds: static text and tools.",
        ),
        sa.Column(
            "name", sa.Text(), nullable=False, comment="The provider's name for it, which a request sends instead."
        ),
        sa.Column("token_count", sa.Integer(), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="For people and for the price of storage.",
        ),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_provider_caches_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_provider_caches")),
        comment="Explicit caches at a provider, shared by conversations with the same static text.",
    )
    op.create_index(
        op.f("ix_provider_caches_tenant_id_provider_account_model_prefix_hash"),
        "provider_caches",
        ["tenant_id", "provider", "account", "model", "prefix_hash"],
        unique=True,
    )
    op.create_table(
        "replays",
        sa.Column("id", sa.UUID(), nullable=False),
        sa.Column("tenant_id", sa.UUID(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False, comment="queued, running, paused, finished, cancelled, failed."),
        sa.Column(
            "plan", sa.JSON(), nullable=False, comment="Selection, candidate, mode, repetitions, limits: as asked for."
        ),
        sa.Column("totals", sa.JSON(), nullable=False, comment="Counts, tokens and cost so far."),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="For people.",
        ),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_replays_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_replays")),
        comment="Batch runs over stored conversations. Outside the live tables.",
    )
    op.create_index(op.f("ix_replays_tenant_id"), "replays", ["tenant_id", sa.literal_column("id DESC")], unique=False)
    op.create_table(
        "replay_items",
        sa.Column("conversation_id", sa.UUID(), nullable=False, comment="The source: its items go when it is erased."),
        sa.Column("replay_id", sa.UUID(), nullable=False, comment="Indexed for the report."),
        sa.Column("turn_seq", sa.BigInteger(), nullable=False, comment="The recorded model turn that was asked again."),
        sa.Column("repetition", sa.SmallInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False, comment="queued, running, done, failed: done once, billed once."),
        sa.Column("result", sa.JSON(), nullable=True, comment="Blocks, stop reason, usage, cost, latency, divergence."),
        sa.Column(
            "raw_response",
            sa.LargeBinary(),
            nullable=True,
            comment="Every byte of the answer, zstd. Null past retention.",
        ),
        sa.Column("cost_usd", sa.Numeric(precision=20, scale=10), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["replay_id"], ["replays.id"], name=op.f("fk_replay_items_replay_id_replays")),
        sa.PrimaryKeyConstraint("conversation_id", "replay_id", "turn_seq", "repetition", name=op.f("pk_replay_items")),
        comment="Results of batch runs, one row per turn and repetition.",
    )
    op.create_index(op.f("ix_replay_items_replay_id"), "replay_items", ["replay_id"], unique=False)
    # Compressed before they come here: Postgres need not try again.
    for table, column in (("calls", "raw_response"), ("replay_items", "raw_response"), ("blobs", "data")):
        op.execute(f"ALTER TABLE {table} ALTER COLUMN {column} SET STORAGE EXTERNAL")


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '4s'")
    op.execute("SET LOCAL statement_timeout = '60s'")
    op.drop_index(op.f("ix_replay_items_replay_id"), table_name="replay_items")
    op.drop_table("replay_items")
    op.drop_index(op.f("ix_replays_tenant_id"), table_name="replays")
    op.drop_table("replays")
    op.drop_index(op.f("ix_provider_caches_tenant_id_provider_account_model_prefix_hash"), table_name="provider_caches")
    op.drop_table("provider_caches")
    op.drop_index(
        op.f("ix_conversations_tenant_id_identifier"),
        table_name="conversations",
        postgresql_where=sa.text("identifier IS NOT NULL"),
    )
    op.drop_index(op.f("ix_conversations_tenant_id_assistant_id"), table_name="conversations")
    op.drop_index(op.f("ix_conversations_tenant_id"), table_name="conversations")
    op.drop_index(
        "ix_conversations_running", table_name="conversations", postgresql_where=sa.text("lease_token IS NOT NULL")
    )
    op.drop_table("conversations")
    op.drop_table("blobs")
    op.drop_index(op.f("ix_assistants_tenant_id"), table_name="assistants")
    op.drop_table("assistants")
    op.drop_index(op.f("ix_api_keys_tenant_id"), table_name="api_keys")
    op.drop_table("api_keys")
    op.drop_index(
        op.f("ix_turns_conversation_id_idempotency_key"),
        table_name="turns",
        postgresql_where=sa.text("idempotency_key IS NOT NULL"),
    )
    op.drop_table("turns")
    op.drop_table("tenants")
    op.drop_table("segments")
    op.drop_index(op.f("ix_provider_cache_uses_cache_id"), table_name="provider_cache_uses")
    op.drop_table("provider_cache_uses")
    op.drop_table("epochs")
    op.drop_table("calls")
    op.drop_table("call_chunks")
    op.drop_index(op.f("ix_blob_references_tenant_id_sha256"), table_name="blob_references")
    op.drop_table("blob_references")
