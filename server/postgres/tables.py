"""The tables of conversations, and what all tables share: the `MetaData`, types and column helpers.

The other tables are declared in the packages of their subjects (`access.tables`, `inspection.tables`, `replay.tables`).
Import `metadata` from `schema`, which imports them all, to have it complete. Rules for all tables:

- A row of `turns`, `epochs`, `segments` and `blobs` is written once and never changed.
- Every table of a conversation has a primary key that starts with `conversation_id`, and every statement of the request
  path restricts each of them by the parameter itself, so that the tables can be hash-partitioned or distributed
  unchanged. A test parses the statements.
- Text from clients and models passes through `codec`: NUL bytes and lone surrogates, which Postgres does not accept,
  are escaped reversibly. `bytea` columns hold the exact bytes.
- Large columns (`native`, `raw_response`, `manifest`, `dynamic`, texts) are stored out of line by TOAST and are not
  named by the statements of lists.
- There is an index only if a statement of the request path or of a list needs it; a comment names it.
- The tables of the request path have no foreign keys: their rows are inserted by statements that lock the
  conversation's row, and `conversation.erasure` deletes them under the same lock. A test checks with the
  catalogue that no row is left.

Times are the database's own (`now()`). Only lists are ordered by them.
"""

from typing import Any

from sqlalchemy import (
    ARRAY,
    JSON,
    UUID,
    BigInteger,
    CheckConstraint,
    Column,
    DateTime,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Numeric,
    Sequence,
    SmallInteger,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)
INSTANT = DateTime(timezone=True)
MONEY = Numeric(20, 10)


def now(name: str, comment: str) -> Column[Any]:
    """Return a column that the database sets to the current time when the row is written."""
    return Column(name, INSTANT, nullable=False, server_default=text("now()"), comment=comment)


