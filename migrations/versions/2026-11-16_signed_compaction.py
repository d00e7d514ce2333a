"""Signed summaries: the message that an epoch begins with, and what it stands for.

Rules: this runs while the previous release serves, so it must be usable by that release. It waits at most 4 s for a
lock and works at most 60 s in one statement; what needs longer is split, or raises the limit below with the reason.
NOT NULL comes in three steps: nullable, fill, set. Indexes on large tables are made CONCURRENTLY, outside a
transaction. Once landed, this file is never edited.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "20261116_07"
down_revision: str | None = "20261116_06"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_COLUMNS = (
    ("opening", sa.LargeBinary(), "The message with a signed summary that stands before the buffer."),
    ("opening_start_seq", sa.BigInteger(), "The first turn that the opening stands for."),
    ("opening_text", sa.Text(), "What the opening tells, as a segment would. Frozen."),
    ("opening_tokens", sa.Integer(), "Of that text, about."),
    ("opening_kept_hash", sa.LargeBinary(), "The prefix whose thinking is valid behind the opening too."),
)


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '4s'")
    op.execute("SET LOCAL statement_timeout = '60s'")
    # Nullable and without a default: no row is rewritten, and the previous release leaves them empty.
    for name, kind, comment in _COLUMNS:
        op.add_column("epochs", sa.Column(name, kind, nullable=True, comment=comment))


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '4s'")
    op.execute("SET LOCAL statement_timeout = '60s'")
    for name, _, _ in reversed(_COLUMNS):
        op.drop_column("epochs", name)
