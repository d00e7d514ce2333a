"""What the tables are made of: the one `MetaData`, and columns that many of them have.

Whoever needs all tables takes `metadata` from `schema`: here nobody has filled it yet.
"""

from typing import Any

from sqlalchemy import Column, DateTime, MetaData, Numeric, text

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

INSTANT = DateTime(timezone=True)
MONEY = Numeric(20, 10)


def now(name: str, comment: str) -> Column[Any]:
    """A moment that the database notes by itself when the row is written."""
    return Column(name, INSTANT, nullable=False, server_default=text("now()"), comment=comment)
