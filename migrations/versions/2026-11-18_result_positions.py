"""Rename the place of a replay's result to its position: the column, its index, and the member in notes of judge calls.

Rules: it waits at most 4 s for a lock and works at most 60 s in one statement; what needs longer is split, or raises
the limit below with the reason. Once landed, this file is never edited.

This revision renames a column, so the previous release cannot serve while it runs. No release has been made yet.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "20261118_40"
down_revision: str | None = "20261118_30"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '4s'")
    # Calls have no index on their notes, so the statement reads all background calls of replays once.
    op.execute("SET LOCAL statement_timeout = '30min'")
    _rename("place", "position")


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '4s'")
    # Calls have no index on their notes, so the statement reads all background calls of replays once.
    op.execute("SET LOCAL statement_timeout = '30min'")
    _rename("position", "place")


def _rename(old: str, new: str) -> None:
    op.alter_column("replay_results", old, new_column_name=new)
    prefix = "ix_replay_results_replay_id_number_"
    op.execute(f"ALTER INDEX {prefix}{old} RENAME TO {prefix}{new}")
    op.execute(
        sa.text("""
UPDATE replay.calls SET warnings = (
    SELECT jsonb_agg(
        CASE
            WHEN note->>'kind' = 'judge' AND note ? :old
                THEN (note - CAST(:old AS text)) || jsonb_build_object(CAST(:new AS text), note->:old)
            ELSE note
        END ORDER BY number
    )
    FROM jsonb_array_elements(warnings) WITH ORDINALITY AS notes (note, number)
)
WHERE turn_seq < 0 AND warnings @> '[{"kind": "judge"}]'
""").bindparams(old=old, new=new)
    )
