"""The tables of conversations: what a turn reads and writes.

What holds for these, and for those in the modules beside this one (`access_tables`, `replay_tables`,
`inspection_tables`; `schema` has them all):
- A row of `turns`, `epochs`, `segments` and `blobs` is written once and never changed.
- Every table of a conversation has a primary key that starts with `conversation_id`, and every statement of the request
  path filters by it, so that the tables can be hash-partitioned or distributed as they are.
- Text that comes from people or models passes through `codec`: NUL bytes and lone surrogates are escaped reversibly,
  since Postgres takes neither. `bytea` columns hold the exact bytes.
- Large columns (`native`, `raw_response`, `manifest`, `dynamic`, texts) are TOASTed out of line when they are large and
  are never named by the statements behind lists.
- There are no indexes but those that the request path and the lists ask for; each says for what.
- The tables of the request path carry no foreign keys: their rows are inserted by statements that hold the
  conversation's row, and `erase` removes them under its lock. A test walks the catalogue to prove it leaves nothing.

Times are the database's own (`now()`), and nothing is ordered by them but lists for people.
"""

from sqlalchemy import (
    ARRAY,
    JSON,
    UUID,
    BigInteger,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    Sequence,
    SmallInteger,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from server.postgres.columns import INSTANT, MONEY, metadata, now

assistants = Table(
    "assistants",
    metadata,
    Column("id", UUID, primary_key=True),
    Column("version", Integer, primary_key=True, comment="1, 2, 3: each change adds a row, none is edited."),
    Column("tenant_id", UUID, ForeignKey("tenants.id"), nullable=False),
    Column("name", Text, nullable=False),
    Column("language", Text, nullable=False),
    Column("description", Text, nullable=False),
    Column("provider", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("instructions", JSON, nullable=False, comment="roles, procedure, constraints: template sources."),
    Column("variables", JSON, nullable=False, comment="Defaults of the templates' arguments."),
    Column("tools", JSON, nullable=False, comment="json, not jsonb: the order of keys is part of the prompt."),
    Column("settings", JSON, nullable=False, comment="Output limit, thinking, layer order and so on."),
    now("created_at", "For people."),
    # The list of a tenant's assistants, newest first, each with its newest version.
    Index(None, "tenant_id", text("id DESC"), text("version DESC")),
    comment="One row per version. A conversation pins a version; moving to a new one starts an epoch.",
)

conversations = Table(
    "conversations",
    metadata,
    Column("id", UUID, primary_key=True),
    Column("tenant_id", UUID, ForeignKey("tenants.id"), nullable=False),
    Column("assistant_id", UUID, nullable=False),
    Column("assistant_version", Integer, nullable=False),
    Column("revision", BigInteger, nullable=False, server_default="0", comment="Counts every change; compare-and-set."),
    Column("next_seq", BigInteger, nullable=False, server_default="1", comment="The number of the next input turn."),
    Column("buffer_start_seq", BigInteger, nullable=False, server_default="1", comment="First turn not compacted."),
    Column("epoch", Integer, nullable=False, server_default="0", comment="Current epoch; 0 before the first payload."),
    Column(
        "pending_call_ids",
        ARRAY(Text),
        nullable=False,
        server_default="{}",
        comment="Tool calls without results, in call order: lets a turn be checked without reading any turn.",
    ),
    Column("identifier", Text, comment="The application's own name for it."),
    Column("source", Text, comment="Prompt argument conversation.source."),
    Column("direction", Text, comment="Prompt argument conversation.direction."),
    Column("mode", Text, comment="Prompt argument session.mode."),
    Column("args", JSON, nullable=False, comment="Prompt arguments of the whole conversation."),
    Column("context", JSON, nullable=False, comment="Content of the dynamic layer, as it is now."),
    Column("metadata", JSONB, nullable=False, server_default="{}", comment="The application's own; never interpreted."),
    Column("forked_from_id", UUID, comment="The conversation that this one began as a copy of; it may be erased."),
    Column("forked_from_seq", BigInteger, comment="The last turn that both share."),
    Column("lease_token", UUID, comment="Set while a turn runs. Whoever writes must know it; it is never reused."),
    Column("lease_owner", Text, comment="The process that runs the turn, for operators and for shutdown."),
    Column("lease_expires_at", INSTANT, comment="Moved on by the heartbeat; after it, anybody may end the turn."),
    Column("lease_turn_seq", BigInteger, comment="The number that the running model turn will have."),
    Column("cancel_requested_at", INSTANT, comment="Somebody wants the running turn to stop; null when none runs."),
    now("created_at", "For people."),
    now("updated_at", "For people."),
    Column(
        "exchange_count",
        BigInteger,
        comment="User tasks so far. Null until they are counted, which an accepted turn does.",
    ),
    CheckConstraint("next_seq >= 1 AND buffer_start_seq >= 1 AND buffer_start_seq <= next_seq", name="seq_order"),
    CheckConstraint(
        "num_nonnulls(lease_token, lease_owner, lease_expires_at, lease_turn_seq) IN (0, 4)", name="lease_whole"
    ),
    # The list of a tenant's conversations, newest first.
    Index(None, "tenant_id", text("id DESC")),
    # The list filtered by the application's own name.
    Index(None, "tenant_id", "identifier", text("id DESC"), postgresql_where=text("identifier IS NOT NULL")),
    # The list filtered by assistant.
    Index(None, "tenant_id", "assistant_id", text("id DESC")),
    # The reaper's look at all running turns. By id and not by expiry, so that a heartbeat touches no index.
    Index("ix_conversations_running", "id", postgresql_where=text("lease_token IS NOT NULL")),
    comment="The one row that a turn locks, briefly. Fill factor leaves room for updates in place.",
    postgresql_with={"fillfactor": 70},
)

turns = Table(
    "turns",
    metadata,
    Column("conversation_id", UUID, primary_key=True),
    Column("seq", BigInteger, primary_key=True, comment="1, 2, 3 without gaps, assigned under the conversation's row."),
    Column("kind", Text, nullable=False, comment="user_task, model_response, tool_response."),
    Column("state", Text, nullable=False, comment="complete, interrupted, cancelled, failed."),
    Column("blocks", JSONB, nullable=False, comment="For reading and search. Escaped; without signatures."),
    Column(
        "native", LargeBinary, nullable=False, comment="The truth: as it goes to the provider, signatures in place."
    ),
    Column("dialect", Text, nullable=False, comment="Whose JSON `native` is: strata for input, else the provider."),
    Column("provider", Text, comment="Model turns: who answered; signatures are valid there alone."),
    Column("model", Text, comment="Model turns: which model."),
    Column("account", Text, comment="Model turns: fingerprint of the credentials."),
    Column("attempt", SmallInteger, comment="Model turns: the call that gave the answer."),
    Column("stop_reason", Text),
    Column("error_code", Text, comment="Why a model turn is not complete."),
    Column("fresh_input_tokens", BigInteger, comment="Usage in disjoint buckets, summed over the turn's calls."),
    Column("cache_read_tokens", BigInteger),
    Column("cache_write_tokens", BigInteger),
    Column("output_tokens", BigInteger),
    Column("reasoning_tokens", BigInteger),
    Column("cost_usd", MONEY, comment="Null where the price is not known."),
    Column("language", Text, comment="User turns: message.language."),
    Column("args", JSON, comment="Input turns: prompt arguments for this turn alone."),
    Column("idempotency_key", Text, comment="Input turns: the client's key; the same key gives the same turn."),
    Column("body_hash", LargeBinary, comment="Input turns: SHA-256 of the request, to tell a retry from a reused key."),
    Column("written_under", UUID, nullable=False, comment="The lease it was written under: a repeated write is seen."),
    now("created_at", "For people; the order is seq."),
    Column("revision", BigInteger, comment="Model turns: the conversation's when the turn ended; null in a fork's."),
    Column("model_version", Text, comment="Model turns: the model that the answer names; an alias does not say it."),
    Column("ending", JSONB, comment="Model turns: what the provider said about the end; null: nothing more."),
    CheckConstraint("kind IN ('user_task', 'model_response', 'tool_response')", name="kind"),
    CheckConstraint("state IN ('complete', 'interrupted', 'cancelled', 'failed')", name="state"),
    # Recognises a duplicate request.
    Index(
        None,
        "conversation_id",
        "idempotency_key",
        unique=True,
        postgresql_where=text("idempotency_key IS NOT NULL"),
    ),
    # What the indexer of inspection has to look at. Rows come in that order: a summary per range of pages is enough.
    Index(None, "created_at", postgresql_using="brin"),
    comment="What was said. Insert-only: no statement of Strata updates a turn.",
)

calls = Table(
    "calls",
    metadata,
    Column("conversation_id", UUID, primary_key=True),
    Column("turn_seq", BigInteger, primary_key=True, comment="The model turn that the call is for."),
    Column("attempt", SmallInteger, primary_key=True, comment="1, and one more per retry."),
    Column("provider", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("account", Text, nullable=False, comment="Fingerprint of the credentials, never the key."),
    Column("epoch", Integer, nullable=False, comment="Whose static text was sent."),
    Column("manifest", JSONB, nullable=False, comment="Blocks as sent: layer, role, hash, length, cache marker."),
    Column("dynamic", LargeBinary, nullable=False, comment="The dynamic layer as sent; it cannot be rendered again."),
    Column(
        "request_hash", LargeBinary, nullable=False, comment="SHA-256 of the request body: what a rebuild must give."
    ),
    Column("cache_expected_tokens", BigInteger, comment="What should have come from the provider's cache."),
    Column("cache_miss_reason", Text, comment="Why less came, as far as it can be known."),
    Column("repairs", JSONB, nullable=False, comment="What was mended in a broken history for this payload."),
    Column("template_failures", JSONB, nullable=False, comment="Templates that fell back to their source."),
    Column("warnings", JSONB, nullable=False, comment="What was assumed or done without."),
    Column("started_at", INSTANT, nullable=False, comment="When the request left; the caller's clock, for durations."),
    Column("first_byte_at", INSTANT),
    Column("ended_at", INSTANT, comment="Null while it runs."),
    Column("status", SmallInteger, comment="HTTP status; null where no answer came."),
    Column("headers", JSONB, comment="Response headers, request ids among them."),
    Column("error_code", Text),
    Column("fresh_input_tokens", BigInteger),
    Column("cache_read_tokens", BigInteger),
    Column("cache_write_tokens", BigInteger),
    Column("output_tokens", BigInteger),
    Column("reasoning_tokens", BigInteger),
    Column("usage_reported", JSONB, comment="The provider's own usage object: the buckets can be derived again."),
    Column("cost_usd", MONEY, comment="Null where the price is not known."),
    Column("raw_response", LargeBinary, comment="Every byte of the body, zstd. Null while it runs, or past retention."),
    Column("raw_length", BigInteger, comment="Bytes before compression."),
    Column("layer_order", Text, comment="layered or append_only: whether `dynamic` stood inside the input, for ever."),
    Column("caching", JSONB, comment="What was asked of the provider's cache: markers, lifetimes, a cache's name."),
    Column("response_id", Text, comment="The provider's name for its answer; the next request may refer to it."),
    # Reports of usage by time. Rows come in that order, so a summary per range of pages is enough.
    Index(None, "started_at", postgresql_using="brin"),
    comment="One row per provider call and attempt. Changed when it ends, and when retention takes its bytes.",
)

call_chunks = Table(
    "call_chunks",
    metadata,
    Column("conversation_id", UUID, primary_key=True),
    Column("turn_seq", BigInteger, primary_key=True),
    Column("attempt", SmallInteger, primary_key=True),
    Column("byte_offset", BigInteger, primary_key=True, comment="Where the piece begins; a repeated write is seen."),
    Column("data", LargeBinary, nullable=False),
    comment="Raw bytes of running calls: what resume and crash recovery read. Gone when the call's row has them.",
)

waiting_tickets = Sequence("waiting_tickets", metadata=metadata)
"""Numbers for `waiting_turns`, the same for all conversations: only their order counts."""

waiting_turns = Table(
    "waiting_turns",
    metadata,
    Column("conversation_id", UUID, primary_key=True),
    Column(
        "ticket",
        BigInteger,
        primary_key=True,
        # Not SERIAL: whoever draws it says on which side of the queue.
        autoincrement=False,
        comment="The lowest is the next; below zero for those that go before all others.",
    ),
    Column("expires_at", INSTANT, nullable=False, comment="Moved on by its holder; after it, the ticket is void."),
    comment="Who waits for a conversation to be free. Void tickets go when the next one is drawn.",
    postgresql_with={"fillfactor": 70},
)

epochs = Table(
    "epochs",
    metadata,
    Column("conversation_id", UUID, primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("reason", Text, nullable=False, comment="Why the static layer changed."),
    Column("assistant_version", Integer, nullable=False),
    Column("generation", Integer, nullable=False, comment="Whose segments follow the base text."),
    Column("segment_count", Integer, nullable=False, comment="How many of them."),
    Column("base_text", Text, nullable=False, comment="The rendered static prompt without history. Frozen."),
    Column("static_hash", LargeBinary, nullable=False, comment="SHA-256 of the whole static text."),
    Column("template_hash", LargeBinary, nullable=False, comment="SHA-256 of the template that was rendered."),
    Column("buffer_start_seq", BigInteger, nullable=False, comment="Where the buffer began in this epoch."),
    now("created_at", "For people."),
    Column("prefix_hash", LargeBinary, comment="SHA-256 of static text and tools: what thinking is bound to."),
    Column("arguments_hash", LargeBinary, comment="SHA-256 of the args that the text was rendered with."),
    Column("signed_summary", LargeBinary, comment="The message with a signed summary that stands before the buffer."),
    Column("signed_summary_start_seq", BigInteger, comment="The first turn that the signed summary stands for."),
    Column("signed_summary_text", Text, comment="What the signed summary tells, as a segment would. Frozen."),
    Column("signed_summary_tokens", Integer, comment="Of that text, about."),
    Column(
        "signed_summary_kept_hash",
        LargeBinary,
        comment="The prefix whose thinking is valid behind the signed summary too.",
    ),
    Column("args", JSON, comment="The args themselves; null where they were not kept."),
    Column(
        "rejected",
        JSONB,
        comment="By provider: up to which turn signatures, and calls, are left out because it rejected them.",
    ),
    comment="The times in which the static layer does not change. Insert-only.",
)

templates = Table(
    "templates",
    metadata,
    Column("hash", LargeBinary, primary_key=True, comment="SHA-256 of the source; epochs name it."),
    Column("source", Text, nullable=False),
    now("created_at", "For people."),
    comment="The templates that static texts were rendered from, once each, whoever uses them. Insert-only.",
)

segments = Table(
    "segments",
    metadata,
    Column("conversation_id", UUID, primary_key=True),
    Column("generation", Integer, primary_key=True, comment="A new one begins when old segments are summarised."),
    Column("position", Integer, primary_key=True, comment="0, 1, 2: only ever added at the end."),
    Column("first_seq", BigInteger, nullable=False),
    Column("last_seq", BigInteger, nullable=False),
    Column("text", Text, nullable=False, comment="The transcript, without reasoning. Frozen."),
    Column("token_count", Integer, nullable=False),
    Column("summarises_generation", Integer, comment="For a summary: whose segments it replaces."),
    Column("summarises_count", Integer, comment="For a summary: how many of them."),
    now("created_at", "For people."),
    comment="Compacted history. Insert-only; the turns themselves stay.",
)

blobs = Table(
    "blobs",
    metadata,
    Column("tenant_id", UUID, ForeignKey("tenants.id"), primary_key=True, comment="Never shared between tenants."),
    Column("sha256", LargeBinary, primary_key=True, comment="Of the bytes: the same image is stored once."),
    Column("media_type", Text, nullable=False, comment="Found in the bytes, not believed."),
    Column("data", LargeBinary, nullable=False),
    now("created_at", "For people."),
    comment="Images by content hash, out of line. Goes with its last reference.",
)

blob_references = Table(
    "blob_references",
    metadata,
    Column("conversation_id", UUID, primary_key=True),
    Column("seq", BigInteger, primary_key=True),
    Column("sha256", LargeBinary, primary_key=True),
    Column("tenant_id", UUID, nullable=False),
    # Whether anybody still needs a blob.
    Index(None, "tenant_id", "sha256"),
    comment="Which turns show which blobs: counting these rows is the reference count.",
)

provider_caches = Table(
    "provider_caches",
    metadata,
    Column("id", UUID, primary_key=True),
    Column("tenant_id", UUID, ForeignKey("tenants.id"), nullable=False),
    Column("provider", Text, nullable=False),
    Column("account", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column(
        "prefix_hash", LargeBinary, nullable=False, comment="SHA-256 of what the cache holds: static text and tools."
    ),
    Column("name", Text, nullable=False, comment="The provider's name for it, which a request sends instead."),
    Column("token_count", BigInteger, nullable=False),
    now("created_at", "For people and for the price of storage."),
    Column("expires_at", INSTANT, nullable=False),
    Column("removing_at", INSTANT, comment="Since when it is to be removed at the provider; nobody uses it any more."),
    # Finds the cache for a payload; one per prefix.
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
    comment="Which conversations use a cache: it is deleted with its last user. Indexed for that question.",
)
