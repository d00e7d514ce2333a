"""Postgres: the durable side of Strata, over SQLAlchemy (tables, statements, migrations) and asyncpg (the wire)."""
