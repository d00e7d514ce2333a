"""What the caches need: what a call asked of them, the provider's id of its answer, and caches on their way out.

Rules: this runs while the previous release serves, so it must be usable by that release. It waits at most 4 s for a
lock and works at most 60 s in one statement; what needs longer is split, or raises the limit below with the reason.
NOT NULL comes in three steps: nullable, fill, set. Indexes on large tables are made CONCURRENTLY, outside a
transaction. Once landed, this file is never edited.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "20261116_05"
down_revision: str | None = "20261116_03"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_KEY = ["tenant_id", "provider", "account", "model", "prefix_hash"]
_KEY_INDEX = "ix_provider_caches_tenant_id_provider_account_model_prefix_hash"


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '4s'")
    op.execute("SET LOCAL statement_timeout = '60s'")
    # Nullable and without a default, all of them: no row is rewritten, and the previous release leaves them empty.
    op.add_column(
        "calls",
        sa.Column(
            "caching",
            sa.dialects.postgresql.JSONB(),
            nullable=True,
            comment="What was asked of the provider's cache: markers, lifetimes, a cache's name.",
        ),
    )
    op.add_column(
        "calls",
        sa.Column(
            "response_id",
            sa.Text(),
            nullable=True,
            comment="The provider's name for its answer; the next request may refer to it.",
        ),
    )
    op.add_column(
        "provider_caches",
        sa.Column(
            "removing_at",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="Since when it is to be removed at the provider; nobody uses it any more.",
        ),
    )
    # Empty until this release: no release before it has made a cache.
    op.drop_index(_KEY_INDEX, table_name="provider_caches")
    op.create_index(_KEY_INDEX, "provider_caches", _KEY, unique=True, postgresql_where=sa.text("removing_at IS NULL"))
    # Not CONCURRENTLY, which waits for all others, a second migration among them, which waits for this one. No release
    # before this one has calls in any number, and summaries of pages are made in one pass.
    op.create_index("ix_calls_started_at", "calls", ["started_at"], postgresql_using="brin")


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '4s'")
    op.execute("SET LOCAL statement_timeout = '60s'")
    op.drop_index("ix_calls_started_at", table_name="calls", postgresql_using="brin")
    op.execute("DELETE FROM provider_caches WHERE removing_at IS NOT NULL")
    op.drop_index(_KEY_INDEX, table_name="provider_caches")
    op.create_index(_KEY_INDEX, "provider_caches", _KEY, unique=True)
    op.drop_column("provider_caches", "removing_at")
    op.drop_column("calls", "response_id")
    op.drop_column("calls", "caching")
