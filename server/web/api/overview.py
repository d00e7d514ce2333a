"""The overview: tokens, cost, cache share, errors and latency over time, and alarms."""

from datetime import UTC, datetime, timedelta
from typing import Annotated, Self

from litestar import Response, get
from litestar.di import NamedDependency
from litestar.params import FromQuery, QueryParameter, SkipValidation
from pydantic import Field

from server.conversation.api_key import ApiKey
from server.conversation.errors import DatabaseUnavailable, KeyRejected, ScopeMissing, ValidationFailed
from server.inspection.overview import (
    CELL_KEY_LIMIT,
    DEFAULT_PERIOD,
    MAX_PERIOD,
    Alarm,
    ErrorCount,
    Overview,
    OverviewBy,
    OverviewCell,
    OverviewStep,
    StuckCompaction,
    TopConversation,
)
from server.inspection.port import Inspector
from server.web.api.block_views import View
from server.web.api.inspection import choose_tenant
from server.web.api.inspection_views import InspectedConversationView
from server.web.api.views import CONVERSATION_ID, EXAMPLE_TIME, UsageView
from server.web.auth import admin_only
from server.web.errors import document_errors
from server.web.json_text import answer_json
from server.web.validation import in_utc, refuse


class OverviewCellView(View):
    """The calls of one step, one key, both, or all."""

    at: datetime | None = Field(description="Start of the step; null for the whole period.", examples=[EXAMPLE_TIME])
    key: str | None = Field(description="Null for all.", examples=["gemini-3.1-pro-preview"])
    name: str | None = Field(description="The current name of an assistant.", examples=[None])
    calls: int = Field(examples=[12])
    errors: int = Field(description="Failed attempts.", examples=[1])
    usage: UsageView
    cache_share: float | None = Field(examples=[0.93])
    cost_usd: float = Field(description="Cost of the calls whose price is known.", examples=[0.0123])
    unpriced_calls: int = Field(examples=[0])
    median_seconds: float | None = Field(examples=[1.8])
    p95_seconds: float | None = Field(examples=[6.2])
    first_byte_seconds: float | None = Field(description="Median time to the first byte.", examples=[0.6])

    @classmethod
    def of(cls, cell: OverviewCell) -> Self:
        return cls(
            at=cell.at,
            key=cell.key,
            name=cell.name,
            calls=cell.call_count,
            errors=cell.error_count,
            usage=UsageView.of(cell.usage),
            cache_share=cell.cache_share,
            cost_usd=float(cell.cost_usd),
            unpriced_calls=cell.unpriced_count,
            median_seconds=cell.median_seconds,
            p95_seconds=cell.slow_seconds,
            first_byte_seconds=cell.first_byte_seconds,
        )


class TopConversationView(View):
    """One of the most expensive or slowest conversations."""

    id: str = Field(examples=[CONVERSATION_ID])
    assistant_name: str = Field(examples=["helper"])
    calls: int = Field(examples=[40])
    cost_usd: float = Field(examples=[1.25])
    slowest_seconds: float | None = Field(examples=[31.5])

    @classmethod
    def of(cls, top: TopConversation) -> Self:
        return cls(
            id=top.id,
            assistant_name=top.assistant_name,
            calls=top.call_count,
            cost_usd=float(top.cost_usd),
            slowest_seconds=top.slowest_seconds,
        )


class StuckCompactionView(View):
    """A conversation that needs a compaction which is not possible."""

    conversation_id: str = Field(examples=[CONVERSATION_ID])
    reason: str = Field(examples=["blocked_by_open_call"])
    request_tokens: int = Field(examples=[210000])
    began_at: datetime = Field(examples=[EXAMPLE_TIME])

    @classmethod
    def of(cls, stuck: StuckCompaction) -> Self:
        return cls(
            conversation_id=stuck.conversation_id,
            reason=stuck.reason,
            request_tokens=stuck.request_tokens,
            began_at=stuck.began_at,
        )


class ErrorCountView(View):
    """Failed calls by error code."""

    code: str = Field(examples=["provider_overloaded"])
    calls: int = Field(examples=[3])
    last_at: datetime = Field(description="Start of the newest call.", examples=[EXAMPLE_TIME])

    @classmethod
    def of(cls, error: ErrorCount) -> Self:
        return cls(code=error.code, calls=error.call_count, last_at=error.last_at)


