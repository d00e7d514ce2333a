"""Conversations and timelines as JSON, for operators."""

from datetime import datetime
from typing import Any, Final, Self

from pydantic import Field

from server.conversation.block import JsonValue
from server.conversation.conversation import ConversationState
from server.conversation.epoch import EpochReason
from server.conversation.payload import LayerOrder
from server.inspection.timeline import Timeline, TimelineTurn
from server.web.api.views import (
    ASSISTANT_ID,
    CONVERSATION_ID,
    EXAMPLE_TIME,
    CompactionView,
    ConversationView,
    TurnView,
    UsageView,
    View,
    view_turn,
)

TENANT_ID: Final = "tenant_01jd0z8s3bf6h9kq2m4n6p8r0t"
_MODEL: Final = "gemini-3.1-pro-preview"


class FactsView(View):
    """Totals of a conversation, as far as they are counted."""

    last_indexed_seq: int = Field(description="Seq of the newest counted turn.", examples=[4])
    turns: int = Field(validation_alias="turn_count", examples=[4])
    calls: int = Field(
        validation_alias="call_count",
        description="Every attempt counts. Calls that a fork copied do not.",
        examples=[2],
    )
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
    unpriced_calls: int = Field(
        validation_alias="unpriced_count", description="Calls without a known price.", examples=[0]
    )
    slowest_call_ms: int | None = Field(examples=[1830])
    last_activity_at: datetime = Field(examples=[EXAMPLE_TIME])
    excerpt: str = Field(description="The start of the first user task.", examples=["What is the weather in Oslo?"])


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
    counted: bool = Field(
        validation_alias="is_counted", description="Whether `facts` include the newest turn.", examples=[True]
    )


class InspectionPageView(View):
    """A page of conversations, latest activity first."""

    data: list[InspectedConversationView] = Field(validation_alias="items")
    next_cursor: str | None = Field(description="Null on the last page.", examples=[None])
    estimated_count: int = Field(description="Number of all matching conversations.", examples=[1200])
    count_exact: bool = Field(
        validation_alias="is_count_exact", description="Whether `estimated_count` is exact.", examples=[False]
    )
    searched_until: datetime | None = Field(
        description="Set if the search stopped early: how far back it went. The cursor continues it.",
        examples=[None],
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
    raw_bytes: int | None = Field(
        validation_alias="raw_length", description="Length of the raw response.", examples=[2210]
    )
    repairs: int = Field(validation_alias="repair_count", examples=[0])
    template_failures: int = Field(validation_alias="template_failure_count", examples=[0])
    warnings: list[str] = Field(validation_alias="warning_kinds", description="Kinds of the warnings.", examples=[[]])


class EpochMarkView(View):
    """An epoch of the calls."""

    epoch: int = Field(validation_alias="number", examples=[1])
    reason: EpochReason = Field(description="Why the epoch began.", examples=["started"])
    assistant_version: int = Field(examples=[1])
    buffer_start_seq: int = Field(description="The first turn that was sent as a message.", examples=[1])
    created_at: datetime = Field(examples=[EXAMPLE_TIME])
    args: dict[str, JsonValue] | None = Field(
        description="The conversation's args that the static text was rendered with; null if they were not stored.",
        examples=[{"tone": "formal"}],
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
            conversation=ConversationView.of(conversation),
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
