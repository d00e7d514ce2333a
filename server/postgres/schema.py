"""All tables: the `metadata` imported from here is complete."""

from server.postgres import tables
from server.postgres.access import tables as access_tables
from server.postgres.inspection import tables as inspection_tables
from server.postgres.replay import conversation_tables as replay_conversation_tables
from server.postgres.replay import tables as replay_tables
from server.postgres.tables import metadata

__all__ = ["TABLE_MODULES", "metadata"]

TABLE_MODULES = (access_tables, tables, replay_tables, inspection_tables, replay_conversation_tables)
"""The modules that tables are declared in."""
