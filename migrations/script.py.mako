"""${message}.

Rules: this runs while the previous release serves, so it must be usable by that release. It waits at most 4 s for a
lock and works at most 60 s in one statement; what needs longer is split, or raises the limit below with the reason.
NOT NULL comes in three steps: nullable, fill, set. Once landed, this file is never edited.

Tables that conversations own are there twice, and both are changed alike:

    for schema in (None, "replay"):
        op.add_column("turns", sa.Column("seen_at", sa.DateTime(timezone=True)), schema=schema)

An index on a large table is made beside its writers, in a revision of its own. One that was broken off leaves an index
that is not valid and goes first. It waits for every transaction that is older, so it has no limit of time:

    with op.get_context().autocommit_block():
        op.execute("SET statement_timeout = 0")
        op.execute("DROP INDEX CONCURRENTLY IF EXISTS ix_turns_seen_at")
        op.create_index("ix_turns_seen_at", "turns", ["seen_at"], postgresql_concurrently=True)
        op.execute("RESET statement_timeout")

The tables `turns`, `calls` and `call_chunks` of schema `public` may be partitioned (`strata migrate partition`), and
Postgres makes no index CONCURRENTLY on a partitioned table. If `pg_class.relkind` is 'p', make the index ON ONLY the
table, CONCURRENTLY on each partition, and attach those with ALTER INDEX ... ATTACH PARTITION.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op
${imports + "\n" if imports else ""}
revision: str = ${repr(up_revision)}
down_revision: str | None = ${repr(down_revision)}
branch_labels: str | Sequence[str] | None = ${repr(branch_labels)}
depends_on: str | Sequence[str] | None = ${repr(depends_on)}


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '4s'")
    op.execute("SET LOCAL statement_timeout = '60s'")
    ${upgrades if upgrades else "pass"}


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '4s'")
    op.execute("SET LOCAL statement_timeout = '60s'")
    ${downgrades if downgrades else "pass"}
