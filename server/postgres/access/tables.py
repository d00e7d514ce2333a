"""The tables of who may come in, who is inside, and what they did there.

See `tables` for what holds for all of them.
"""

from sqlalchemy import ARRAY, UUID, Column, ForeignKey, Index, Integer, LargeBinary, Table, Text, UniqueConstraint, text
from sqlalchemy.dialects.postgresql import JSONB

from server.postgres.columns import INSTANT, metadata, now

tenants = Table(
    "tenants",
    metadata,
    Column("id", UUID, primary_key=True),
    Column("name", Text, nullable=False, unique=True, comment="What operators call it; one tenant per name."),
    now("created_at", "For people."),
    comment="Whose data it is. Every query is bound to one.",
)

api_keys = Table(
    "api_keys",
    metadata,
    Column(
        "id", UUID, primary_key=True, comment="Part of the key's text: finds the row before the secret is compared."
    ),
    Column("tenant_id", UUID, ForeignKey("tenants.id"), nullable=False, index=True, comment="Indexed for listing."),
    Column("name", Text, nullable=False, comment="What the operator called it."),
    Column("secret_hash", LargeBinary, nullable=False, comment="SHA-256 of the secret; the secret itself is nowhere."),
    Column("scopes", ARRAY(Text), nullable=False, comment="client, admin."),
    now("created_at", "For people."),
    Column("expires_at", INSTANT, comment="Null: never."),
    Column("revoked_at", INSTANT, comment="Set once; the row stays for the record."),
    Column("last_used_at", INSTANT, comment="Written at most once a minute, so that reading stays reading."),
    comment="Who may come in. Hashes only.",
)

rate_windows = Table(
    "rate_windows",
    metadata,
    Column("api_key_id", UUID, primary_key=True),
    Column("began_at", INSTANT, primary_key=True, comment="The window of time, by the database's clock."),
    Column("used", Integer, nullable=False, comment="Requests that were given out in it; may end above the limit."),
    comment="How often each key has asked. A key's past windows go when it begins a new one.",
    # One row per key, changed again and again: the new versions find room on its page.
    postgresql_with={"fillfactor": 50},
)

admin_sessions = Table(
    "admin_sessions",
    metadata,
    Column("id", UUID, primary_key=True, comment="Names the session in the audit log; opens nothing."),
    Column("tenant_id", UUID, ForeignKey("tenants.id"), nullable=False),
    Column(
        "api_key_id", UUID, ForeignKey("api_keys.id"), nullable=False, comment="The session ends when this key does."
    ),
    Column(
        "token_hash",
        LargeBinary,
        nullable=False,
        unique=True,
        comment="SHA-256 of the token in the cookie; the token itself is nowhere.",
    ),
    Column("csrf_secret", LargeBinary, nullable=False, comment="What the session's forms are signed with."),
    Column("address", Text, comment="Where it was opened from, for people."),
    now("created_at", "The end is counted from here."),
    now("last_seen_at", "Written at most once a minute; a session that rests for too long is over."),
    # Finds those that are over.
    Index(None, "created_at"),
    comment="Who is logged in to the pages. Sessions that are over go when the next one is opened.",
)

login_failures = Table(
    "login_failures",
    metadata,
    Column("subject", Text, primary_key=True, comment="An id of a key, or an address."),
    Column("failure_count", Integer, nullable=False, comment="Since `began_at`; an attempt counts until it succeeds."),
    now("began_at", "Of the first failure that counts."),
    Column("locked_until", INSTANT, comment="Null: not locked."),
    comment="Who has tried in vain to log in, and how often. Rows that count no more go with the next login.",
)

saved_views = Table(
    "saved_views",
    metadata,
    Column("id", UUID, primary_key=True),
    Column("tenant_id", UUID, ForeignKey("tenants.id"), nullable=False),
    Column("name", Text, nullable=False, comment="What operators call it; one view per name."),
    Column("filters", JSONB, nullable=False, comment="The filters as they stand in the address of the list."),
    Column("api_key_id", UUID, comment="Whose key saved it; for people."),
    now("created_at", "For people."),
    # Finds them by name, and keeps names apart.
    UniqueConstraint("tenant_id", "name"),
    comment="Filters of the list of conversations that operators come back to.",
)

audit_log = Table(
    "audit_log",
    metadata,
    Column("id", UUID, primary_key=True, comment="By time of writing, roughly."),
    Column("tenant_id", UUID, comment="Whose data it was about; null where nobody can say."),
    now("happened_at", "For people."),
    Column("api_key_id", UUID, comment="Who; null: the command line, or an unknown key."),
    Column("session_id", UUID, comment="Null: not through a page."),
    Column("address", Text, comment="Null: the command line."),
    Column("action", Text, nullable=False, comment="What was done or tried."),
    Column("object", Text, comment="The id of what it was done to."),
    Column("details", JSONB, nullable=False, comment="Facts, never content or secrets."),
    Column("outcome", Text, nullable=False, comment="done, refused, failed."),
    # The log of a tenant, newest first: all of it, by action, by key.
    Index(None, "tenant_id", text("id DESC")),
    Index(None, "tenant_id", "action", text("id DESC")),
    Index(None, "tenant_id", "api_key_id", text("id DESC")),
    # What was done to one thing, whoever asks.
    Index(None, "object", text("id DESC")),
    comment="What operators did. Insert-only: no statement of Strata changes a row.",
)
