"""The compactor: moves old exchanges from the buffer into the history of the static layer, and back.

Each step loads the conversation, decides, renders, and begins an epoch with one statement. The statement takes effect
only if no other epoch has begun and no turn was accepted since the conversation was loaded; otherwise the step is
repeated. So a second compactor, an erasure or a crash at any point leaves either the old epoch or the new one. All
requests of a tool loop belong to the epoch of its first request, because thinking and caches depend on it. Only when
the window runs short are turns moved while the newest exchange is still open.

Within a generation segments are only appended. If that is not possible (after an undo, or for a summary), a new
generation begins with copies of the segments that stay.

If the assistant asks for signed summaries and its model supports them, a block that the provider has signed replaces
the turns instead of a segment. The plan is the same.
"""

import logging
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

from server.compaction.epoch_writer import EpochWriter, Rewrite
from server.compaction.history_rewriter import HistoryRewriter
from server.compaction.plan import CompactionDecision, CompactionPlan, decide_compaction
from server.compaction.report import CompactionObserver, CompactionOutcome, CompactionReport
from server.compaction.signed_summary import SignedSummaries, SignedSummariser, uses_signed_summaries
from server.compaction.state import count_request, read_state
from server.compaction.summary import Summariser
from server.compaction.typical_lengths import KnownLengths
from server.conversation.conversation import ConversationState
from server.conversation.epoch import Epoch, EpochReason, Segment
from server.conversation.errors import ConversationBusy, EpochMoved, ProviderFailed, SummaryUnavailable
from server.conversation.store import CopiedSegments, History, Store
from server.payload.renderer import Renderer
from server.payload.shared_caches import StaticText, StaticTextCache
from server.payload.transcript import build_transcript
from server.providers.calls import REJECTIONS
from server.providers.token_estimate import TokenEstimate

NOT_BEGUN: Final = "not_begun"
"""The reason for no compaction before the first request of a conversation."""
UNDONE: Final = "undone"
"""The reason for no automatic compaction after a compaction was undone."""
_TRIES: Final = 5
_log = logging.getLogger("strata.compaction")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inspection:
    """A conversation as it was loaded, and the planner's decision."""

    history: History
    epoch: Epoch
    static: StaticText
    decision: CompactionDecision
    request_tokens: int
    signed_summary_tokens: int
    """The part of `request_tokens` that is the signed summary."""
    can_summarise: bool
    uses_signed: bool
    """Turns are replaced by a signed summary instead of a segment."""

    @property
    def conversation_id(self) -> str:
        return self.history.source.conversation.id


