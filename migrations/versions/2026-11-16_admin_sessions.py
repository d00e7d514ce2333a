"""Who looks into a tenant's data and what they do: sessions of operators, failed logins, and the audit log.

Rules: this runs while the previous release serves, so it must be usable by that release. It waits at most 4 s for a
lock and works at most 60 s in one statement; what needs longer is split, or raises the limit below with the reason.
NOT NULL comes in three steps: nullable, fill, set. Indexes on large tables are made CONCURRENTLY, outside a
transaction. Once landed, this file is never edited.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "20261116_09"
down_revision: str | None = "20261116_08"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_INSTANT = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '4s'")
    op.execute("SET LOCAL statement_timeout = '60s'")
    _create_admin_sessions()
    _create_login_failures()
    _create_audit_log()


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '4s'")
    op.execute("SET LOCAL statement_timeout = '60s'")
    for table in ("audit_log", "login_failures", "admin_sessions"):
        op.drop_table(table)


def _create_admin_sessions() -> None:
    op.create_table(
        "admin_sessions",
        sa.Column("id", sa.UUID(), nullable=False, comment="Names the session in the audit log; opens nothing."),
        sa.Column("tenant_id", sa.UUID(), nullable=False),
        sa.Column("api_key_id", sa.UUID(), nullable=False, comment="The session ends when this key does."),
        sa.Column(
            "token_hash",
            sa.LargeBinary(),
            nullable=False,
            comment="SHA-256 of the token in the cookie; the token itself is nowhere.",
        ),
        sa.Column("csrf_secret", sa.LargeBinary(), nullable=False, comment="What the session's forms are signed with."),
        sa.Column("address", sa.Text(), nullable=True, comment="Where it was opened from, for people."),
        sa.Column(
            "created_at",
            _INSTANT,
            server_default=sa.text("now()"),
            nullable=False,
            comment="The end is counted from here.",
        ),
        sa.Column(
            "last_seen_at",
            _INSTANT,
            server_default=sa.text("now()"),
            nullable=False,
            comment="Written at most once a minute; a session that rests for too long is over.",
        ),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_admin_sessions_tenant_id_tenants"),
        sa.ForeignKeyConstraint(["api_key_id"], ["api_keys.id"], name="fk_admin_sessions_api_key_id_api_keys"),
        sa.PrimaryKeyConstraint("id", name="pk_admin_sessions"),
        sa.UniqueConstraint("token_hash", name="uq_admin_sessions_token_hash"),
        comment="Who is logged in to the pages. Sessions that are over go when the next one is opened.",
    )
    op.create_index("ix_admin_sessions_created_at", "admin_sessions", ["created_at"])


def _create_login_failures() -> None:
    op.create_table(
        "login_failures",
        sa.Column("subject", sa.Text(), nullable=False, comment="An id of a key, or an address."),
        sa.Column(
            "failure_count",
            sa.Integer(),
            nullable=False,
            comment="Since `began_at`; an attempt counts until it succeeds.",
        ),
        sa.Column(
            "began_at",
            _INSTANT,
            server_default=sa.text("now()"),
            nullable=False,
            comment="Of the first failure that counts.",
        ),
        sa.Column("locked_until", _INSTANT, nullable=True, comment="Null: not locked."),
        sa.PrimaryKeyConstraint("subject", name="pk_login_failures"),
        comment="Who has tried in vain to log in, and how often. Rows that count no more go with the next login.",
    )


def _create_audit_log() -> None:
    op.create_table(
        "audit_log",
        sa.Column("id", sa.UUID(), nullable=False, comment="By time of writing, roughly."),
        sa.Column("tenant_id", sa.UUID(), nullable=True, comment="Whose data it was about; null where nobody can say."),
        sa.Column("happened_at", _INSTANT, server_default=sa.text("now()"), nullable=False, comment="For people."),
        sa.Column("api_key_id", sa.UUID(), nullable=True, comment="Who; null: the command line, or an unknown key."),
        sa.Column("session_id", sa.UUID(), nullable=True, comment="Null: not through a page."),
        sa.Column("address", sa.Text(), nullable=True, comment="Null: the command line."),
        sa.Column("action", sa.Text(), nullable=False, comment="What was done or tried."),
        sa.Column("object", sa.Text(), nullable=True, comment="The id of what it was done to."),
        sa.Column(
            "details", sa.dialects.postgresql.JSONB(), nullable=False, comment="Facts, never content or secrets."
        ),
        sa.Column("outcome", sa.Text(), nullable=False, comment="done, refused, failed."),
        sa.PrimaryKeyConstraint("id", name="pk_audit_log"),
        comment="What operators did. Insert-only: no statement of Strata changes a row.",
    )
    op.create_index("ix_audit_log_tenant_id", "audit_log", ["tenant_id", sa.text("id DESC")])
    op.create_index("ix_audit_log_tenant_id_action", "audit_log", ["tenant_id", "action", sa.text("id DESC")])
    op.create_index("ix_audit_log_tenant_id_api_key_id", "audit_log", ["tenant_id", "api_key_id", sa.text("id DESC")])
    op.create_index("ix_audit_log_object", "audit_log", ["object", sa.text("id DESC")])
