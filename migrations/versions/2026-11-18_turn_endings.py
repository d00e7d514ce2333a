"""What the provider said about the end of a turn: its message, its delay, the details of a stop.

Rules: this runs while the previous release serves, so it must be usable by that release. It waits at most 4 s for a
lock and works at most 60 s in one statement; what needs longer is split, or raises the limit below with the reason.
NOT NULL comes in three steps: nullable, fill, set. Indexes on large tables are made CONCURRENTLY, outside a
transaction. Once landed, this file is never edited.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision: str = "20261118_20"
down_revision: str | None = "20261118_02"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '4s'")
    op.execute("SET LOCAL statement_timeout = '60s'")
    for schema in (None, "replay"):
        op.add_column(
            "turns",
            sa.Column(
                "ending",
                postgresql.JSONB(),
                nullable=True,
                comment="Model turns: what the provider said about the end; null: nothing more.",
            ),
            schema=schema,
        )


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '4s'")
    op.execute("SET LOCAL statement_timeout = '60s'")
    for schema in (None, "replay"):
        op.drop_column("turns", "ending", schema=schema)
