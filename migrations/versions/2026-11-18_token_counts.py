"""Token counts of 64 bits: a turn's sum over its calls, and what a provider may claim, can exceed 32.

Rules: this runs while the previous release serves, so it must be usable by that release. It waits at most 4 s for a
lock and works at most 60 s in one statement; what needs longer is split, or raises the limit below with the reason.
NOT NULL comes in three steps: nullable, fill, set. Indexes on large tables are made CONCURRENTLY, outside a
transaction. Once landed, this file is never edited.
"""

from collections.abc import Sequence

from alembic import op

revision: str = "20261118_01"
down_revision: str | None = "20261116_12"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_USAGE = ("fresh_input_tokens", "cache_read_tokens", "cache_write_tokens", "output_tokens", "reasoning_tokens")
_COLUMNS = {
    "turns": _USAGE,
    "calls": (*_USAGE, "cache_expected_tokens"),
    "provider_caches": ("token_count",),
}


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '4s'")
    # Changing the width of a column rewrites its table, once for all of its columns: minutes for a large one. Long
    # values such as raw bytes are stored out of line and are copied with it.
    op.execute("SET LOCAL statement_timeout = '30min'")
    _change("bigint USING {0}::bigint")


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '4s'")
    op.execute("SET LOCAL statement_timeout = '30min'")
    # A count that does not fit any more becomes the largest that does.
    _change("integer USING least({0}, 2147483647)::integer")


def _change(kind: str) -> None:
    for table, columns in _COLUMNS.items():
        changes = ", ".join(f"ALTER COLUMN {column} TYPE {kind.format(column)}" for column in columns)
        for place in (table, f"replay.{table}"):
            op.execute(f"ALTER TABLE {place} {changes}")
