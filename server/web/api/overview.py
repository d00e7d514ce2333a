"""The overview: tokens, cost, cache share, errors and latency over time, and alarms."""

from dataclasses import fields
from datetime import datetime
from typing import Annotated

from litestar import Response, get
from litestar.di import NamedDependency
from litestar.params import FromQuery, QueryParameter, SkipValidation
from pydantic import Field

from server.conversation.api_key import ApiKey
from server.inspection.overview import (
    CELL_KEY_LIMIT,
    DEFAULT_PERIOD,
    MAX_PERIOD,
    OverviewBy,
    OverviewStep,
)
from server.inspection.port import Inspector
from server.web.api.inspection import choose_tenant
from server.web.api.inspection_views import InspectedConversationView
from server.web.api.views import CONVERSATION_ID, EXAMPLE_TIME, UsageView, View
from server.web.auth import admin_only
from server.web.errors import document_admin_errors
from server.web.json_text import answer_json
from server.web.validation import read_period


class OverviewCellView(View):
    """The calls of one step, one key, both, or all."""

    at: datetime | None = Field(description="Start of the step; null for the whole period.", examples=[EXAMPLE_TIME])
    key: str | None = Field(description="Null for all.", examples=["gemini-3.1-pro-preview"])
    name: str | None = Field(description="The current name of an assistant.", examples=[None])
    calls: int = Field(validation_alias="call_count", examples=[12])
    errors: int = Field(validation_alias="error_count", description="Failed attempts.", examples=[1])
    usage: UsageView
    cache_share: float | None = Field(examples=[0.93])
    cost_usd: float = Field(description="Cost of the calls whose price is known.", examples=[0.0123])
    unpriced_calls: int = Field(validation_alias="unpriced_count", examples=[0])
    median_seconds: float | None = Field(examples=[1.8])
    p95_seconds: float | None = Field(validation_alias="slow_seconds", examples=[6.2])
    first_byte_seconds: float | None = Field(description="Median time to the first byte.", examples=[0.6])


class TopConversationView(View):
    """One of the most expensive or slowest conversations."""

    id: str = Field(examples=[CONVERSATION_ID])
    assistant_name: str = Field(examples=["helper"])
    calls: int = Field(validation_alias="call_count", examples=[40])
    cost_usd: float = Field(examples=[1.25])
    slowest_seconds: float | None = Field(examples=[31.5])


class StuckCompactionView(View):
    """A conversation that needs a compaction which is not possible."""

    conversation_id: str = Field(examples=[CONVERSATION_ID])
    reason: str = Field(examples=["blocked_by_open_call"])
    request_tokens: int = Field(examples=[210000])
    began_at: datetime = Field(examples=[EXAMPLE_TIME])


class ErrorCountView(View):
    """Failed calls by error code."""

    code: str = Field(examples=["provider_overloaded"])
    calls: int = Field(validation_alias="call_count", examples=[3])
    last_at: datetime = Field(description="Start of the newest call.", examples=[EXAMPLE_TIME])


class AlarmView(View):
    """Conversations with one kind of problem."""

    kind: str = Field(description="The name of the filter that finds all of them.", examples=["has_prefix_break"])
    estimated_count: int = Field(examples=[0])
    data: list[InspectedConversationView] = Field(validation_alias="conversations", description="The newest ones.")


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


@get(
    "/admin/api/overview",
    guards=[admin_only],
    summary="Show the overview",
    response_description="The overview.",
    description="Covers the calls that started at `from` or later and before `to`; by default the last 7 days, at most "
    "a year. A step is an hour for up to three days, otherwise a day. `tenant` works as for the list of conversations.",
    tags=["inspection"],
    responses=document_admin_errors(),
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
    first, end = read_period(since, until, default=DEFAULT_PERIOD, longest=MAX_PERIOD)
    overview = await inspector.load_overview(choose_tenant(caller, tenant), by, since=first, until=end)
    members = {field.name: getattr(overview, field.name) for field in fields(overview)}
    return answer_json(OverviewView.of({"by": by, "since": first, "until": end, **members}))
