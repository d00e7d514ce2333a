"""All tables together. Importing `metadata` from here is what makes sure that none is missing from it."""

from server.postgres import access_tables, inspection_tables, replay_tables, shadow_tables, tables
from server.postgres.table_parts import metadata

__all__ = ["ROOMS", "metadata"]

ROOMS = (access_tables, tables, replay_tables, inspection_tables, shadow_tables)
"""The modules that tables are declared in."""
