"""The tables of the conversations that replays write: copies of the live ones in schema `replay`."""

from typing import Final

# The tables must be declared before they can be listed.
from server.postgres.access import tables as access_tables  # noqa: F401  reason: as above
from server.postgres.inspection import tables as inspection_tables  # noqa: F401  reason: as above
from server.postgres.replay import tables as replay_tables  # noqa: F401  reason: as above
from server.postgres.tables import assistants, blobs, conversations, metadata, provider_caches, templates

REPLAY_SCHEMA: Final = "replay"
_OUTSIDE_REPLAY_SCHEMA: Final = frozenset({"replay_items", "replay_results"})
REPLAY_TABLES: Final = {
    table.name: table.to_metadata(
        metadata,
        schema=REPLAY_SCHEMA,
        # Both schemas share the table of tenants.
        referred_schema_fn=lambda *_: None,
    )
    for table in (
        assistants,
        conversations,
        templates,
        blobs,
        provider_caches,
        *(table for table in metadata.sorted_tables if "conversation_id" in table.c),
    )
    if table.name not in _OUTSIDE_REPLAY_SCHEMA
}
"""By the names of the live tables. A connection with `replay` first in its search path uses them in place of the live
ones, see `server.postgres.replay.conversations`."""
