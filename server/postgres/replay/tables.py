"""The tables of replays. `server.postgres.tables` has the rules for all tables."""

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

from server.postgres.tables import INSTANT, MONEY, metadata, now

replays = Table(
    "replays",
    metadata,
    Column("id", UUID, primary_key=True),
    Column("tenant_id", UUID, ForeignKey("tenants.id"), nullable=False),
    Column("name", Text, nullable=False),
    Column("state", Text, nullable=False, comment="running, paused, done, cancelled, stopped_by_budget."),
    Column("draft", JSON, nullable=False, comment="The request, without the ids of its conversations and its limits."),
    Column("item_count", Integer, nullable=False, comment="Items at creation; fewer remain if sources are erased."),
    Column("repetitions", SmallInteger, nullable=False),
    Column("parallelism", SmallInteger, nullable=False, comment="Maximum number of items that run at the same time."),
    Column("calls_per_minute", Integer, comment="Null: no limit."),
    Column("budget_usd", MONEY, comment="Null: no limit."),
    Column("budget_tokens", BigInteger, comment="Null: no limit."),
    Column(
        "spent_usd", MONEY, nullable=False, server_default="0", comment="Lost calls are counted by their estimates."
    ),
    Column("spent_tokens", BigInteger, nullable=False, server_default="0"),
    Column(
        "reserved_usd", MONEY, nullable=False, server_default="0", comment="Estimated cost of the calls that run now."
    ),
    Column("reserved_tokens", BigInteger, nullable=False, server_default="0"),
    Column("unpriced_count", Integer, nullable=False, server_default="0", comment="Calls without a known price."),
    Column("next_call_at", INSTANT, comment="No call is sent before this time; null: no limit."),
    now("created_at", "Informational."),
    Column("created_by", UUID, comment="The API key; null: the command line."),
    Column("ended_at", INSTANT),
    # Lists the replays of a tenant, newest first.
    Index(None, "tenant_id", text("id DESC")),
    # Finds replays with items to run.
    Index("ix_replays_running", "id", postgresql_where=text("state = 'running'")),
    comment="Batch runs over stored conversations. Each process that runs items locks the row briefly.",
    postgresql_with={"fillfactor": 50},
)

replay_items = Table(
    "replay_items",
    metadata,
    Column(
        "conversation_id",
        UUID,
        primary_key=True,
        comment="The source conversation; its items are deleted when it is erased.",
    ),
    Column("replay_id", UUID, ForeignKey("replays.id"), primary_key=True),
    Column("repetition", SmallInteger, primary_key=True),
    Column("number", Integer, nullable=False, comment="1, 2, 3 within the replay, in the order of execution."),
    Column("state", Text, nullable=False, comment="waiting, running, done, failed, cancelled, skipped."),
    Column("replay_conversation_id", UUID, comment="The conversation in schema `replay` that the item writes."),
    Column("error_code", Text, comment="Why it failed."),
    Column("diverged_at_seq", BigInteger, comment="The first recorded answer that differs from the candidate's."),
    Column("spent_usd", MONEY, nullable=False, server_default="0"),
    Column("spent_tokens", BigInteger, nullable=False, server_default="0"),
    Column(
        "lost_count", Integer, nullable=False, server_default="0", comment="Calls whose process died before they ended."
    ),
    Column(
        "lease_token", UUID, comment="Every write must name it. Kept when the item ends, to identify repeated writes."
    ),
    Column("lease_owner", Text, comment="The process that runs the item; read by operators."),
    Column("lease_expires_at", INSTANT, comment="Afterwards any process may claim the item."),
    Column("call_id", UUID, comment="The call that runs now; null: none."),
    Column("call_usd", MONEY, comment="Its estimated cost; null if the price is not known."),
    Column("call_tokens", BigInteger, comment="Its estimated tokens."),
    Column("started_at", INSTANT, comment="When the item was first claimed."),
    Column("ended_at", INSTANT),
    # Lists the items of a replay in order.
    Index(None, "replay_id", "number", unique=True),
    # Finds items to claim, and counts items by state.
    Index(None, "replay_id", "state", "number"),
    # Finds items with an expired lease.
    Index("ix_replay_items_running", "lease_expires_at", postgresql_where=text("state = 'running'")),
    comment="One row per source conversation and repetition.",
    postgresql_with={"fillfactor": 70},
)

replay_results = Table(
    "replay_results",
    metadata,
    Column(
        "conversation_id",
        UUID,
        primary_key=True,
        comment="The source conversation; its results are deleted when it is erased.",
    ),
    Column("replay_id", UUID, ForeignKey("replays.id"), primary_key=True),
    Column("repetition", SmallInteger, primary_key=True),
    Column("position", Integer, primary_key=True, autoincrement=False, comment="1, 2, 3 within the item."),
    Column("number", Integer, nullable=False, comment="The number of the item."),
    Column("source_seq", BigInteger, comment="The recorded answer that it is compared with; null if there is none."),
    Column("replay_seq", BigInteger, comment="The turn of the replay conversation whose calls produced it."),
    Column("attempt", SmallInteger, comment="The attempt that gave the answer."),
    Column("outcome", Text, nullable=False, comment="same, different, not_compared, failed."),
    Column("kinds", ARRAY(Text), nullable=False, comment="The kinds of differences between the answers."),
    Column("similarity", Double, comment="Similarity of the texts, 0 to 1."),
    Column("severity", Double, nullable=False, comment="0 (the same) to 1."),
    Column("note", Text, comment="A remark on the result, as one word."),
    Column("recorded", JSONB, comment="Stop reason, usage, cost and times of the recorded answer."),
    Column("candidate", JSONB, comment="The same for the candidate's answer."),
    Column("assertions", JSONB, nullable=False, comment="The outcome of each assertion."),
    Column("has_failed_assertion", Boolean, nullable=False),
    Column("judge", JSONB, comment="The verdict of the judge; null without a judge."),
    Column("blocks", JSONB, nullable=False, comment="The blocks of the candidate's answer. Not read by lists."),
    now("created_at", "Informational."),
    # Lists the results of a replay by item, and by severity.
    Index(None, "replay_id", "number", "position", unique=True),
    Index("ix_replay_results_worst", "replay_id", text("severity DESC"), "number", "position"),
    comment="One row per answer of the candidate. Insert-only.",
)

provider_holds = Table(
    "provider_holds",
    metadata,
    Column("provider", Text, primary_key=True),
    Column("held_until", INSTANT, nullable=False),
    comment="Providers that asked to wait: no call of a replay is sent to them before `held_until`.",
)
