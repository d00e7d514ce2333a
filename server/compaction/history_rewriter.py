"""Rewriting the history of a conversation: a summary in place of its oldest segments, and undoing a compaction.

Both change the static text after the base text, so the provider's cache of it is lost. Therefore a summary is made only
when the window runs short, and an undo only on request.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from server.compaction.epoch_writer import EpochWriter, Rewrite
from server.compaction.report import CompactionOutcome, CompactionReport
from server.compaction.summary import Summariser, SummaryRequest
from server.conversation.epoch import Epoch, EpochReason, Segment
from server.conversation.errors import CompactionNotFound, EpochMoved, ProviderFailed, SummaryUnavailable
from server.conversation.store import CopiedSegments, History, Store
from server.payload.renderer import Renderer
from server.payload.shared_caches import StaticText
from server.payload.transcript import build_gap, build_summary
from server.providers.model_profile import find_profile

_TRIES: Final = 5
_SUMMARIES: Final = (EpochReason.SUMMARISED, EpochReason.OLDEST_LEFT_OUT)
_log = logging.getLogger("strata.compaction")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replacement:
    """What replaces the oldest segments."""

    generation: int
    count: int
    """How many segments of `generation` it replaces."""
    reason: EpochReason
    text: str

    def fits(self, history: History) -> bool:
        """Return whether the oldest segments are still those that it was made from."""
        return len(history.segments) >= self.count and history.segments[0].generation == self.generation


class HistoryRewriter:
    """Summarises the oldest segments, and undoes compactions."""

    def __init__(
        self, store: Store, renderer: Renderer, writer: EpochWriter, summariser: Summariser, *, full_share: float
    ) -> None:
        """`full_share` of the window: above it the next turn may fail, so a summary is no longer waited for."""
        self._store = store
        self._renderer = renderer
        self._writer = writer
        self._summariser = summariser
        self._full_share = full_share

    def can_summarise(self, segments: Sequence[Segment]) -> bool:
        """Return whether a summary would make the history shorter."""
        return self._summariser.choose(segments) > 0

    async def summarise(self, tenant_id: str, conversation_id: str, request_tokens: int) -> CompactionReport | None:
        """Replace the oldest segments by a summary, or leave them out if that fails and the window is full.

        None if nothing would be gained. The summary is requested once, even if other epochs begin meanwhile: it stays
        valid as long as the segments are those that it was made from. Raises `SummaryUnavailable`, `EpochMoved`.
        """
        replacement: _Replacement | None = None
        for _ in range(_TRIES):
            history = await self._store.load_history(tenant_id, conversation_id)
            if history.source.epoch is not None and history.source.epoch.signed_summary is not None:
                # A signed summary was written meanwhile. It must not be lost, so the caller starts again.
                raise EpochMoved
            if not self.can_summarise(history.segments):
                return None
            _, static = _load_static(history)
            if replacement is None or not replacement.fits(history):
                replacement = await self._build_replacement(tenant_id, history, static, request_tokens)
            try:
                return await self._replace_oldest(tenant_id, history, static, replacement, request_tokens)
            except EpochMoved:
                continue
        raise EpochMoved

    async def undo(self, tenant_id: str, history: History) -> CompactionReport:
        """See `Compactor.undo`. Raises `EpochMoved` without retrying."""
        epoch, static = _load_static(history)
        conversation_id, base = history.source.conversation.id, static.text[: static.base_length]
        last, kept = history.segments[-1], history.segments[:-1]
        generation, start = epoch.generation, last.first_seq
        summarised = history.segments[0].summarises
        if summarised is not None and (last.summarises or await self._is_newly_summarised(tenant_id, history, epoch)):
            generation, count = summarised[0], summarised[1] + len(history.segments) - 1
            kept = tuple(await self._store.load_segments(tenant_id, conversation_id, generation, count))
            last, start = history.segments[0], epoch.buffer_start_seq
        rewrite = Rewrite(
            reason=EpochReason.COMPACTION_UNDONE,
            static=_join(base, kept),
            generation=generation,
            segment_count=len(kept),
            buffer_start_seq=start,
        )
        begun = await self._writer.begin(tenant_id, history, rewrite)
        return CompactionReport(
            conversation_id=conversation_id,
            outcome=CompactionOutcome.UNDONE,
            reason="requested",
            epoch=begun.number,
            first_seq=last.first_seq,
            last_seq=last.last_seq,
            segment_tokens=last.token_count,
        )

    async def _build_replacement(
        self, tenant_id: str, history: History, static: StaticText, request_tokens: int
    ) -> _Replacement:
        count = self._summariser.choose(history.segments)
        oldest = history.segments[:count]
        first_seq, last_seq = oldest[0].first_seq, oldest[-1].last_seq
        request = SummaryRequest(history=history, static_text=static.text, count=count)
        try:
            summary = await self._summariser.summarise(tenant_id, request)
        except ProviderFailed as error:
            facts = {"conversation_id": history.source.conversation.id, "code": error.code}
            if not self._is_full(history, request_tokens):
                _log.warning("compaction.summary_postponed", extra=facts)
                why = f"The provider returned no summary. {error.message}"
                raise SummaryUnavailable(why, provider_code=error.code) from error
            _log.warning("compaction.oldest_left_out", extra={**facts, "first_seq": first_seq, "last_seq": last_seq})
            reason, turn = EpochReason.OLDEST_LEFT_OUT, build_gap(first_seq, last_seq)
        else:
            reason, turn = EpochReason.SUMMARISED, build_summary(first_seq, last_seq, summary)
        text = await self._renderer.render_segment(tenant_id, [turn])
        return _Replacement(generation=oldest[0].generation, count=count, reason=reason, text=text)

    async def _replace_oldest(
        self, tenant_id: str, history: History, static: StaticText, replacement: _Replacement, request_tokens: int
    ) -> CompactionReport:
        oldest, rest = history.segments[: replacement.count], history.segments[replacement.count :]
        segment = Segment(
            generation=history.newest_generation + 1,
            position=0,
            first_seq=oldest[0].first_seq,
            last_seq=oldest[-1].last_seq,
            text=replacement.text,
            token_count=self._writer.count_tokens(history, replacement.text),
            summarises=(replacement.generation, replacement.count),
        )
        copies = CopiedSegments(
            generation=replacement.generation, from_position=replacement.count, count=len(rest), to_position=1
        )
        rewrite = Rewrite(
            reason=replacement.reason,
            static=_join(static.text[: static.base_length], (segment, *rest)),
            generation=segment.generation,
            segment_count=1 + len(rest),
            buffer_start_seq=history.source.conversation.buffer_start_seq,
            segment=segment,
            copies=copies if rest else None,
        )
        begun = await self._writer.begin(tenant_id, history, rewrite)
        before = sum(old.token_count for old in oldest)
        left_out = replacement.reason is EpochReason.OLDEST_LEFT_OUT
        return CompactionReport(
            conversation_id=history.source.conversation.id,
            outcome=CompactionOutcome.OLDEST_LEFT_OUT if left_out else CompactionOutcome.SUMMARISED,
            reason="window",
            epoch=begun.number,
            first_seq=segment.first_seq,
            last_seq=segment.last_seq,
            moved_tokens=before,
            segment_tokens=segment.token_count,
            request_tokens=request_tokens - before + segment.token_count,
            is_window_short=True,
            is_blocked=left_out,
        )

    def _is_full(self, history: History, request_tokens: int) -> bool:
        definition = history.source.assistant.definition
        window = find_profile(definition.provider, definition.model).window_tokens
        return request_tokens >= self._full_share * window

    async def _is_newly_summarised(self, tenant_id: str, history: History, epoch: Epoch) -> bool:
        """Return whether the generation has no segments besides those it began with."""
        cursor = None
        while True:
            page = await self._store.list_epochs(tenant_id, history.source.conversation.id, cursor=cursor, limit=100)
            for outline in page.items:
                if outline.generation == epoch.generation and outline.reason in _SUMMARIES:
                    return outline.segment_count == epoch.segment_count
            cursor = page.next_cursor
            if cursor is None:
                return False


def _load_static(history: History) -> tuple[Epoch, StaticText]:
    epoch, text = history.source.epoch, history.source.static_text
    if epoch is None or text is None or not history.segments:
        raise CompactionNotFound
    return epoch, StaticText(text=text, base_length=len(epoch.base_text))


def _join(base: str, segments: Sequence[Segment]) -> StaticText:
    return StaticText(text="".join((base, *(segment.text for segment in segments))), base_length=len(base))
