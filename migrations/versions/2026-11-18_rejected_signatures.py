"""Which signatures a provider has rejected, and which model an answer says that it came from.

Rules: this runs while the previous release serves, so it must be usable by that release. It waits at most 4 s for a
lock and works at most 60 s in one statement; what needs longer is split, or raises the limit below with the reason.
NOT NULL comes in three steps: nullable, fill, set. Indexes on large tables are made CONCURRENTLY, outside a
transaction. Once landed, this file is never edited.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision: str = "20261118_02"
down_revision: str | None = "20261118_01"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_SCHEMAS = (None, "replay")


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '4s'")
    op.execute("SET LOCAL statement_timeout = '60s'")
    # Nullable and without a default: no row is rewritten, and the previous release leaves them empty.
    for schema in _SCHEMAS:
        op.add_column(
            "epochs",
            sa.Column(
                "rejected",
                postgresql.JSONB(),
                nullable=True,
                comment="By provider: up to which turn signatures, and calls, are left out because it rejected them.",
            ),
            schema=schema,
        )
        op.add_column(
            "turns",
            sa.Column(
                "model_version",
                sa.Text(),
                nullable=True,
                comment="Model turns: the model that the answer names; an alias does not say it.",
            ),
            schema=schema,
        )


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '4s'")
    op.execute("SET LOCAL statement_timeout = '60s'")
    for schema in _SCHEMAS:
        op.drop_column("turns", "model_version", schema=schema)
        op.drop_column("epochs", "rejected", schema=schema)
