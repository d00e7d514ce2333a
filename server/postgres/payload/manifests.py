"""Reading manifests. A call stores only what differs from the manifest of an earlier call, see
`server.conversation.manifest`; that one may be stored in the same way.
"""

import logging
from collections.abc import Mapping
from typing import Any, Final, TypeAlias
from uuid import UUID

from server.conversation.block import JsonValue
from server.conversation.lru import LruCache
from server.conversation.manifest import decode_manifest, expand_manifest, find_base
from server.conversation.payload import ManifestEntry
from server.postgres.codec import decode_json
from server.postgres.engine import Database, Statement

_log = logging.getLogger("strata.postgres")
StoredManifest: TypeAlias = tuple[Mapping[str, JsonValue], ...]

_CHAIN: Final = Statement("""
WITH RECURSIVE chain AS (
    SELECT turn_seq, attempt, manifest, 0 AS depth
    FROM calls WHERE conversation_id = :conversation AND turn_seq = :turn_seq::bigint AND attempt = :attempt::smallint
    UNION ALL
    SELECT k.turn_seq, k.attempt, k.manifest, chain.depth + 1
    FROM chain
    JOIN calls k ON k.conversation_id = :conversation
        AND k.turn_seq = (chain.manifest ->> 'turn_seq')::bigint
        AND k.attempt = (chain.manifest ->> 'attempt')::smallint
        -- A base is older than what is based on it, so a damaged row cannot make a circle.
        AND (k.turn_seq, k.attempt) < (chain.turn_seq, chain.attempt)
    WHERE jsonb_typeof(chain.manifest) = 'object'
)
SELECT turn_seq, attempt, manifest FROM chain ORDER BY depth DESC
""")
_CACHED: Final = 4
"""Manifests that a reader keeps: calls are usually read in order, and each is based on one of the last."""
_UNREADABLE: Final = (KeyError, TypeError, ValueError, IndexError, AttributeError)
_DAMAGED: Final[StoredManifest] = ({},)
"""In place of a manifest that cannot be restored, because it or its base is damaged. Decoding it fails."""


class ManifestReader:
    """Restores the manifests of calls. Keeps the last few, because the next one is usually based on one of them."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._manifests: LruCache[tuple[UUID | None, int, int], StoredManifest] = LruCache(_CACHED)

    async def expand(self, conversation: UUID | None, turn_seq: int, attempt: int, stored: str) -> StoredManifest:
        """Return the whole manifest of a call, whose column contains `stored`."""
        value: Any = decode_json(stored)
        try:
            base = find_base(value)
            known = None if base is None else self._manifests.get((conversation, *base))
            if base is None or known is not None:
                manifest = expand_manifest([value], known or ())
            else:
                manifest = expand_manifest([*await self._load_chain(conversation, *base), value])
        except _UNREADABLE:
            return _DAMAGED
        self._manifests.put((conversation, turn_seq, attempt), manifest)
        return manifest

    async def decode(
        self, conversation: UUID | None, turn_seq: int, attempt: int, stored: str
    ) -> tuple[ManifestEntry, ...]:
        """Return the whole manifest of a call as values. Empty if it is damaged: the next request must not fail over
        it, it is only not compared with the last one. Verification reports the damage.
        """
        try:
            return decode_manifest(await self.expand(conversation, turn_seq, attempt, stored))
        except _UNREADABLE:
            _log.warning("manifest.unreadable", extra={"turn_seq": turn_seq, "attempt": attempt})
            return ()

    async def _load_chain(self, conversation: UUID | None, turn_seq: int, attempt: int) -> list[JsonValue]:
        """Load the stored manifest of a call, and all that it is based on, the oldest first."""
        rows = await self._database.run(_CHAIN, conversation=conversation, turn_seq=turn_seq, attempt=attempt)
        return [decode_json(row["manifest"]) for row in rows]
