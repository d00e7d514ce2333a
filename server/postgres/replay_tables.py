"""The tables of batch runs. See `tables` for what holds for all of them."""

from sqlalchemy import JSON, UUID, BigInteger, Column, ForeignKey, Index, LargeBinary, SmallInteger, Table, Text, text

from server.postgres.table_parts import INSTANT, MONEY, metadata, now

replays = Table(
    "replays",
    metadata,
    Column("id", UUID, primary_key=True),
    Column("tenant_id", UUID, ForeignKey("tenants.id"), nullable=False),
    Column("name", Text, nullable=False),
    Column("state", Text, nullable=False, comment="queued, running, paused, finished, cancelled, failed."),
    Column("plan", JSON, nullable=False, comment="Selection, candidate, mode, repetitions, limits: as asked for."),
    Column("totals", JSON, nullable=False, comment="Counts, tokens and cost so far."),
    now("created_at", "For people."),
    Column("finished_at", INSTANT),
    # The list of a tenant's replays, newest first.
    Index(None, "tenant_id", text("id DESC")),
    comment="Batch runs over stored conversations. Outside the live tables.",
)

replay_items = Table(
    "replay_items",
    metadata,
    Column("conversation_id", UUID, primary_key=True, comment="The source: its items go when it is erased."),
    Column(
        "replay_id", UUID, ForeignKey("replays.id"), primary_key=True, index=True, comment="Indexed for the report."
    ),
    Column("turn_seq", BigInteger, primary_key=True, comment="The recorded model turn that was asked again."),
    Column("repetition", SmallInteger, primary_key=True),
    Column("state", Text, nullable=False, comment="queued, running, done, failed: done once, billed once."),
    Column("result", JSON, comment="Blocks, stop reason, usage, cost, latency, divergence."),
    Column("raw_response", LargeBinary, comment="Every byte of the answer, zstd. Null past retention."),
    Column("cost_usd", MONEY),
    Column("finished_at", INSTANT),
    comment="Results of batch runs, one row per turn and repetition.",
)
