"""The tables of batch runs. See `tables` for what holds for all of them."""

from sqlalchemy import (
    ARRAY,
    JSON,
    UUID,
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    SmallInteger,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from server.postgres.columns import INSTANT, MONEY, metadata, now

replays = Table(
    "replays",
    metadata,
    Column("id", UUID, primary_key=True),
    Column("tenant_id", UUID, ForeignKey("tenants.id"), nullable=False),
    Column("name", Text, nullable=False),
    Column("state", Text, nullable=False, comment="running, paused, done, cancelled, stopped_by_budget."),
    Column("draft", JSON, nullable=False, comment="As asked for, without the ids of its conversations and its limits."),
    Column("item_count", Integer, nullable=False, comment="When it was made; fewer are left where sources are erased."),
    Column("repetitions", SmallInteger, nullable=False),
    Column("parallelism", SmallInteger, nullable=False, comment="So many items run at the same time."),
    Column("calls_per_minute", Integer, comment="Null: no limit."),
    Column("budget_usd", MONEY, comment="Null: no limit."),
    Column("budget_tokens", BigInteger, comment="Null: no limit."),
    Column("spent_usd", MONEY, nullable=False, server_default="0", comment="Lost calls count by their estimates."),
    Column("spent_tokens", BigInteger, nullable=False, server_default="0"),
    Column("reserved_usd", MONEY, nullable=False, server_default="0", comment="The sum of what its items have open."),
    Column("reserved_tokens", BigInteger, nullable=False, server_default="0"),
    Column("unpriced_count", Integer, nullable=False, server_default="0", comment="Calls without a known price."),
    Column("next_call_at", INSTANT, comment="No call leaves before; null: any time."),
    now("created_at", "For people."),
    Column("created_by", UUID, comment="The key; null: the command line."),
    Column("ended_at", INSTANT),
    # The list of a tenant's replays, newest first.
    Index(None, "tenant_id", text("id DESC")),
    # Those that have work to do.
    Index("ix_replays_running", "id", postgresql_where=text("state = 'running'")),
    comment="Batch runs over stored conversations: the one row that whoever runs them locks, briefly.",
    postgresql_with={"fillfactor": 50},
)

replay_items = Table(
    "replay_items",
    metadata,
    Column("conversation_id", UUID, primary_key=True, comment="The source: its items go when it is erased."),
    Column("replay_id", UUID, ForeignKey("replays.id"), primary_key=True),
    Column("repetition", SmallInteger, primary_key=True),
    Column("number", Integer, nullable=False, comment="1, 2, 3 within the replay: the order of the work."),
    Column("state", Text, nullable=False, comment="waiting, running, done, failed, cancelled, skipped."),
    Column("replay_conversation_id", UUID, comment="The conversation in schema replay that it writes."),
    Column("error_code", Text, comment="Why it failed."),
    Column("diverged_at_seq", BigInteger, comment="The first recorded answer that the candidate's differs from."),
    Column("spent_usd", MONEY, nullable=False, server_default="0"),
    Column("spent_tokens", BigInteger, nullable=False, server_default="0"),
    Column("lost_count", Integer, nullable=False, server_default="0", comment="Calls that their process died over."),
    Column("lease_token", UUID, comment="Whoever writes must know it. Stays when the item ends: a repetition is seen."),
    Column("lease_owner", Text, comment="The process that runs it, for operators."),
    Column("lease_expires_at", INSTANT, comment="After it, anybody may claim the item."),
    Column("call_id", UUID, comment="The call that is on its way; null: none."),
    Column("call_usd", MONEY, comment="Its estimate; null where its price is not known."),
    Column("call_tokens", BigInteger, comment="The same in tokens."),
    Column("started_at", INSTANT, comment="When it was first claimed."),
    Column("ended_at", INSTANT),
    # The items of a replay in their order.
    Index(None, "replay_id", "number", unique=True),
    # What can be claimed, how many run, and how many are in each state.
    Index(None, "replay_id", "state", "number"),
    # Whose owners may have died.
    Index("ix_replay_items_running", "lease_expires_at", postgresql_where=text("state = 'running'")),
    comment="One row per source conversation and repetition.",
    postgresql_with={"fillfactor": 70},
)

replay_results = Table(
    "replay_results",
    metadata,
    Column("conversation_id", UUID, primary_key=True, comment="The source: its results go when it is erased."),
    Column("replay_id", UUID, ForeignKey("replays.id"), primary_key=True),
    Column("repetition", SmallInteger, primary_key=True),
    Column("place", Integer, primary_key=True, autoincrement=False, comment="1, 2, 3 within the item."),
    Column("number", Integer, nullable=False, comment="The item's."),
    Column("source_seq", BigInteger, comment="The recorded answer beside it; null where there is none."),
    Column("replay_seq", BigInteger, comment="The turn of the replay conversation whose calls were made for it."),
    Column("attempt", SmallInteger, comment="The call that gave it."),
    Column("outcome", Text, nullable=False, comment="same, different, not_compared, failed."),
    Column("kinds", ARRAY(Text), nullable=False, comment="In what the answers differ."),
    Column("similarity", Double, comment="Of the texts, 0 to 1."),
    Column("severity", Double, nullable=False, comment="0, the same, to 1."),
    Column("note", Text, comment="What is special, in a word."),
    Column("recorded", JSONB, comment="Stop reason, usage, cost and times of the recorded answer."),
    Column("candidate", JSONB, comment="The same of the candidate's."),
    Column("assertions", JSONB, nullable=False, comment="How each went."),
    Column("has_failed_assertion", Boolean, nullable=False),
    Column("judge", JSONB, comment="What the judge said; null without one."),
    Column("blocks", JSONB, nullable=False, comment="What the candidate said. Never read by lists."),
    now("created_at", "For people."),
    # The results of a replay item by item, and the worst first.
    Index(None, "replay_id", "number", "place", unique=True),
    Index("ix_replay_results_worst", "replay_id", text("severity DESC"), "number", "place"),
    comment="What became of each answer of a candidate's. Insert-only.",
)

provider_holds = Table(
    "provider_holds",
    metadata,
    Column("provider", Text, primary_key=True),
    Column("held_until", INSTANT, nullable=False),
    comment="Providers that have asked for patience: until then no call of a replay leaves for them.",
)
