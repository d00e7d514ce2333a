"""Conversations and timelines as JSON, for operators."""

from datetime import datetime
from typing import Any, Final, Self

from pydantic import Field

from server.conversation.block import JsonValue
from server.conversation.conversation import ConversationFacts, ConversationState
from server.conversation.epoch import EpochReason
from server.conversation.payload import LayerOrder
from server.inspection.conversation_list import InspectedConversation, InspectionPage
from server.inspection.timeline import CallOutline, EpochMark, RunningTurn, Timeline, TimelineTurn
from server.web.api.block_views import View
from server.web.api.compactions import CompactionView
from server.web.api.views import (
    ASSISTANT_ID,
    CONVERSATION_ID,
    EXAMPLE_TIME,
    ConversationView,
    TurnView,
    UsageView,
    view_turn,
)

TENANT_ID: Final = "tenant_01jd0z8s3bf6h9kq2m4n6p8r0t"
_MODEL: Final = "gemini-3.1-pro-preview"


class FactsView(View):
    """Totals of a conversation, as far as they are counted."""

    last_indexed_seq: int = Field(description="Seq of the newest counted turn.", examples=[4])
    turns: int = Field(examples=[4])
    calls: int = Field(description="Every attempt counts. Calls that a fork copied do not.", examples=[2])
    models: list[str] = Field(examples=[[_MODEL]])
    providers: list[str] = Field(examples=[["gemini"]])
    states: list[str] = Field(description="States of its answers.", examples=[["complete"]])
    stop_reasons: list[str] = Field(examples=[["tool_use", "end_turn"]])
    error_codes: list[str] = Field(examples=[[]])
    tool_names: list[str] = Field(examples=[["get_weather"]])
    has_repairs: bool = Field(examples=[False])
    has_missing_signature: bool = Field(examples=[False])
    has_withheld_signature: bool = Field(examples=[False])
    has_prefix_break: bool = Field(examples=[False])
    was_recovered: bool = Field(
        description="Whether a turn was ended by another process than the one that ran it.", examples=[False]
    )
    usage: UsageView
    cost_usd: float = Field(description="Cost of the calls whose price is known.", examples=[0.0042])
    unpriced_calls: int = Field(description="Calls without a known price.", examples=[0])
    slowest_call_ms: int | None = Field(examples=[1830])
    last_activity_at: datetime = Field(examples=[EXAMPLE_TIME])
    excerpt: str = Field(description="The start of the first user task.", examples=["What is the weather in Oslo?"])

    @classmethod
    def of(cls, facts: ConversationFacts) -> Self:
        return cls(
            last_indexed_seq=facts.last_indexed_seq,
            turns=facts.turn_count,
            calls=facts.call_count,
            models=list(facts.models),
            providers=list(facts.providers),
            states=list(facts.states),
            stop_reasons=list(facts.stop_reasons),
            error_codes=list(facts.error_codes),
            tool_names=list(facts.tool_names),
            has_repairs=facts.has_repairs,
            has_missing_signature=facts.has_missing_signature,
            has_withheld_signature=facts.has_withheld_signature,
            has_prefix_break=facts.has_prefix_break,
            was_recovered=facts.was_recovered,
            usage=UsageView.of(facts.usage),
            cost_usd=float(facts.cost_usd),
            unpriced_calls=facts.unpriced_count,
            slowest_call_ms=facts.slowest_call_ms,
            last_activity_at=facts.last_activity_at,
            excerpt=facts.excerpt,
        )


class InspectedConversationView(View):
    """A conversation in the list."""

    id: str = Field(examples=[CONVERSATION_ID])
    tenant_id: str = Field(examples=[TENANT_ID])
    tenant_name: str = Field(examples=["acme"])
    assistant_id: str = Field(examples=[ASSISTANT_ID])
    assistant_name: str = Field(description="The current name.", examples=["helper"])
    identifier: str | None = Field(examples=["ticket-4711"])
    state: ConversationState = Field(examples=["idle"])
    created_at: datetime = Field(examples=[EXAMPLE_TIME])
    facts: FactsView
    counted: bool = Field(description="Whether `facts` include the newest turn.", examples=[True])

    @classmethod
    def of(cls, found: InspectedConversation) -> Self:
        return cls(
            id=found.id,
            tenant_id=found.tenant_id,
            tenant_name=found.tenant_name,
            assistant_id=found.assistant_id,
            assistant_name=found.assistant_name,
            identifier=found.identifier,
            state=found.state,
            created_at=found.created_at,
            facts=FactsView.of(found.facts),
            counted=found.is_counted,
        )


