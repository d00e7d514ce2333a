"""Openings: a signed block takes the place of the oldest turns, gives way again, or is set down as text.

The static text stays what it is, so an epoch with a signed summary differs from the one before it in its first message
alone. Segments are only written where a signed summary goes, and one that comes finds the end of its generation free:
so there is always room for the segment that takes its place.
"""

from collections.abc import Iterator
from dataclasses import replace

from server.compaction.epoch_writer import EpochWriter, Rewrite
from server.compaction.report import CompactionOutcome, CompactionReport
from server.compaction.signed import SignedSummariser
from server.conversation.epoch import Epoch, EpochReason, SignedSummary, inline_summary
from server.conversation.errors import CompactionNotFound, Internal
from server.conversation.store import CopiedSegments, History, Store
from server.payload.builder import hash_chain, hash_prefix
from server.payload.renderer import Renderer
from server.payload.shared_caches import StaticText
from server.payload.transcript import build_summary


class SignedSummaries:
    """Begins the epochs that change a signed summary. Every method raises `EpochMoved` where another one has begun."""

    def __init__(
        self, store: Store, renderer: Renderer, writer: EpochWriter, summariser: SignedSummariser | None
    ) -> None:
        self._store = store
        self._renderer = renderer
        self._writer = writer
        self._summariser = summariser

    async def sign(self, tenant_id: str, history: History, static: StaticText, last_seq: int) -> Epoch | None:
        """Turns up to `last_seq`, or as far as it can be, give way to a signed block, and so does the signed summary
        that there was. None where it cannot be. Raises `ProviderFailed`.
        """
        epoch = _epoch_of(history)
        if self._summariser is None:
            return None
        block = await self._summariser.sum_up(tenant_id, history, static.text, last_seq)
        if block is None:
            return None
        old, kept = epoch.signed_summary, len(history.segments)
        start_seq = epoch.buffer_start_seq if old is None else old.start_seq
        summary = build_summary(start_seq, block.last_seq, block.text)
        text = await self._renderer.render_segment(tenant_id, [summary])
        signed_summary = SignedSummary(
            data=block.message,
            start_seq=start_seq,
            text=text,
            token_count=self._writer.count_tokens(history, text),
            kept_prefix_hashes=(epoch.prefix_hash, *_still_needed(history, block.last_seq)),
        )
        rewrite = Rewrite(
            reason=EpochReason.SIGNED,
            static=static,
            generation=epoch.generation if history.is_open_ended else history.newest_generation + 1,
            segment_count=kept,
            buffer_start_seq=block.last_seq + 1,
            copies=None
            if history.is_open_ended
            else CopiedSegments(generation=epoch.generation, from_position=0, count=kept, to_position=0),
            signed_summary=signed_summary,
            prefix_hash=hash_chain(
                hash_prefix(static.text, history.source.assistant.definition.tools), epoch.number + 1
            ),
        )
        return await self._writer.begin(tenant_id, history, rewrite)

    async def undo(self, tenant_id: str, history: History, static: StaticText) -> CompactionReport:
        """The signed summary gives way to what it summed up: the one before it, if there was one, and turns."""
        epoch, conversation_id = _epoch_of(history), history.source.conversation.id
        gone = epoch.signed_summary
        before = None if gone is None else await self._store.find_epoch_before(tenant_id, conversation_id, gone.data)
        if gone is None or before is None:
            raise CompactionNotFound
        prefix_hash = hash_prefix(static.text, history.source.assistant.definition.tools)
        # Thinking from behind the block that goes has not seen the turns that come back, and must not be behind them.
        # What was made behind the block that comes back has.
        restored = (
            None
            if before.signed_summary is None
            else replace(
                before.signed_summary,
                kept_prefix_hashes=(before.prefix_hash, *before.signed_summary.kept_prefix_hashes),
            )
        )
        rewrite = Rewrite(
            reason=EpochReason.COMPACTION_UNDONE,
            static=static,
            generation=epoch.generation,
            segment_count=epoch.segment_count,
            buffer_start_seq=before.buffer_start_seq,
            signed_summary=restored,
            prefix_hash=None if restored is None else hash_chain(prefix_hash, epoch.number + 1),
        )
        begun = await self._writer.begin(tenant_id, history, rewrite)
        return CompactionReport(
            conversation_id=conversation_id,
            outcome=CompactionOutcome.UNDONE,
            reason="requested",
            epoch=begun.number,
            first_seq=before.buffer_start_seq,
            last_seq=epoch.buffer_start_seq - 1,
            segment_tokens=gone.token_count,
        )

    async def inline_summary(self, tenant_id: str, history: History, static: StaticText) -> None:
        """What the signed summary tells becomes a segment. Nothing happens where there is none."""
        segment = inline_summary(_epoch_of(history))
        if segment is None:
            return
        rewrite = Rewrite(
            reason=EpochReason.SUMMARY_INLINED,
            static=replace(static, text=static.text + segment.text),
            generation=segment.generation,
            segment_count=segment.position + 1,
            buffer_start_seq=segment.last_seq + 1,
            segment=segment,
        )
        await self._writer.begin(tenant_id, history, rewrite)


def _still_needed(history: History, last_seq: int) -> Iterator[bytes]:
    """Of the prefixes that the present signed summary keeps, those that turns after `last_seq` were made behind."""
    signed_summary = _epoch_of(history).signed_summary
    made_behind = {turn.prefix_hash for turn in history.source.buffered if turn.seq > last_seq}
    yield from (
        kept for kept in (() if signed_summary is None else signed_summary.kept_prefix_hashes) if kept in made_behind
    )


def _epoch_of(history: History) -> Epoch:
    if history.source.epoch is None:
        raise Internal("Before the first payload there is nothing to compact.")
    return history.source.epoch
