"""Beginning an epoch with a rewritten history: everything that a compaction writes, as one statement."""

import hashlib
from dataclasses import dataclass, replace

from server.conversation.epoch import Epoch, EpochReason, Segment, SignedSummary
from server.conversation.errors import Internal
from server.conversation.store import CopiedSegments, History, Store
from server.payload.builder import hash_prefix
from server.payload.shared_caches import StaticText, StaticTextCache
from server.providers.token_estimate import TokenEstimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """The new static layer and the new start of the buffer."""

    reason: EpochReason
    static: StaticText
    generation: int
    segment_count: int
    buffer_start_seq: int
    segment: Segment | None = None
    """The new segment."""
    copies: CopiedSegments | None = None
    """The segments that a new generation copies."""
    signed_summary: SignedSummary | None = None
    """The signed summary before the buffer."""
    prefix_hash: bytes | None = None
    """With a signed summary: the hash that thinking is bound to. None: it is computed from static text and tools."""


class EpochWriter:
    """Writes rewrites, and caches their texts for the turns of this process."""

    def __init__(self, store: Store, texts: StaticTextCache, estimate: TokenEstimate) -> None:
        self._store = store
        self._texts = texts
        self._estimate = estimate

    async def begin(self, tenant_id: str, history: History, rewrite: Rewrite) -> Epoch:
        """Begin the epoch after that of `history`. Everything but the history stays the same.

        Raises `EpochMoved` if another epoch has begun or a turn was accepted since `history` was loaded: a tool loop
        that has begun must keep its epoch.
        """
        if history.source.epoch is None:
            raise Internal("A conversation without an epoch cannot be rewritten.")
        conversation_id, static = history.source.conversation.id, rewrite.static
        epoch = replace(
            history.source.epoch,
            number=history.source.epoch.number + 1,
            reason=rewrite.reason,
            generation=rewrite.generation,
            segment_count=rewrite.segment_count,
            base_text=static.text[: static.base_length],
            static_hash=hashlib.sha256(static.text.encode("utf-8", "surrogatepass")).digest(),
            prefix_hash=rewrite.prefix_hash or hash_prefix(static.text, history.source.assistant.definition.tools),
            buffer_start_seq=rewrite.buffer_start_seq,
            signed_summary=rewrite.signed_summary,
        )
        await self._store.begin_epoch(
            tenant_id,
            conversation_id,
            epoch,
            segment=rewrite.segment,
            copies=rewrite.copies,
            seen_next_seq=history.source.conversation.next_seq,
        )
        self._texts.put(conversation_id, epoch.static_hash, static)
        return epoch

    def count_tokens(self, history: History, text: str) -> int:
        """Estimate the tokens of a text in the static layer."""
        return self._estimate.estimate(history.source.assistant.definition.model, len(text))
