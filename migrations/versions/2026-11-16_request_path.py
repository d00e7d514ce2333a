"""What the request path keeps beside the turns: the queue, the wish to cancel, layer orders, templates, rates.

Rules: this runs while the previous release serves, so it must be usable by that release. It waits at most 4 s for a
lock and works at most 60 s in one statement; what needs longer is split, or raises the limit below with the reason.
NOT NULL comes in three steps: nullable, fill, set. Indexes on large tables are made CONCURRENTLY, outside a
transaction. Once landed, this file is never edited.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "20261116_03"
down_revision: str | None = "20261116_02"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '4s'")
    op.execute("SET LOCAL statement_timeout = '60s'")
    # Nullable and without a default, all of them: no row is rewritten, and the previous release leaves them empty.
    op.add_column(
        "calls",
        sa.Column(
            "layer_order",
            sa.Text(),
            nullable=True,
            comment="layered or append_only: whether `dynamic` stood inside the input, for ever.",
        ),
    )
    op.add_column(
        "conversations",
        sa.Column(
            "cancel_requested_at",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="Somebody wants the running turn to stop; null when none runs.",
        ),
    )
    op.add_column(
        "epochs",
        sa.Column(
            "prefix_hash",
            sa.LargeBinary(),
            nullable=True,
            comment="SHA-256 of static text and tools: what thinking is bound to.",
        ),
    )
    op.add_column(
        "epochs",
        sa.Column(
            "arguments_hash",
            sa.LargeBinary(),
            nullable=True,
            comment="SHA-256 of the args that the text was rendered with.",
        ),
    )
    op.add_column(
        "turns",
        sa.Column(
            "revision",
            sa.BigInteger(),
            nullable=True,
            comment="Model turns: the conversation's when the turn ended; null in a fork's.",
        ),
    )
    _create_tables()


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '4s'")
    op.execute("SET LOCAL statement_timeout = '60s'")
    op.drop_table("templates")
    op.drop_table("rate_windows")
    op.drop_table("waiting_turns")
    op.execute("DROP SEQUENCE waiting_tickets")
    op.drop_column("turns", "revision")
    op.drop_column("epochs", "arguments_hash")
    op.drop_column("epochs", "prefix_hash")
    op.drop_column("conversations", "cancel_requested_at")
    op.drop_column("calls", "layer_order")


def _create_tables() -> None:
    op.execute("CREATE SEQUENCE waiting_tickets")
    op.create_table(
        "waiting_turns",
        sa.Column("conversation_id", sa.UUID(), nullable=False),
        sa.Column(
            "ticket",
            sa.BigInteger(),
            autoincrement=False,
            nullable=False,
            comment="The lowest is the next; below zero for those that go before all others.",
        ),
        sa.Column(
            "expires_at",
            sa.DateTime(timezone=True),
            nullable=False,
            comment="Moved on by its holder; after it, the ticket is void.",
        ),
        sa.PrimaryKeyConstraint("conversation_id", "ticket", name=op.f("pk_waiting_turns")),
        comment="Who waits for a conversation to be free. Void tickets go when the next one is drawn.",
        postgresql_with={"fillfactor": 70},
    )
    op.create_table(
        "rate_windows",
        sa.Column("api_key_id", sa.UUID(), nullable=False),
        sa.Column(
            "began_at",
            sa.DateTime(timezone=True),
            nullable=False,
            comment="The window of time, by the database's clock.",
        ),
        sa.Column(
            "used",
            sa.Integer(),
            nullable=False,
            comment="Requests that were given out in it; may end above the limit.",
        ),
        sa.PrimaryKeyConstraint("api_key_id", "began_at", name=op.f("pk_rate_windows")),
        comment="How often each key has asked. A key's past windows go when it begins a new one.",
        postgresql_with={"fillfactor": 50},
    )
    op.create_table(
        "templates",
        sa.Column("hash", sa.LargeBinary(), nullable=False, comment="SHA-256 of the source; epochs name it."),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="For people.",
        ),
        sa.PrimaryKeyConstraint("hash", name=op.f("pk_templates")),
        comment="The templates that static texts were rendered from, once each, whoever uses them. Insert-only.",
    )
