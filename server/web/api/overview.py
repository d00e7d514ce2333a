"""The overview over HTTP: tokens, cost, cache share, errors and latency over time, and alarms."""

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
    """The calls of a step, of an assistant or model, of both, or all."""

    at: datetime | None = Field(description="When the step began; null: the whole time.", examples=[EXAMPLE_TIME])
    key: str | None = Field(description="Null: all of them.", examples=["gemini-3.1-pro-preview"])
    name: str | None = Field(description="Of an assistant, as it is called now.", examples=[None])
    calls: int = Field(examples=[12])
    errors: int = Field(description="Attempts that failed.", examples=[1])
    usage: UsageView
    cache_share: float | None = Field(examples=[0.93])
    cost_usd: float = Field(description="Of the calls whose price is known.", examples=[0.0123])
    unpriced_calls: int = Field(examples=[0])
    median_seconds: float | None = Field(examples=[1.8])
    p95_seconds: float | None = Field(examples=[6.2])
    first_byte_seconds: float | None = Field(description="The median.", examples=[0.6])

    @classmethod
    def of(cls, cell: OverviewCell) -> Self:
        """The view of a cell."""
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
    """A conversation that stands out."""

    id: str = Field(examples=[CONVERSATION_ID])
    assistant_name: str = Field(examples=["helper"])
    calls: int = Field(examples=[40])
    cost_usd: float = Field(examples=[1.25])
    slowest_seconds: float | None = Field(examples=[31.5])

    @classmethod
    def of(cls, top: TopConversation) -> Self:
        """The view of a conversation."""
        return cls(
            id=top.id,
            assistant_name=top.assistant_name,
            calls=top.call_count,
            cost_usd=float(top.cost_usd),
            slowest_seconds=top.slowest_seconds,
        )


class StuckCompactionView(View):
    """A conversation that has to be compacted and cannot be."""

    conversation_id: str = Field(examples=[CONVERSATION_ID])
    reason: str = Field(examples=["blocked_by_open_call"])
    request_tokens: int = Field(examples=[210000])
    began_at: datetime = Field(examples=[EXAMPLE_TIME])

    @classmethod
    def of(cls, stuck: StuckCompaction) -> Self:
        """The view of an alarm."""
        return cls(
            conversation_id=stuck.conversation_id,
            reason=stuck.reason,
            request_tokens=stuck.request_tokens,
            began_at=stuck.began_at,
        )


class ErrorCountView(View):
    """Why attempts failed."""

    code: str = Field(examples=["provider_overloaded"])
    calls: int = Field(examples=[3])
    last_at: datetime = Field(description="When the newest of them began.", examples=[EXAMPLE_TIME])

    @classmethod
    def of(cls, error: ErrorCount) -> Self:
        """The view of a code."""
        return cls(code=error.code, calls=error.call_count, last_at=error.last_at)


class AlarmView(View):
    """Conversations with one kind of trouble."""

    kind: str = Field(description="The filter of the list that finds them all.", examples=["has_prefix_break"])
    estimated_count: int = Field(examples=[0])
    data: list[InspectedConversationView] = Field(description="The newest of them.")

    @classmethod
    def of(cls, alarm: Alarm) -> Self:
        """The view of an alarm."""
        return cls(
            kind=alarm.kind,
            estimated_count=alarm.estimated_count,
            data=[InspectedConversationView.of(item) for item in alarm.conversations],
        )


class OverviewView(View):
    """All of it."""

    by: OverviewBy = Field(examples=["model"])
    since: datetime = Field(examples=[EXAMPLE_TIME])
    until: datetime = Field(examples=[EXAMPLE_TIME])
    step: OverviewStep = Field(description="In UTC.", examples=["day"])
    total: OverviewCellView
    by_step: list[OverviewCellView]
    by_key: list[OverviewCellView] = Field(description="What took the most tokens first.")
    cells: list[OverviewCellView] = Field(
        description=f"By step and key, in the order of time; of the first {CELL_KEY_LIMIT} keys."
    )
    errors: list[ErrorCountView] = Field(description="The most frequent first.")
    most_expensive: list[TopConversationView]
    slowest: list[TopConversationView]
    stuck_compactions: list[StuckCompactionView]
    alarms: list[AlarmView]

    @classmethod
    def of(cls, overview: Overview, by: OverviewBy, since: datetime, until: datetime) -> Self:
        """The view of an overview."""
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
    summary="The overview",
    response_description="Numbers over time, what stands out, and alarms.",
    description="Of the calls that began at `from` or later and before `to`: the last 7 days, or what you name, a year "
    "at most; in steps of an hour up to three days, else of a day. `tenant` as for the list of conversations.",
    tags=["inspection"],
    responses=document_errors(ValidationFailed, KeyRejected, ScopeMissing, DatabaseUnavailable),
)
async def show_overview(
    caller: NamedDependency[SkipValidation[ApiKey]],
    inspector: NamedDependency[SkipValidation[Inspector]],
    by: Annotated[OverviewBy, QueryParameter(description="What the keys stand for.")] = OverviewBy.MODEL,
    since: Annotated[datetime | None, QueryParameter(name="from", description="The first moment that counts.")] = None,
    until: Annotated[datetime | None, QueryParameter(name="to", description="The first that does not.")] = None,
    tenant: FromQuery[str | None] = None,
) -> Response[OverviewView]:
    """The overview of a tenant, or of all."""
    first, end = read_time(in_utc("from", since), in_utc("to", until))
    overview = await inspector.load_overview(choose_tenant(caller, tenant), by, since=first, until=end)
    return answer_json(OverviewView.of(overview, by, first, end))


def read_time(since: datetime | None, until: datetime | None) -> tuple[datetime, datetime]:
    """The time that is meant. Raises `ValidationFailed`."""
    end = until or datetime.now(UTC)
    try:
        first = since or end - DEFAULT_PERIOD
    except OverflowError:
        raise refuse("to", "Expected a later time", source="query") from None
    if not timedelta() < end - first <= MAX_PERIOD:
        raise refuse("from", "Expected a time before `to`, by a year at most", source="query")
    return first, end
