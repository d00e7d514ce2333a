"""The database of replay conversations: the same database, with connections that search schema `replay` first.

The statements for live conversations name their tables without a schema. On these connections the same statements read
and write replay conversations, and never live ones. Tenants, keys, the job queue and the replays themselves exist only
in schema `public`, and are found from both.
"""

from dataclasses import replace
from typing import Final

from server.postgres.connections import DatabaseOptions
from server.postgres.engine import Database
from server.postgres.migrations import require_current_schema
from server.postgres.replay.conversation_tables import REPLAY_SCHEMA

_SEARCH_PATH: Final = f'{REPLAY_SCHEMA}, "$user", public'
_MAX_POOL_SIZE: Final = 8
"""Replays are not urgent and must not use up the connections of the server."""


def replay_database_options(options: DatabaseOptions) -> DatabaseOptions:
    """Return the options of the connections for replay conversations."""
    return replace(options, search_path=_SEARCH_PATH, pool_size=min(options.pool_size, _MAX_POOL_SIZE))


def make_replay_database(database: Database) -> Database:
    """Build the database of replay conversations. It connects when it is first used. The caller closes it."""
    return Database(replay_database_options(database.options), on_first_contact=require_current_schema)
