"""How long conversations get: the exchanges of each are counted.

Rules: this runs while the previous release serves, so it must be usable by that release. It waits at most 4 s for a
lock and works at most 60 s in one statement; what needs longer is split, or raises the limit below with the reason.
NOT NULL comes in three steps: nullable, fill, set. Indexes on large tables are made CONCURRENTLY, outside a
transaction. Once landed, this file is never edited.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "20261116_06"
down_revision: str | None = "20261116_05"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

# The newest ones are those that lengths are read from. All others are counted by their next turn, as are those that the
# previous release goes on with: so this need not grow with the table, and holds no turn up for long.
_FILL = """
UPDATE conversations SET exchange_count = (
    SELECT count(*) FROM turns WHERE conversation_id = conversations.id AND kind = 'user_task'
)
WHERE id IN (
    SELECT id FROM conversations WHERE lease_token IS NULL
    ORDER BY id DESC LIMIT 10000 FOR NO KEY UPDATE SKIP LOCKED
)
"""


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '4s'")
    op.execute("SET LOCAL statement_timeout = '60s'")
    # Nullable and without a default: no row is rewritten, and the previous release leaves it empty.
    op.add_column(
        "conversations",
        sa.Column(
            "exchange_count",
            sa.BigInteger(),
            nullable=True,
            comment="User tasks so far. Null until they are counted, which an accepted turn does.",
        ),
    )
    op.execute(_FILL)


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '4s'")
    op.execute("SET LOCAL statement_timeout = '60s'")
    op.drop_column("conversations", "exchange_count")