class AlarmView(View):
    """Conversations with one kind of problem."""

    kind: str = Field(description="The name of the filter that finds all of them.", examples=["has_prefix_break"])
    estimated_count: int = Field(examples=[0])
    data: list[InspectedConversationView] = Field(description="The newest ones.")

    @classmethod
    def of(cls, alarm: Alarm) -> Self:
        return cls(
            kind=alarm.kind,
            estimated_count=alarm.estimated_count,
            data=[InspectedConversationView.of(item) for item in alarm.conversations],
        )


class OverviewView(View):
    """The overview of a period."""

    by: OverviewBy = Field(examples=["model"])
    since: datetime = Field(examples=[EXAMPLE_TIME])
    until: datetime = Field(examples=[EXAMPLE_TIME])
    step: OverviewStep = Field(description="Length of a step, in UTC.", examples=["day"])
    total: OverviewCellView
    by_step: list[OverviewCellView]
    by_key: list[OverviewCellView] = Field(description="Most tokens first.")
    cells: list[OverviewCellView] = Field(
        description=f"By step and key, in order of time; the first {CELL_KEY_LIMIT} keys only."
    )
    errors: list[ErrorCountView] = Field(description="Most frequent first.")
    most_expensive: list[TopConversationView]
    slowest: list[TopConversationView]
    stuck_compactions: list[StuckCompactionView]
    alarms: list[AlarmView]

    @classmethod
    def of(cls, overview: Overview, by: OverviewBy, since: datetime, until: datetime) -> Self:
        return cls(
            by=by,
            since=since,
            until=until,
            step=overview.step,
            total=OverviewCellView.of(overview.total),
            by_step=[OverviewCellView.of(cell) for cell in overview.by_step],
            by_key=[OverviewCellView.of(cell) for cell in overview.by_key],
            cells=[OverviewCellView.of(cell) for cell in overview.cells],
            errors=[ErrorCountView.of(error) for error in overview.errors],
            most_expensive=[TopConversationView.of(top) for top in overview.most_expensive],
            slowest=[TopConversationView.of(top) for top in overview.slowest],
            stuck_compactions=[StuckCompactionView.of(stuck) for stuck in overview.stuck_compactions],
            alarms=[AlarmView.of(alarm) for alarm in overview.alarms],
        )


@get(
    "/admin/api/overview",
    guards=[admin_only],
    summary="Show the overview",
    response_description="The overview.",
    description="Covers the calls that started at `from` or later and before `to`; by default the last 7 days, at most "
    "a year. A step is an hour for up to three days, otherwise a day. `tenant` works as for the list of conversations.",
    tags=["inspection"],
    responses=document_errors(ValidationFailed, KeyRejected, ScopeMissing, DatabaseUnavailable),
)
async def show_overview(
    caller: NamedDependency[SkipValidation[ApiKey]],
    inspector: NamedDependency[SkipValidation[Inspector]],
    by: Annotated[OverviewBy, QueryParameter(description="How to group.")] = OverviewBy.MODEL,
    since: Annotated[
        datetime | None, QueryParameter(name="from", description="Start of the period, inclusive.")
    ] = None,
    until: Annotated[datetime | None, QueryParameter(name="to", description="End of the period, exclusive.")] = None,
    tenant: FromQuery[str | None] = None,
) -> Response[OverviewView]:
    """Load the overview of a tenant, or of all."""
    first, end = read_time(in_utc("from", since), in_utc("to", until))
    overview = await inspector.load_overview(choose_tenant(caller, tenant), by, since=first, until=end)
    return answer_json(OverviewView.of(overview, by, first, end))


def read_time(since: datetime | None, until: datetime | None) -> tuple[datetime, datetime]:
    """Return the period. Raises `ValidationFailed`."""
    end = until or datetime.now(UTC)
    try:
        first = since or end - DEFAULT_PERIOD
    except OverflowError:
        raise refuse("to", "Expected a later time", source="query") from None
    if not timedelta() < end - first <= MAX_PERIOD:
        raise refuse("from", "Expected a time before `to`, at most a year earlier", source="query")
    return first, end