class Compactor:
    """Compacts conversations. Any number of compactors can work on one database."""

    def __init__(  # noqa: PLR0913  reason: its collaborators, all keyword-only and passed in two places
        self,
        *,
        store: Store,
        renderer: Renderer,
        summariser: Summariser,
        observer: CompactionObserver,
        texts: StaticTextCache,
        estimate: TokenEstimate,
        lengths: KnownLengths | None = None,
        signed_summariser: SignedSummariser | None = None,
        result_limit_chars: int = 0,
        full_share: float = 0.95,
    ) -> None:
        """Without `lengths`, decisions ignore how long conversations usually get. Without `signed_summariser`, turns
        always become segments, even if the assistant asks for signed summaries.

        `result_limit_chars`: longer tool results are truncated in the history; 0 means no limit. `full_share`: the
        share of the model's window above which a failed summary is not retried but the oldest history is left out.
        """
        self._store = store
        self._renderer = renderer
        self._observer = observer
        self._texts = texts
        self._estimate = estimate
        self._lengths = lengths
        self._can_sign = signed_summariser is not None
        self._result_limit_chars = result_limit_chars
        self._writer = EpochWriter(store, texts, estimate)
        self._rewriter = HistoryRewriter(store, renderer, self._writer, summariser, full_share=full_share)
        self._signed_summaries = SignedSummaries(store, renderer, self._writer, signed_summariser)

    async def compact(
        self, tenant_id: str, conversation_id: str, *, force: bool = False, dry_run: bool = False
    ) -> CompactionReport:
        """Do what the policy decides, or with `force` move all that need not stay. With `dry_run` only report it.

        Raises `ConversationNotFound`, `EpochMoved` if other writers interfere repeatedly, `TemplateInvalid`,
        `SummaryUnavailable`, and the errors of the store.
        """
        for _ in range(_TRIES):
            inspection = await self._inspect(tenant_id, conversation_id, force=force)
            if inspection is None:
                return CompactionReport(
                    conversation_id=conversation_id,
                    outcome=CompactionOutcome.UNCHANGED,
                    reason=NOT_BEGUN,
                    is_dry_run=dry_run,
                    epoch=0,
                )
            if dry_run:
                return _describe_plan(inspection)
            try:
                report = await self._carry_out(tenant_id, inspection)
            except EpochMoved:
                continue
            self._notify(report)
            return report
        raise EpochMoved

    async def undo(self, tenant_id: str, conversation_id: str) -> CompactionReport:
        """Undo the newest compaction: its turns return to the buffer, or its summary is replaced by what it summarised.

        Afterwards the conversation is not compacted automatically, unless the window runs short or the assistant
        changes. Raises `ConversationNotFound`, `CompactionNotFound`, `EpochMoved`, and `ConversationBusy` while a turn
        runs or waits for tool results, because its next request must belong to the same epoch.
        """
        for _ in range(_TRIES):
            history = await self._store.load_history(tenant_id, conversation_id)
            if history.source.conversation.state is not ConversationState.IDLE:
                raise ConversationBusy(
                    "A turn is running, or waits for tool results.",
                    hint="Undo the compaction when the model has answered.",
                )
            static = self._static_of(history)
            try:
                if (
                    static is not None
                    and history.source.epoch is not None
                    and history.source.epoch.signed_summary is not None
                ):
                    report = await self._signed_summaries.undo(tenant_id, history, static)
                else:
                    report = await self._rewriter.undo(tenant_id, history)
            except EpochMoved:
                continue
            self._observer.compaction_ended(report)
            return report
        raise EpochMoved

    async def _inspect(self, tenant_id: str, conversation_id: str, *, force: bool) -> _Inspection | None:
        """Load a conversation and decide. None before its first payload, because there is nothing to move."""
        cached = self._texts.hashes_for(conversation_id)
        history = await self._store.load_history(tenant_id, conversation_id, cached_static_hashes=cached)
        static = self._static_of(history)
        if static is None and history.source.epoch is not None:
            # The text was evicted from the cache meanwhile.
            history = await self._store.load_history(tenant_id, conversation_id)
            static = self._static_of(history)
        source, epoch = history.source, history.source.epoch
        if epoch is None or static is None:
            return None
        typical = None if self._lengths is None else await self._lengths.load(tenant_id, source.assistant.id)
        signed_summary_length = 0 if epoch.signed_summary is None else len(epoch.signed_summary.data)
        state = read_state(
            source,
            static_length=len(static.text) + signed_summary_length,
            estimate=self._estimate,
            typical_exchange_count=typical,
        )
        decision = decide_compaction(source, state, now=datetime.now(UTC), requested=force)
        if epoch.reason is EpochReason.COMPACTION_UNDONE and not (force or decision.window_short):
            decision = CompactionDecision()
        return _Inspection(
            history=history,
            epoch=epoch,
            static=static,
            decision=decision,
            request_tokens=count_request(state),
            signed_summary_tokens=self._estimate.estimate(source.assistant.definition.model, signed_summary_length),
            can_summarise=self._rewriter.can_summarise(history.segments),
            uses_signed=self._can_sign and uses_signed_summaries(source),
        )

    def _static_of(self, history: History) -> StaticText | None:
        epoch, text = history.source.epoch, history.source.static_text
        if epoch is None:
            return None
        if text is None:
            return self._texts.find(epoch.static_hash)
        return StaticText(text=text, base_length=len(epoch.base_text))

    async def _carry_out(self, tenant_id: str, inspection: _Inspection) -> CompactionReport:
        report = _describe_plan(inspection)
        if report.outcome is CompactionOutcome.UNCHANGED:
            return replace(report, is_dry_run=False)
        if inspection.decision.plan is not None:
            report = await self._move(tenant_id, inspection, inspection.decision.plan)
        elif inspection.decision.needs_summary and inspection.can_summarise:
            # The text before it is going to change, which invalidates it.
            await self._signed_summaries.inline_summary(tenant_id, inspection.history, inspection.static)
        if not inspection.decision.needs_summary or report.outcome is CompactionOutcome.SIGNED:
            # The next inspection shows how much room the signed summary has made.
            return report
        tokens = report.request_tokens or inspection.request_tokens
        summarised = await self._rewriter.summarise(tenant_id, inspection.conversation_id, tokens)
        return summarised or replace(report, is_blocked=True)

    async def _move(self, tenant_id: str, inspection: _Inspection, plan: CompactionPlan) -> CompactionReport:
        signed = await self._sign(tenant_id, inspection, plan) if inspection.uses_signed else None
        return signed or await self._move_to_segment(tenant_id, inspection, plan)

    async def _sign(self, tenant_id: str, inspection: _Inspection, plan: CompactionPlan) -> CompactionReport | None:
        """Replace the turns by a signed summary. None if none is available and waiting is no option. Raises
        `SummaryUnavailable`.
        """
        facts = {"conversation_id": inspection.conversation_id}
        try:
            begun = await self._signed_summaries.sign(tenant_id, inspection.history, inspection.static, plan.last_seq)
        except ProviderFailed as error:
            if not (inspection.decision.window_short or isinstance(error, REJECTIONS)):
                _log.warning("compaction.signed_postponed", extra={**facts, "code": error.code})
                why = f"The provider returned no signed summary. {error.message}"
                raise SummaryUnavailable(why, provider_code=error.code) from error
            _log.warning("compaction.signed_unavailable", extra={**facts, "code": error.code})
            return None
        if begun is None or begun.signed_summary is None:
            _log.warning("compaction.signed_unavailable", extra={**facts, "code": "no_place_to_cut"})
            return None
        before = inspection.request_tokens - inspection.signed_summary_tokens - plan.moved_tokens
        return replace(
            _describe_plan(inspection),
            outcome=CompactionOutcome.SIGNED,
            is_dry_run=False,
            epoch=begun.number,
            last_seq=begun.buffer_start_seq - 1,
            segment_tokens=begun.signed_summary.token_count,
            request_tokens=before + begun.signed_summary.token_count,
        )

    async def _move_to_segment(self, tenant_id: str, inspection: _Inspection, plan: CompactionPlan) -> CompactionReport:
        """Write the turns as a segment, after the text of a signed summary of the turns before them."""
        history, signed_summary = inspection.history, inspection.epoch.signed_summary
        turns = await self._store.load_turns(tenant_id, inspection.conversation_id, plan.first_seq, plan.last_seq)
        transcript = build_transcript(turns, result_limit_chars=self._result_limit_chars)
        rendered = await self._renderer.render_segment(tenant_id, transcript)
        text = rendered if signed_summary is None else signed_summary.text + rendered
        kept = len(history.segments)
        generation = inspection.epoch.generation if history.can_append_segment else history.newest_generation + 1
        segment = Segment(
            generation=generation,
            position=kept,
            first_seq=plan.first_seq if signed_summary is None else signed_summary.start_seq,
            last_seq=plan.last_seq,
            text=text,
            token_count=self._writer.count_tokens(history, text),
        )
        rewrite = Rewrite(
            reason=EpochReason.COMPACTED_UNSIGNED if inspection.uses_signed else EpochReason.COMPACTED,
            static=StaticText(text=inspection.static.text + text, base_length=inspection.static.base_length),
            generation=generation,
            segment_count=kept + 1,
            buffer_start_seq=plan.last_seq + 1,
            segment=segment,
            copies=None
            if history.can_append_segment
            else CopiedSegments(generation=inspection.epoch.generation, from_position=0, count=kept, to_position=0),
        )
        begun = await self._writer.begin(tenant_id, history, rewrite)
        return replace(
            _describe_plan(inspection),
            outcome=CompactionOutcome.COMPACTED,
            is_dry_run=False,
            epoch=begun.number,
            first_seq=segment.first_seq,
            segment_tokens=segment.token_count,
            request_tokens=inspection.request_tokens
            - inspection.signed_summary_tokens
            - plan.moved_tokens
            + segment.token_count,
            thinking_kept=plan.thinking_kept,
        )

    def _notify(self, report: CompactionReport) -> None:
        self._observer.compaction_ended(report)
        if report.is_blocked:
            self._observer.compaction_blocked(report.conversation_id, report.reason, report.request_tokens or 0)
        elif report.outcome is not CompactionOutcome.UNCHANGED:
            self._observer.compaction_unblocked(report.conversation_id)