class InspectionPageView(View):
    """A page of conversations, latest activity first."""

    data: list[InspectedConversationView]
    next_cursor: str | None = Field(description="Null on the last page.", examples=[None])
    estimated_count: int = Field(description="Number of all matching conversations.", examples=[1200])
    count_exact: bool = Field(description="Whether `estimated_count` is exact.", examples=[False])
    searched_until: datetime | None = Field(
        description="Set if the search stopped early: how far back it went. The cursor continues it.",
        examples=[None],
    )

    @classmethod
    def of(cls, page: InspectionPage) -> Self:
        return cls(
            data=[InspectedConversationView.of(item) for item in page.items],
            next_cursor=page.next_cursor,
            estimated_count=page.estimated_count,
            count_exact=page.is_count_exact,
            searched_until=page.searched_until,
        )


class CallOutlineView(View):
    """A call without its large members."""

    turn_seq: int = Field(description="Negative for a call that belongs to no turn.", examples=[2])
    attempt: int = Field(examples=[1])
    provider: str = Field(examples=["gemini"])
    model: str = Field(examples=[_MODEL])
    epoch: int = Field(examples=[1])
    layer_order: LayerOrder = Field(examples=["layered"])
    dynamic: str = Field(description="The dynamic layer as sent.", examples=['{"todos":["pack"]}'])
    started_at: datetime = Field(examples=[EXAMPLE_TIME])
    first_byte_at: datetime | None = Field(examples=[EXAMPLE_TIME])
    ended_at: datetime | None = Field(description="Null while the call is running.", examples=[EXAMPLE_TIME])
    status: int | None = Field(description="HTTP status; null without a response.", examples=[200])
    error_code: str | None = Field(examples=[None])
    usage: UsageView | None
    cost_usd: float | None = Field(description="Null if the price is not known.", examples=[0.0021])
    cache_expected_tokens: int | None = Field(examples=[4096])
    cache_miss_reason: str | None = Field(examples=[None])
    raw_bytes: int | None = Field(description="Length of the raw response.", examples=[2210])
    repairs: int = Field(examples=[0])
    template_failures: int = Field(examples=[0])
    warnings: list[str] = Field(description="Kinds of the warnings.", examples=[[]])

    @classmethod
    def of(cls, call: CallOutline) -> Self:
        return cls(
            turn_seq=call.turn_seq,
            attempt=call.attempt,
            provider=call.provider,
            model=call.model,
            epoch=call.epoch,
            layer_order=call.layer_order,
            dynamic=call.dynamic,
            started_at=call.started_at,
            first_byte_at=call.first_byte_at,
            ended_at=call.ended_at,
            status=call.status,
            error_code=call.error_code,
            usage=None if call.usage is None else UsageView.of(call.usage),
            cost_usd=None if call.cost_usd is None else float(call.cost_usd),
            cache_expected_tokens=call.cache_expected_tokens,
            cache_miss_reason=call.cache_miss_reason,
            raw_bytes=call.raw_length,
            repairs=call.repair_count,
            template_failures=call.template_failure_count,
            warnings=list(call.warning_kinds),
        )


class EpochMarkView(View):
    """An epoch of the calls."""

    epoch: int = Field(examples=[1])
    reason: EpochReason = Field(description="Why the epoch began.", examples=["started"])
    assistant_version: int = Field(examples=[1])
    buffer_start_seq: int = Field(description="The first turn that was sent as a message.", examples=[1])
    created_at: datetime = Field(examples=[EXAMPLE_TIME])
    args: dict[str, JsonValue] | None = Field(
        description="The conversation's args that the static text was rendered with; null if they were not stored.",
        examples=[{"tone": "formal"}],
    )

    @classmethod
    def of(cls, mark: EpochMark) -> Self:
        return cls(
            epoch=mark.number,
            reason=mark.reason,
            assistant_version=mark.assistant_version,
            buffer_start_seq=mark.buffer_start_seq,
            created_at=mark.created_at,
            args=None if mark.args is None else dict(mark.args),
        )


