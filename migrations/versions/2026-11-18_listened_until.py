"""Until when the growth of a running turn is announced to other processes.

Rules: this runs while the previous release serves, so it must be usable by that release. It waits at most 4 s for a
lock and works at most 60 s in one statement; what needs longer is split, or raises the limit below with the reason.
NOT NULL comes in three steps: nullable, fill, set. Indexes on large tables are made CONCURRENTLY, outside a
transaction. Once landed, this file is never edited.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "20261118_60"
down_revision: str | None = "20261118_50"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '4s'")
    op.execute("SET LOCAL statement_timeout = '60s'")
    # The previous release announces all growth, and its readers poll once a second what is not announced.
    for schema in (None, "replay"):
        op.add_column(
            "conversations",
            sa.Column(
                "listened_until",
                sa.DateTime(timezone=True),
                nullable=True,
                comment=(
                    "Growth of the running turn is announced until then; set by a process that reads it from the store."
                ),
            ),
            schema=schema,
        )


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '4s'")
    op.execute("SET LOCAL statement_timeout = '60s'")
    for schema in (None, "replay"):
        op.drop_column("conversations", "listened_until", schema=schema)
