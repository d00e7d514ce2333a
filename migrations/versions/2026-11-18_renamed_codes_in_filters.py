"""Rename error codes in saved filters and in the audit log, as the vocabulary revision did in turns, calls and facts.

Rules: this runs while the previous release serves, so it must be usable by that release. It waits at most 4 s for a
lock and works at most 60 s in one statement; what needs longer is split, or raises the limit below with the reason.
Once landed, this file is never edited.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "20261118_50"
down_revision: str | None = "20261118_40"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_ERROR_CODES = {"opening_rejected": "summary_rejected", "provider_cut": "provider_disconnected"}


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '4s'")
    op.execute("SET LOCAL statement_timeout = '60s'")
    for old, new in _ERROR_CODES.items():
        _rename(old, new)


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '4s'")
    op.execute("SET LOCAL statement_timeout = '60s'")
    for old, new in _ERROR_CODES.items():
        _rename(new, old)


def _rename(old: str, new: str) -> None:
    for table, column, member in (("saved_views", "filters", "error_code"), ("audit_log", "details", "code")):
        _run(
            f"UPDATE {table} SET {column} = jsonb_set({column}, '{{{member}}}', to_jsonb(CAST(:new AS text)))"
            f" WHERE {column}->>'{member}' = :old",
            old=old,
            new=new,
        )
    # A draft is stored as JSON text. Quotation marks inside a string are escaped there, so no free text can match.
    _run(
        r"""UPDATE replays SET draft = CAST(
            regexp_replace(draft::text, :pattern, '\1"' || :new || '"', 'g') AS json
        ) WHERE draft::text ~ :pattern""",
        pattern=rf'("error_code"\s*:\s*)"{old}"',
        new=new,
    )


def _run(statement: str, **values: str) -> None:
    op.execute(sa.text(statement).bindparams(**values))
