"""The conversations that replays write: in tables of the same shape, in a schema of their own.

What reads and writes live conversations names its tables without a schema. Over a database whose connections look into
schema `replay` first, the same code reads and writes replay conversations, and there is no way from the one to the
other. Tenants, keys, the queue and the replays themselves are in the first schema alone, and are found from both.
"""

from dataclasses import replace
from typing import Final

from server.postgres.connections import DatabaseOptions
from server.postgres.engine import Database
from server.postgres.migrations import require_current_schema
from server.postgres.replay.conversation_tables import REPLAY_SCHEMA

_SEARCH_PATH: Final = f'{REPLAY_SCHEMA}, "$user", public'
_LARGEST_POOL: Final = 8
"""Replays have time: they take no more connections from those who wait for their turns."""


def replay_database_options(options: DatabaseOptions) -> DatabaseOptions:
    """How to reach the replay conversations in a database."""
    return replace(options, search_path=_SEARCH_PATH, pool_size=min(options.pool_size, _LARGEST_POOL))


def make_replay_database(database: Database) -> Database:
    """The replay conversations beside live conversations. Connects to nothing before it is used; the caller closes
    it.
    """
    return Database(replay_database_options(database.options), on_first_contact=require_current_schema)
