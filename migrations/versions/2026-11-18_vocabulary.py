"""Rename columns and stored words to the field's terms: signed summaries, replay conversations, expired caches.

Rules: it waits at most 4 s for a lock and works at most 60 s in one statement; what needs longer is split, or raises
the limit below with the reason. Once landed, this file is never edited.

This revision renames columns, so the previous release cannot serve while it runs. No release has been made yet.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "20261118_30"
down_revision: str | None = "20261118_20"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_SCHEMAS = ("public", "replay")
_EPOCH_COLUMNS = {
    "opening": "signed_summary",
    "opening_start_seq": "signed_summary_start_seq",
    "opening_text": "signed_summary_text",
    "opening_tokens": "signed_summary_tokens",
    "opening_kept_hash": "signed_summary_kept_hash",
}
_COMMENTS = {
    ("epochs", "signed_summary_start_seq"): "The first turn that the signed summary stands for.",
    ("epochs", "signed_summary_text"): "What the signed summary tells, as a segment would. Frozen.",
    ("epochs", "signed_summary_kept_hash"): "The prefix whose thinking is valid behind the signed summary too.",
    ("replay_results", "replay_seq"): "The turn of the replay conversation whose calls were made for it.",
}
_EPOCH_REASONS = {"opening_set_down": "summary_inlined"}
_ERROR_CODES = {"opening_rejected": "summary_rejected", "provider_cut": "provider_disconnected"}
_MISS_REASONS = {"ttl_passed": "ttl_expired"}
_BLOCK_KINDS = {"opening": "signed_summary"}


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '4s'")
    # Calls have no index on these values, so each statement below reads the whole table once.
    op.execute("SET LOCAL statement_timeout = '30min'")
    for schema in _SCHEMAS:
        for old, new in _EPOCH_COLUMNS.items():
            op.alter_column("epochs", old, new_column_name=new, schema=schema)
    op.alter_column("replay_items", "shadow_id", new_column_name="replay_conversation_id")
    op.alter_column("replay_results", "shadow_seq", new_column_name="replay_seq")
    for (table, column), comment in _COMMENTS.items():
        for schema in _SCHEMAS if table == "epochs" else ("public",):
            op.alter_column(table, column, comment=comment, schema=schema)
    _rewrite(_EPOCH_REASONS, _ERROR_CODES, _MISS_REASONS, _BLOCK_KINDS)


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '4s'")
    # Calls have no index on these values, so each statement below reads the whole table once.
    op.execute("SET LOCAL statement_timeout = '30min'")
    _rewrite(*(_reverse(words) for words in (_EPOCH_REASONS, _ERROR_CODES, _MISS_REASONS, _BLOCK_KINDS)))
    op.alter_column("replay_results", "replay_seq", new_column_name="shadow_seq")
    op.alter_column("replay_items", "replay_conversation_id", new_column_name="shadow_id")
    for schema in _SCHEMAS:
        for old, new in _EPOCH_COLUMNS.items():
            op.alter_column("epochs", new, new_column_name=old, schema=schema)


def _reverse(words: dict[str, str]) -> dict[str, str]:
    return {new: old for old, new in words.items()}


def _rewrite(reasons: dict[str, str], codes: dict[str, str], misses: dict[str, str], blocks: dict[str, str]) -> None:
    for schema in _SCHEMAS:
        for old, new in reasons.items():
            _set(schema, "epochs", "reason", old, new)
        for old, new in codes.items():
            _set(schema, "turns", "error_code", old, new)
            _set(schema, "calls", "error_code", old, new)
            _run(
                f"UPDATE {schema}.conversation_facts SET error_codes = array_replace(error_codes, :old, :new),"
                " labels = array_replace(labels, 'error:' || :old, 'error:' || :new) WHERE :old = ANY (error_codes)",
                old=old,
                new=new,
            )
        for old, new in misses.items():
            _set(schema, "calls", "cache_miss_reason", old, new)
        for old, new in blocks.items():
            _rewrite_members(schema, "manifest", "kind", old, new)
            _rewrite_members(schema, "warnings", "block", old, new)
    for old, new in codes.items():
        _set("public", "replay_items", "error_code", old, new)


def _set(schema: str, table: str, column: str, old: str, new: str) -> None:
    _run(f"UPDATE {schema}.{table} SET {column} = :new WHERE {column} = :old", old=old, new=new)


def _rewrite_members(schema: str, column: str, member: str, old: str, new: str) -> None:
    """Rename a value of one member in the objects of a JSON array. The other members keep their values."""
    _run(
        f"""
UPDATE {schema}.calls SET {column} = (
    SELECT jsonb_agg(
        CASE
            WHEN entry->>:member = :old THEN jsonb_set(entry, ARRAY[:member], to_jsonb(CAST(:new AS text)))
            ELSE entry
        END ORDER BY position
    )
    FROM jsonb_array_elements({column}) WITH ORDINALITY AS entries (entry, position)
)
WHERE {column} @> jsonb_build_array(jsonb_build_object(CAST(:member AS text), CAST(:old AS text)))
""",
        member=member,
        old=old,
        new=new,
    )


def _run(statement: str, **values: str) -> None:
    op.execute(sa.text(statement).bindparams(**values))
