"""The tables of tenants, API keys, rate limits, admin sessions, saved views and the audit log.

`server.postgres.tables` has the rules for all tables.
"""

from sqlalchemy import ARRAY, UUID, Column, ForeignKey, Index, Integer, LargeBinary, Table, Text, UniqueConstraint, text
from sqlalchemy.dialects.postgresql import JSONB

from server.postgres.tables import INSTANT, metadata, now

tenants = Table(
    "tenants",
    metadata,
    Column("id", UUID, primary_key=True),
    Column("name", Text, nullable=False, unique=True, comment="Chosen by operators; unique."),
    now("created_at", "Informational."),
    comment="The owners of data. Every query is restricted to one tenant.",
)

api_keys = Table(
    "api_keys",
    metadata,
    Column(
        "id", UUID, primary_key=True, comment="Part of the key's text; finds the row before the secret is compared."
    ),
    Column("tenant_id", UUID, ForeignKey("tenants.id"), nullable=False, index=True, comment="Indexed for lists."),
    Column("name", Text, nullable=False, comment="Chosen by the operator."),
    Column("secret_hash", LargeBinary, nullable=False, comment="SHA-256 of the secret, which is not stored."),
    Column("scopes", ARRAY(Text), nullable=False, comment="client, admin."),
    now("created_at", "Informational."),
    Column("expires_at", INSTANT, comment="Null: never."),
    Column("revoked_at", INSTANT, comment="Set once; the row is kept."),
    Column("last_used_at", INSTANT, comment="Updated at most once a minute, so that most lookups only read."),
    comment="API keys, as hashes of their secrets.",
)

rate_windows = Table(
    "rate_windows",
    metadata,
    Column("api_key_id", UUID, primary_key=True),
    Column("began_at", INSTANT, primary_key=True, comment="Start of the window, by the database's clock."),
    Column("used", Integer, nullable=False, comment="Requests reserved in this window; may exceed the limit."),
    comment="Requests per API key and window. Past windows of a key are deleted when a new one begins.",
    # One row per key, updated often: the new row versions fit on the same page.
    postgresql_with={"fillfactor": 50},
)

admin_sessions = Table(
    "admin_sessions",
    metadata,
    Column("id", UUID, primary_key=True, comment="Names the session in the audit log; is not a credential."),
    Column("tenant_id", UUID, ForeignKey("tenants.id"), nullable=False),
    Column(
        "api_key_id",
        UUID,
        ForeignKey("api_keys.id"),
        nullable=False,
        comment="The session ends when this key is revoked or expires.",
    ),
    Column(
        "token_hash",
        LargeBinary,
        nullable=False,
        unique=True,
        comment="SHA-256 of the token in the cookie, which is not stored.",
    ),
    Column("csrf_secret", LargeBinary, nullable=False, comment="Signs the forms of the session."),
    Column("address", Text, comment="The client address at login. Informational."),
    now("created_at", "The maximum age is counted from here."),
    now("last_seen_at", "Updated at most once a minute; an idle session expires."),
    # Finds expired sessions.
    Index(None, "created_at"),
    comment="Sessions of operators in the admin pages. Expired sessions are deleted at the next login.",
)

login_failures = Table(
    "login_failures",
    metadata,
    Column("subject", Text, primary_key=True, comment="The id of a key, or an address."),
    Column(
        "failure_count", Integer, nullable=False, comment="Failures since `began_at`; a successful login resets them."
    ),
    now("began_at", "Time of the first counted failure."),
    Column("locked_until", INSTANT, comment="Null: not locked."),
    comment="Failed logins by key or address. Outdated rows are deleted at the next login.",
)

saved_views = Table(
    "saved_views",
    metadata,
    Column("id", UUID, primary_key=True),
    Column("tenant_id", UUID, ForeignKey("tenants.id"), nullable=False),
    Column("name", Text, nullable=False, comment="Chosen by operators; unique within the tenant."),
    Column("filters", JSONB, nullable=False, comment="The filters as in the query string of the list."),
    Column("api_key_id", UUID, comment="The key that saved the view. Informational."),
    now("created_at", "Informational."),
    # Finds a view by name, and keeps names unique.
    UniqueConstraint("tenant_id", "name"),
    comment="Saved filters of the list of conversations.",
)

audit_log = Table(
    "audit_log",
    metadata,
    Column("id", UUID, primary_key=True, comment="Ordered by time of writing, approximately."),
    Column("tenant_id", UUID, comment="The tenant whose data was concerned; null if unknown."),
    now("happened_at", "Informational."),
    Column("api_key_id", UUID, comment="The acting key; null: the command line, or an unknown key."),
    Column("session_id", UUID, comment="Null: not through an admin page."),
    Column("address", Text, comment="Null: the command line."),
    Column("action", Text, nullable=False, comment="The action that was performed or attempted."),
    Column("object", Text, comment="The id of the object of the action."),
    Column("details", JSONB, nullable=False, comment="Details of the action; never content or secrets."),
    Column("outcome", Text, nullable=False, comment="done, refused, failed."),
    # Lists the log of a tenant, newest first: all of it, by action, by key.
    Index(None, "tenant_id", text("id DESC")),
    Index(None, "tenant_id", "action", text("id DESC")),
    Index(None, "tenant_id", "api_key_id", text("id DESC")),
    # Lists the actions on one object, in all tenants.
    Index(None, "object", text("id DESC")),
    comment="Actions of operators. Insert-only: no statement changes a row.",
)