def _describe_plan(inspection: _Inspection) -> CompactionReport:
    """Report what is going to be done, or why nothing is."""
    plan, decision = inspection.decision.plan, inspection.decision
    report = CompactionReport(
        conversation_id=inspection.conversation_id,
        outcome=CompactionOutcome.COMPACTED,
        reason=UNDONE if decision.skip_reason is None else decision.skip_reason.value,
        is_dry_run=True,
        epoch=inspection.epoch.number,
        request_tokens=inspection.request_tokens,
        is_window_short=decision.window_short,
    )
    if plan is not None and inspection.uses_signed:
        report = replace(report, outcome=CompactionOutcome.SIGNED)
    elif decision.needs_summary and inspection.can_summarise:
        report = replace(report, outcome=CompactionOutcome.SUMMARISED, reason="window")
    elif plan is None:
        return replace(
            report,
            outcome=CompactionOutcome.UNCHANGED,
            is_blocked=decision.window_short,
            recheck_at=decision.recheck_at,
        )
    if plan is None:
        return report
    return replace(
        report,
        reason=plan.reason.value,
        first_seq=plan.first_seq,
        last_seq=plan.last_seq,
        moved_tokens=plan.moved_tokens,
        segment_tokens=plan.segment_tokens,
        request_tokens=inspection.request_tokens - plan.moved_tokens + plan.segment_tokens,
        saved_tokens_per_call=plan.saved_tokens_per_call,
        saved_usd_per_call=plan.saved_usd_per_call,
        thinking_kept=plan.thinking_kept or inspection.uses_signed,
    )
