"""All tables together. Importing `metadata` from here is what makes sure that none is missing from it."""

from server.postgres import tables
from server.postgres.access import tables as access_tables
from server.postgres.columns import metadata
from server.postgres.inspection import tables as inspection_tables
from server.postgres.replay import conversation_tables as shadow_tables
from server.postgres.replay import tables as replay_tables

__all__ = ["ROOMS", "metadata"]

ROOMS = (access_tables, tables, replay_tables, inspection_tables, shadow_tables)
"""The modules that tables are declared in."""
