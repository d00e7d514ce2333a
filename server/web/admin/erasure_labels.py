"""What goes with a conversation, in words for operators."""

from collections.abc import Mapping, Sequence
from typing import Final

_TABLES: Final[Mapping[str, str]] = {
    "conversations": "The conversation itself",
    "turns": "Turns",
    "calls": "Calls to providers, with their raw bytes",
    "call_chunks": "Pieces of running calls",
    "epochs": "Epochs: static texts",
    "segments": "Segments: compacted history",
    "blobs": "Images that no other conversation shows",
    "blob_references": "Uses of images",
    "provider_caches": "Caches at the provider that no other conversation uses",
    "provider_cache_uses": "Uses of caches",
    "waiting_turns": "Places in the queue",
    "replay_items": "Its places in replays",
    "replay_results": "Results of replays",
    "conversation_facts": "Its row in the list",
    "turn_texts": "Texts for search",
    "compaction_alarms": "Alarms",
}
"""In the order in which people want to know. Tables of a later release come last, under their own names."""


def tell_rows(rows: Mapping[str, int]) -> Sequence[tuple[str, str, int]]:
    """What each row means, the table that it is in, and how many there are."""
    order = list(_TABLES)
    known = sorted((name for name in rows if name in _TABLES), key=order.index)
    others = sorted(name for name in rows if name not in _TABLES)
    return [(_tell(name), name, rows[name]) for name in (*known, *others)]


def _tell(name: str) -> str:
    schema, _, table = name.rpartition(".")
    words = _TABLES.get(table, table)
    return f"{words}, of replays" if schema and words != table else words
