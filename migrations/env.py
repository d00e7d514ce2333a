"""Runs migrations on the connection that `server.postgres.migrations` hands over."""

from alembic import context

from server.postgres.migrations import is_described
from server.postgres.schema import metadata

connection = context.config.attributes.get("connection")
if connection is None:
    message = "Run migrations with `strata migrate`, which knows the database."
    raise SystemExit(message)

context.configure(
    connection=connection,
    target_metadata=metadata,
    include_name=is_described,
    include_schemas=True,
    compare_type=True,
    compare_server_default=True,
    # One revision fails or lands by itself, and its locks are held no longer than it runs.
    transaction_per_migration=True,
)
with context.begin_transaction():
    context.run_migrations()