assistants = Table(
    "assistants",
    metadata,
    Column("id", UUID, primary_key=True),
    Column("version", Integer, primary_key=True, comment="1, 2, 3: each change adds a row; no row is edited."),
    Column("tenant_id", UUID, ForeignKey("tenants.id"), nullable=False),
    Column("name", Text, nullable=False),
    Column("language", Text, nullable=False),
    Column("description", Text, nullable=False),
    Column("provider", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("instructions", JSON, nullable=False, comment="roles, procedure, constraints: template sources."),
    Column("variables", JSON, nullable=False, comment="Defaults of the templates' arguments."),
    Column("tools", JSON, nullable=False, comment="json, not jsonb: the order of keys is part of the prompt."),
    Column("settings", JSON, nullable=False, comment="Output limit, thinking, layer order and other settings."),
    now("created_at", "Informational."),
    # Lists the assistants of a tenant, newest first, each with its newest version.
    Index(None, "tenant_id", text("id DESC"), text("version DESC")),
    comment="One row per version. A conversation pins a version; a change of version starts an epoch.",
)

conversations = Table(
    "conversations",
    metadata,
    Column("id", UUID, primary_key=True),
    Column("tenant_id", UUID, ForeignKey("tenants.id"), nullable=False),
    Column("assistant_id", UUID, nullable=False),
    Column("assistant_version", Integer, nullable=False),
    Column(
        "revision",
        BigInteger,
        nullable=False,
        server_default="0",
        comment="Incremented by every change; clients compare it before they write.",
    ),
    Column("next_seq", BigInteger, nullable=False, server_default="1", comment="The number of the next input turn."),
    Column(
        "buffer_start_seq",
        BigInteger,
        nullable=False,
        server_default="1",
        comment="The first turn that is not compacted.",
    ),
    Column(
        "epoch", Integer, nullable=False, server_default="0", comment="The current epoch; 0 before the first payload."
    ),
    Column(
        "pending_call_ids",
        ARRAY(Text),
        nullable=False,
        server_default="{}",
        comment="Tool calls without results, in call order; a new turn is validated against them.",
    ),
    Column("identifier", Text, comment="The application's own name for the conversation."),
    Column("source", Text, comment="Prompt argument conversation.source."),
    Column("direction", Text, comment="Prompt argument conversation.direction."),
    Column("mode", Text, comment="Prompt argument session.mode."),
    Column("args", JSON, nullable=False, comment="Prompt arguments of the whole conversation."),
    Column("context", JSON, nullable=False, comment="The current content of the dynamic layer."),
    Column(
        "metadata", JSONB, nullable=False, server_default="{}", comment="Set by the application; never interpreted."
    ),
    Column("forked_from_id", UUID, comment="The conversation that this one was forked from; it may be erased."),
    Column("forked_from_seq", BigInteger, comment="The last turn that was copied."),
    Column(
        "lease_token", UUID, comment="Set while a turn runs. Every write of the turn must name it; it is never reused."
    ),
    Column("lease_owner", Text, comment="The process that runs the turn; read by operators and at shutdown."),
    Column("lease_expires_at", INSTANT, comment="Extended by the heartbeat; afterwards any process may end the turn."),
    Column("lease_turn_seq", BigInteger, comment="The seq that the running model turn will have."),
    Column(
        "cancel_requested_at", INSTANT, comment="When a cancel of the running turn was requested; null if none runs."
    ),
    Column(
        "listened_until",
        INSTANT,
        comment="Growth of the running turn is announced until then; set by a process that reads it from the store.",
    ),
    now("created_at", "Informational."),
    now("updated_at", "Informational."),
    Column(
        "exchange_count",
        BigInteger,
        comment="User tasks so far; null until the next accepted turn counts them.",
    ),
    CheckConstraint("next_seq >= 1 AND buffer_start_seq >= 1 AND buffer_start_seq <= next_seq", name="seq_order"),
    CheckConstraint(
        "num_nonnulls(lease_token, lease_owner, lease_expires_at, lease_turn_seq) IN (0, 4)", name="lease_whole"
    ),
    # Lists the conversations of a tenant, newest first.
    Index(None, "tenant_id", text("id DESC")),
    # The same list filtered by identifier.
    Index(None, "tenant_id", "identifier", text("id DESC"), postgresql_where=text("identifier IS NOT NULL")),
    # The same list filtered by assistant.
    Index(None, "tenant_id", "assistant_id", text("id DESC")),
    # Finds running turns with an expired lease. By id and not by expiry, so that a heartbeat updates no index.
    Index("ix_conversations_running", "id", postgresql_where=text("lease_token IS NOT NULL")),
    comment="The one row that a turn locks, briefly. The fill factor leaves room for updates in place.",
    postgresql_with={"fillfactor": 70},
)

turns = Table(
    "turns",
    metadata,
    Column("conversation_id", UUID, primary_key=True),
    Column(
        "seq",
        BigInteger,
        primary_key=True,
        comment="1, 2, 3 without gaps, assigned under the lock of the conversation's row.",
    ),
    Column("kind", Text, nullable=False, comment="user_task, model_response, tool_response."),
    Column("state", Text, nullable=False, comment="complete, interrupted, cancelled, failed."),
    Column("blocks", JSONB, nullable=False, comment="For display and search: escaped, without signatures."),
    Column("native", LargeBinary, nullable=False, comment="The exact bytes as sent to the provider, with signatures."),
    Column(
        "dialect", Text, nullable=False, comment="The format of `native`: strata for input turns, else the provider."
    ),
    Column("provider", Text, comment="Model turns: the provider; its signatures are valid only there."),
    Column("model", Text, comment="Model turns: the requested model."),
    Column("account", Text, comment="Model turns: fingerprint of the credentials."),
    Column("attempt", SmallInteger, comment="Model turns: the attempt that gave the answer."),
    Column("stop_reason", Text),
    Column("error_code", Text, comment="Why a model turn is not complete."),
    Column("fresh_input_tokens", BigInteger, comment="Usage in disjoint buckets, summed over the turn's calls."),
    Column("cache_read_tokens", BigInteger),
    Column("cache_write_tokens", BigInteger),
    Column("output_tokens", BigInteger),
    Column("reasoning_tokens", BigInteger),
    Column("cost_usd", MONEY, comment="Null if the price is not known."),
    Column("language", Text, comment="User tasks: prompt argument message.language."),
    Column("args", JSON, comment="Input turns: prompt arguments of this turn only."),
    Column("idempotency_key", Text, comment="Input turns: the client's key; the same key gives the same turn."),
    Column(
        "body_hash",
        LargeBinary,
        comment="Input turns: SHA-256 of the request; distinguishes a retry from a reused key.",
    ),
    Column(
        "written_by_lease", UUID, nullable=False, comment="The lease that wrote the turn; identifies a repeated write."
    ),
    now("created_at", "Informational; turns are ordered by seq."),
    Column(
        "revision",
        BigInteger,
        comment="Model turns: the conversation's revision when the turn ended; null if copied by a fork.",
    ),
    Column("model_version", Text, comment="Model turns: the model version that the response names."),
    Column("ending", JSONB, comment="Model turns: details of the provider about the end; null if there are none."),
    CheckConstraint("kind IN ('user_task', 'model_response', 'tool_response')", name="kind"),
    CheckConstraint("state IN ('complete', 'interrupted', 'cancelled', 'failed')", name="state"),
    # Finds duplicate requests.
    Index(
        None,
        "conversation_id",
        "idempotency_key",
        unique=True,
        postgresql_where=text("idempotency_key IS NOT NULL"),
    ),
    # Finds turns that are not indexed yet. Rows are written in this order, which suits BRIN.
    Index(None, "created_at", postgresql_using="brin"),
    comment="The turns of conversations. Insert-only: no statement updates a turn.",
)

calls = Table(
    "calls",
    metadata,
    Column("conversation_id", UUID, primary_key=True),
    Column(
        "turn_seq",
        BigInteger,
        primary_key=True,
        comment="The model turn that the call belongs to; negative for calls without a turn.",
    ),
    Column("attempt", SmallInteger, primary_key=True, comment="1, incremented by each retry."),
    Column("provider", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("account", Text, nullable=False, comment="Fingerprint of the credentials, never the key."),
    Column("epoch", Integer, nullable=False, comment="The epoch whose static text was sent."),
    Column("manifest", JSONB, nullable=False, comment="The blocks as sent: layer, role, hash, length, cache marker."),
    Column("dynamic", LargeBinary, nullable=False, comment="The dynamic layer as sent; it cannot be rendered again."),
    Column(
        "request_hash",
        LargeBinary,
        nullable=False,
        comment="SHA-256 of the request body; a rebuild must yield the same.",
    ),
    Column(
        "cache_expected_tokens", BigInteger, comment="Input tokens that the provider should have read from its cache."
    ),
    Column("cache_miss_reason", Text, comment="Why fewer tokens were read, if that can be determined."),
    Column("repairs", JSONB, nullable=False, comment="Repairs of a broken history in this payload."),
    Column(
        "template_failures",
        JSONB,
        nullable=False,
        comment="Templates that could not be rendered and were sent as their source.",
    ),
    Column("warnings", JSONB, nullable=False, comment="Assumptions and omissions of this payload."),
    Column("started_at", INSTANT, nullable=False, comment="When the request was sent, by the clock of the process."),
    Column("first_byte_at", INSTANT),
    Column("ended_at", INSTANT, comment="Null while the call runs."),
    Column("status", SmallInteger, comment="HTTP status; null if there was no response."),
    Column("headers", JSONB, comment="Response headers, including request ids."),
    Column("error_code", Text),
    Column("fresh_input_tokens", BigInteger),
    Column("cache_read_tokens", BigInteger),
    Column("cache_write_tokens", BigInteger),
    Column("output_tokens", BigInteger),
    Column("reasoning_tokens", BigInteger),
    Column("usage_reported", JSONB, comment="The provider's usage object, from which the token counts were derived."),
    Column("cost_usd", MONEY, comment="Null if the price is not known."),
    Column(
        "raw_response",
        LargeBinary,
        comment="Every byte of the response body, zstd. Null while the call runs, and after retention.",
    ),
    Column("raw_length", BigInteger, comment="Length of the response body before compression."),
    Column(
        "layer_order",
        Text,
        comment="layered or append_only: in the latter, `dynamic` is a permanent part of the input.",
    ),
    Column(
        "caching",
        JSONB,
        comment="What was asked of the provider's cache: markers, lifetimes, the name of a cache.",
    ),
    Column("response_id", Text, comment="The provider's id of its response; the next request may refer to it."),
    # Usage reports by time. Rows are written in this order, which suits BRIN.
    Index(None, "started_at", postgresql_using="brin"),
    comment="One row per provider call and attempt. Updated at its end, and when retention removes its bytes.",
)

call_chunks = Table(
    "call_chunks",
    metadata,
    Column("conversation_id", UUID, primary_key=True),
    Column("turn_seq", BigInteger, primary_key=True),
    Column("attempt", SmallInteger, primary_key=True),
    Column(
        "byte_offset", BigInteger, primary_key=True, comment="Offset of the first byte; identifies a repeated write."
    ),
    Column("data", LargeBinary, nullable=False),
    comment="Raw bytes of running calls, read by resume and recovery. Deleted when the call ends.",
)

waiting_tickets = Sequence("waiting_tickets", metadata=metadata)
"""Tickets of `waiting_turns`, shared by all conversations: only their order matters."""

waiting_turns = Table(
    "waiting_turns",
    metadata,
    Column("conversation_id", UUID, primary_key=True),
    Column(
        "ticket",
        BigInteger,
        primary_key=True,
        # Not SERIAL: the statement that issues a ticket decides about its sign.
        autoincrement=False,
        comment="The lowest ticket is next; negative for turns that go before all others.",
    ),
    Column("expires_at", INSTANT, nullable=False, comment="Extended by its holder; afterwards the ticket is void."),
    comment="Turns that wait for a busy conversation. Void tickets are deleted when the next one is issued.",
    postgresql_with={"fillfactor": 70},
)

epochs = Table(
    "epochs",
    metadata,
    Column("conversation_id", UUID, primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("reason", Text, nullable=False, comment="Why the static layer changed."),
    Column("assistant_version", Integer, nullable=False),
    Column("generation", Integer, nullable=False, comment="The generation of the segments that follow the base text."),
    Column("segment_count", Integer, nullable=False, comment="The number of these segments."),
    Column("base_text", Text, nullable=False, comment="The rendered static prompt without history. Never changes."),
    Column("static_hash", LargeBinary, nullable=False, comment="SHA-256 of the complete static text."),
    Column("template_hash", LargeBinary, nullable=False, comment="SHA-256 of the template that was rendered."),
    Column(
        "buffer_start_seq", BigInteger, nullable=False, comment="The first turn of the buffer when the epoch began."
    ),
    now("created_at", "Informational."),
    Column(
        "prefix_hash",
        LargeBinary,
        comment="SHA-256 of the static text and tools, which signatures of thinking are bound to.",
    ),
    Column("arguments_hash", LargeBinary, comment="SHA-256 of the args that the text was rendered with."),
    Column("signed_summary", LargeBinary, comment="The message with the signed summary, sent before the buffer."),
    Column("signed_summary_start_seq", BigInteger, comment="The first turn that the signed summary replaces."),
    Column(
        "signed_summary_text",
        Text,
        comment="The content of the signed summary as the text of a segment. Never changes.",
    ),
    Column("signed_summary_tokens", Integer, comment="Estimated tokens of that text."),
    Column(
        "signed_summary_kept_hash",
        LargeBinary,
        comment="The prefix hashes whose thinking stays valid after the signed summary.",
    ),
    Column("args", JSON, comment="The args; null if they were not stored."),
    Column(
        "rejected",
        JSONB,
        comment="By provider: the last turn whose signatures, and whose calls, it rejected; they are omitted.",
    ),
    comment="The periods in which the static layer does not change. Insert-only.",
)

templates = Table(
    "templates",
    metadata,
    Column("hash", LargeBinary, primary_key=True, comment="SHA-256 of the source, referenced by epochs."),
    Column("source", Text, nullable=False),
    now("created_at", "Informational."),
    comment="The sources of rendered templates, shared by all tenants. Insert-only.",
)

segments = Table(
    "segments",
    metadata,
    Column("conversation_id", UUID, primary_key=True),
    Column("generation", Integer, primary_key=True, comment="Incremented when old segments are summarised."),
    Column("position", Integer, primary_key=True, comment="0, 1, 2: segments are only appended."),
    Column("first_seq", BigInteger, nullable=False),
    Column("last_seq", BigInteger, nullable=False),
    Column("text", Text, nullable=False, comment="The transcript without reasoning. Never changes."),
    Column("token_count", Integer, nullable=False),
    Column("summarises_generation", Integer, comment="Summaries: the generation whose segments it replaces."),
    Column("summarises_count", Integer, comment="Summaries: the number of replaced segments."),
    now("created_at", "Informational."),
    comment="Compacted history. Insert-only; the turns themselves are kept.",
)

blobs = Table(
    "blobs",
    metadata,
    Column("tenant_id", UUID, ForeignKey("tenants.id"), primary_key=True, comment="Never shared between tenants."),
    Column("sha256", LargeBinary, primary_key=True, comment="SHA-256 of `data`; the same image is stored once."),
    Column("media_type", Text, nullable=False, comment="Detected from the bytes."),
    Column("data", LargeBinary, nullable=False),
    now("created_at", "Informational."),
    comment="Images by content hash. Deleted with the last reference.",
)

blob_references = Table(
    "blob_references",
    metadata,
    Column("conversation_id", UUID, primary_key=True),
    Column("seq", BigInteger, primary_key=True),
    Column("sha256", LargeBinary, primary_key=True),
    Column("tenant_id", UUID, nullable=False),
    # Finds the other references to a blob.
    Index(None, "tenant_id", "sha256"),
    comment="Which turns contain which blobs; the number of rows is the reference count.",
)

provider_caches = Table(
    "provider_caches",
    metadata,
    Column("id", UUID, primary_key=True),
    Column("tenant_id", UUID, ForeignKey("tenants.id"), nullable=False),
    Column("provider", Text, nullable=False),
    Column("account", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("prefix_hash", LargeBinary, nullable=False, comment="SHA-256 of the cached static text and tools."),
    Column("name", Text, nullable=False, comment="The provider's name for the cache, sent in place of its content."),
    Column("token_count", BigInteger, nullable=False),
    now("created_at", "When the cache was created; determines the storage cost."),
    Column("expires_at", INSTANT, nullable=False),
    Column("removing_at", INSTANT, comment="When removal at the provider began; the cache is no longer used."),
    # Finds the cache for a payload; there is one per prefix.
    Index(
        None,
        "tenant_id",
        "provider",
        "account",
        "model",
        "prefix_hash",
        unique=True,
        postgresql_where=text("removing_at IS NULL"),
    ),
    comment="Explicit caches at a provider, shared by conversations with the same static text.",
)

provider_cache_uses = Table(
    "provider_cache_uses",
    metadata,
    Column("conversation_id", UUID, primary_key=True),
    Column("cache_id", UUID, primary_key=True, index=True),
    comment="Which conversations use a cache; it is deleted with its last use, found by the index.",
)