class TimelineTurnView(View):
    """A turn with its args, its context and its calls."""

    turn: TurnView
    language: str | None = Field(description="The language of a user task.", examples=["en"])
    args: dict[str, Any] | None = Field(description="Prompt arguments of this turn.", examples=[None])
    context: Any = Field(
        description="For an answer: the dynamic layer of its newest call, as text if it is not JSON.",
        examples=[{"todos": ["pack"]}],
    )
    context_changed: bool = Field(
        description="Whether it differs from the context of the previous call, apart from the time.", examples=[True]
    )
    calls: list[CallOutlineView]

    @classmethod
    def of(cls, item: TimelineTurn) -> Self:
        return cls(
            turn=view_turn(item.turn),
            language=getattr(item.turn, "language", None),
            args=None if item.args is None else dict(item.args),
            context=item.context,
            context_changed=item.is_context_changed,
            calls=[CallOutlineView.of(call) for call in item.calls],
        )


class RunningView(View):
    """The turn that is running."""

    seq: int = Field(examples=[6])
    owner: str = Field(description="The process that runs it.", examples=["host:4711:ab12cd34"])
    lease_expires_at: datetime = Field(examples=[EXAMPLE_TIME])
    cancel_requested_at: datetime | None = Field(examples=[None])
    calls: list[CallOutlineView]

    @classmethod
    def of(cls, running: RunningTurn) -> Self:
        return cls(
            seq=running.seq,
            owner=running.owner,
            lease_expires_at=running.lease_expires_at,
            cancel_requested_at=running.cancel_requested_at,
            calls=[CallOutlineView.of(call) for call in running.calls],
        )


class TimelineView(View):
    """Consecutive turns of a conversation."""

    tenant_id: str = Field(examples=[TENANT_ID])
    tenant_name: str = Field(examples=["acme"])
    conversation: ConversationView
    assistant_name: str = Field(examples=["helper"])
    epoch: int = Field(description="The current epoch.", examples=[1])
    buffer_start_seq: int = Field(description="The first turn that is sent as a message.", examples=[1])
    facts: FactsView | None
    turns: list[TimelineTurnView]
    earlier_seq: int | None = Field(description="The turn before these; null at the start.", examples=[None])
    later_seq: int | None = Field(description="The turn after these; null at the end.", examples=[None])
    running: RunningView | None
    compactions: list[CompactionView] = Field(description="Compactions, newest first.")
    background_calls: list[CallOutlineView] = Field(
        description="Calls that belong to no turn, such as summaries, newest first."
    )
    last_seq: int = Field(description="Seq of the newest turn; 0 before the first.", examples=[4])
    call_epochs: list[EpochMarkView] = Field(description="The epochs of these calls.")

    @classmethod
    def of(cls, timeline: Timeline) -> Self:
        conversation = timeline.conversation
        return cls(
            tenant_id=timeline.tenant_id,
            tenant_name=timeline.tenant_name,
            conversation=ConversationView.showing(conversation),
            assistant_name=timeline.assistant_name,
            epoch=conversation.epoch,
            buffer_start_seq=conversation.buffer_start_seq,
            facts=None if timeline.facts is None else FactsView.of(timeline.facts),
            turns=[TimelineTurnView.of(item) for item in timeline.turns],
            earlier_seq=timeline.earlier_seq,
            later_seq=timeline.later_seq,
            running=None if timeline.running is None else RunningView.of(timeline.running),
            compactions=[CompactionView.of(outline) for outline in timeline.epochs],
            background_calls=[CallOutlineView.of(call) for call in timeline.background_calls],
            last_seq=timeline.last_seq,
            call_epochs=[EpochMarkView.of(mark) for _, mark in sorted(timeline.call_epochs.items())],
        )
