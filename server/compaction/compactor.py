"""The compactor: moves old exchanges out of the buffer into the history of the static layer, and back.

Each step is: look, decide, render, and one statement that begins an epoch. The statement takes effect only if no other
epoch has begun and no turn was accepted since the look; otherwise the compactor looks again. So a second compactor, an
erasure or a crash at any point leave either the old epoch or the new one, whole, and all requests of a tool loop belong
to the epoch of its first one: thinking and cache depend on that. Only if the window runs short, turns are moved while
the newest exchange is still open.

Within a generation segments are only added. Where that is not possible (after an undo, for a summary) a new generation
begins, with copies of the segments that stay.

Where the assistant wants it and its model gives one, a block that the provider has signed takes the place of a segment:
the same plan, carried out in another way.
"""

import logging
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

from server.compaction.epoch_writer import EpochWriter, Rewrite
from server.compaction.history_rewriter import HistoryRewriter
from server.compaction.plan import CompactionDecision, CompactionPlan, decide_compaction
from server.compaction.report import CompactionObserver, CompactionOutcome, CompactionReport
from server.compaction.signed_summary import SignedSummaries, SignedSummariser, wants_signed
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
"""Why nothing is moved where no request was ever sent."""
UNDONE: Final = "undone"
"""Why nothing is moved in a conversation whose compaction somebody has undone: not until somebody asks for it."""
_TRIES: Final = 5
_log = logging.getLogger("strata.compaction")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactorTools:
    """What compacting takes, gathered once for a process."""

    store: Store
    renderer: Renderer
    summariser: Summariser
    observer: CompactionObserver
    texts: StaticTextCache
    """The static texts that the process holds anyway."""
    estimate: TokenEstimate
    lengths: KnownLengths | None = None
    """None where nobody knows how long conversations get."""
    result_limit_chars: int = 0
    """Longer tool results lose their end in the history; 0 keeps them whole."""
    full_share: float = 0.95
    """Of the window: a summary that is needed beyond it and cannot be had is given up, and the oldest history too."""
    signed_summariser: SignedSummariser | None = None
    """None where nobody asks for signed blocks: segments are written then, whatever the assistant wants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """A conversation as it was found, and what the planner says about it."""

    history: History
    epoch: Epoch
    static: StaticText
    decision: CompactionDecision
    request_tokens: int
    signed_summary_tokens: int
    """Of these, those of the signed summary."""
    can_sum_up: bool
    signs: bool
    """Turns are to give way to a signed block, and not to a segment."""

    @property
    def conversation_id(self) -> str:
        return self.history.source.conversation.id


class Compactor:
    """Compacts conversations. Any number of them may work on one database."""

    def __init__(self, tools: CompactorTools) -> None:
        self._tools = tools
        self._writer = EpochWriter(tools.store, tools.texts, tools.estimate)
        self._rewriter = HistoryRewriter(
            tools.store, tools.renderer, self._writer, tools.summariser, full_share=tools.full_share
        )
        self._signed_summaries = SignedSummaries(tools.store, tools.renderer, self._writer, tools.signed_summariser)

    async def compact(
        self, tenant_id: str, conversation_id: str, *, force: bool = False, dry_run: bool = False
    ) -> CompactionReport:
        """Does what the policy says, or with `force` moves all that need not stay. With `dry_run` only tells.

        Raises `ConversationNotFound`, `EpochMoved` where it is overtaken again and again, `TemplateInvalid`,
        `SummaryUnavailable`, and what the store raises.
        """
        for _ in range(_TRIES):
            look = await self._look(tenant_id, conversation_id, force=force)
            if look is None:
                return CompactionReport(
                    conversation_id=conversation_id,
                    outcome=CompactionOutcome.UNCHANGED,
                    reason=NOT_BEGUN,
                    is_dry_run=dry_run,
                    epoch=0,
                )
            if dry_run:
                return _foresee(look)
            try:
                report = await self._act(tenant_id, look)
            except EpochMoved:
                continue
            self._tell(report)
            return report
        raise EpochMoved

    async def undo(self, tenant_id: str, conversation_id: str) -> CompactionReport:
        """Takes the newest compaction back: its turns are in the buffer again, or its summary gives way to what it sums
        up. Nothing is compacted by itself from then on, unless the window runs short or the assistant changes.

        Raises `ConversationNotFound`, `CompactionNotFound`, `EpochMoved`, and `ConversationBusy` while a turn runs or
        waits for tool results: its next request must belong to the same epoch.
        """
        for _ in range(_TRIES):
            history = await self._tools.store.load_history(tenant_id, conversation_id)
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
            self._tools.observer.compaction_ended(report)
            return report
        raise EpochMoved

    async def _look(self, tenant_id: str, conversation_id: str, *, force: bool) -> _Look | None:
        """None before the first payload: then there is nothing to move."""
        tools = self._tools
        held = tools.texts.hashes_for(conversation_id)
        history = await tools.store.load_history(tenant_id, conversation_id, cached_static_hashes=held)
        static = self._static_of(history)
        if static is None and history.source.epoch is not None:
            # It was let go since.
            history = await tools.store.load_history(tenant_id, conversation_id)
            static = self._static_of(history)
        source, epoch = history.source, history.source.epoch
        if epoch is None or static is None:
            return None
        typical = None if tools.lengths is None else await tools.lengths.load(tenant_id, source.assistant.id)
        signed_summary_length = 0 if epoch.signed_summary is None else len(epoch.signed_summary.data)
        state = read_state(
            source,
            static_length=len(static.text) + signed_summary_length,
            estimate=tools.estimate,
            typical_exchange_count=typical,
        )
        decision = decide_compaction(source, state, now=datetime.now(UTC), requested=force)
        if epoch.reason is EpochReason.COMPACTION_UNDONE and not (force or decision.window_short):
            decision = CompactionDecision()
        return _Look(
            history=history,
            epoch=epoch,
            static=static,
            decision=decision,
            request_tokens=count_request(state),
            signed_summary_tokens=tools.estimate.estimate(source.assistant.definition.model, signed_summary_length),
            can_sum_up=self._rewriter.can_sum_up(history.segments),
            signs=tools.signed_summariser is not None and wants_signed(source),
        )

    def _static_of(self, history: History) -> StaticText | None:
        epoch, text = history.source.epoch, history.source.static_text
        if epoch is None:
            return None
        if text is None:
            return self._tools.texts.find(epoch.static_hash)
        return StaticText(text=text, base_length=len(epoch.base_text))

    async def _act(self, tenant_id: str, look: _Look) -> CompactionReport:
        report = _foresee(look)
        if report.outcome is CompactionOutcome.UNCHANGED:
            return replace(report, is_dry_run=False)
        if look.decision.plan is not None:
            report = await self._move(tenant_id, look, look.decision.plan)
        elif look.decision.needs_summary and look.can_sum_up:
            # The text before it is going to change, so it would be worth nothing.
            await self._signed_summaries.inline_summary(tenant_id, look.history, look.static)
        if not look.decision.needs_summary or report.outcome is CompactionOutcome.SIGNED:
            # How much room a signed block has made is seen with the next look.
            return report
        tokens = report.request_tokens or look.request_tokens
        summed_up = await self._rewriter.sum_up(tenant_id, look.conversation_id, tokens)
        return summed_up or replace(report, is_blocked=True)

    async def _move(self, tenant_id: str, look: _Look, plan: CompactionPlan) -> CompactionReport:
        signed = await self._sign(tenant_id, look, plan) if look.signs else None
        return signed or await self._tell_moved(tenant_id, look, plan)

    async def _sign(self, tenant_id: str, look: _Look, plan: CompactionPlan) -> CompactionReport | None:
        """None where no signed block is to be had and none can be waited for. Raises `SummaryUnavailable`."""
        facts = {"conversation_id": look.conversation_id}
        try:
            begun = await self._signed_summaries.sign(tenant_id, look.history, look.static, plan.last_seq)
        except ProviderFailed as error:
            if not (look.decision.window_short or isinstance(error, REJECTIONS)):
                _log.warning("compaction.signed_postponed", extra={**facts, "code": error.code})
                why = f"No summary was to be had. {error.message}"
                raise SummaryUnavailable(why, provider_code=error.code) from error
            _log.warning("compaction.signed_unavailable", extra={**facts, "code": error.code})
            return None
        if begun is None or begun.signed_summary is None:
            _log.warning("compaction.signed_unavailable", extra={**facts, "code": "no_place_to_cut"})
            return None
        before = look.request_tokens - look.signed_summary_tokens - plan.moved_tokens
        return replace(
            _foresee(look),
            outcome=CompactionOutcome.SIGNED,
            is_dry_run=False,
            epoch=begun.number,
            last_seq=begun.buffer_start_seq - 1,
            segment_tokens=begun.signed_summary.token_count,
            request_tokens=before + begun.signed_summary.token_count,
        )

    async def _tell_moved(self, tenant_id: str, look: _Look, plan: CompactionPlan) -> CompactionReport:
        """The turns become a segment, behind what a signed summary has told of those before them."""
        tools, history, signed_summary = self._tools, look.history, look.epoch.signed_summary
        turns = await tools.store.load_turns(tenant_id, look.conversation_id, plan.first_seq, plan.last_seq)
        transcript = build_transcript(turns, result_limit_chars=tools.result_limit_chars)
        told = await tools.renderer.render_segment(tenant_id, transcript)
        text = told if signed_summary is None else signed_summary.text + told
        kept = len(history.segments)
        generation = look.epoch.generation if history.can_append_segment else history.newest_generation + 1
        segment = Segment(
            generation=generation,
            position=kept,
            first_seq=plan.first_seq if signed_summary is None else signed_summary.start_seq,
            last_seq=plan.last_seq,
            text=text,
            token_count=self._writer.count_tokens(history, text),
        )
        rewrite = Rewrite(
            reason=EpochReason.COMPACTED_UNSIGNED if look.signs else EpochReason.COMPACTED,
            static=StaticText(text=look.static.text + text, base_length=look.static.base_length),
            generation=generation,
            segment_count=kept + 1,
            buffer_start_seq=plan.last_seq + 1,
            segment=segment,
            copies=None
            if history.can_append_segment
            else CopiedSegments(generation=look.epoch.generation, from_position=0, count=kept, to_position=0),
        )
        begun = await self._writer.begin(tenant_id, history, rewrite)
        return replace(
            _foresee(look),
            outcome=CompactionOutcome.COMPACTED,
            is_dry_run=False,
            epoch=begun.number,
            first_seq=segment.first_seq,
            segment_tokens=segment.token_count,
            request_tokens=look.request_tokens - look.signed_summary_tokens - plan.moved_tokens + segment.token_count,
            thinking_kept=plan.thinking_kept,
        )

    def _tell(self, report: CompactionReport) -> None:
        observer = self._tools.observer
        observer.compaction_ended(report)
        if report.is_blocked:
            observer.compaction_blocked(report.conversation_id, report.reason, report.request_tokens or 0)
        elif report.outcome is not CompactionOutcome.UNCHANGED:
            observer.compaction_unblocked(report.conversation_id)


def _foresee(look: _Look) -> CompactionReport:
    """What is going to be done, or why nothing is."""
    plan, decision = look.decision.plan, look.decision
    report = CompactionReport(
        conversation_id=look.conversation_id,
        outcome=CompactionOutcome.COMPACTED,
        reason=UNDONE if decision.skip_reason is None else decision.skip_reason.value,
        is_dry_run=True,
        epoch=look.epoch.number,
        request_tokens=look.request_tokens,
        is_window_short=decision.window_short,
    )
    if plan is not None and look.signs:
        report = replace(report, outcome=CompactionOutcome.SIGNED)
    elif decision.needs_summary and look.can_sum_up:
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
        request_tokens=look.request_tokens - plan.moved_tokens + plan.segment_tokens,
        saved_tokens_per_call=plan.saved_tokens_per_call,
        saved_usd_per_call=plan.saved_usd_per_call,
        thinking_kept=plan.thinking_kept or look.signs,
    )
