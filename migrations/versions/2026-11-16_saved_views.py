"""Filters of the list of conversations that operators come back to.

Rules: this runs while the previous release serves, so it must be usable by that release. It waits at most 4 s for a
lock and works at most 60 s in one statement; what needs longer is split, or raises the limit below with the reason.
NOT NULL comes in three steps: nullable, fill, set. Indexes on large tables are made CONCURRENTLY, outside a
transaction. Once landed, this file is never edited.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "20261116_10"
down_revision: str | None = "20261116_09"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_INSTANT = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '4s'")
    op.execute("SET LOCAL statement_timeout = '60s'")
    op.create_table(
        "saved_views",
        sa.Column("id", sa.UUID(), nullable=False),
        sa.Column("tenant_id", sa.UUID(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False, comment="What operators call it; one view per name."),
        sa.Column(
            "filters",
            sa.dialects.postgresql.JSONB(),
            nullable=False,
            comment="The filters as they stand in the address of the list.",
        ),
        sa.Column("api_key_id", sa.UUID(), nullable=True, comment="Whose key saved it; for people."),
        sa.Column("created_at", _INSTANT, server_default=sa.text("now()"), nullable=False, comment="For people."),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_saved_views_tenant_id_tenants"),
        sa.PrimaryKeyConstraint("id", name="pk_saved_views"),
        sa.UniqueConstraint("tenant_id", "name", name="uq_saved_views_tenant_id_name"),
        comment="Filters of the list of conversations that operators come back to.",
    )


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '4s'")
    op.execute("SET LOCAL statement_timeout = '60s'")
    op.drop_table("saved_views")
