"""Usage reports: tokens and cost of a tenant's calls."""

from datetime import datetime
from typing import Annotated, Any

from litestar import Response, get
from litestar.di import NamedDependency
from litestar.params import QueryParameter, SkipValidation
from pydantic import Field

from server.conversation.api_key import ApiKey
from server.inspection.port import Inspector
from server.inspection.usage_report import DEFAULT_PERIOD, MAX_PERIOD, ROW_LIMIT, UsageBy
from server.web.api.views import EXAMPLE_TIME, UsageView, View
from server.web.auth import admin_only
from server.web.errors import document_admin_errors
from server.web.json_text import answer_json
from server.web.validation import read_period


class UsageRowView(View):
    """The calls of one day, assistant, model or conversation."""

    key: str = Field(description="A day, an id or a model, depending on `by`.", examples=["2026-01-31"])
    name: str | None = Field(description="The current name of an assistant; otherwise null.", examples=[None])
    calls: int = Field(
        validation_alias="call_count",
        description="Every attempt counts, and every summary of a compaction.",
        examples=[12],
    )
    usage: UsageView
    cache_share: float | None = Field(
        description="Share of input tokens read from the provider's cache; null without input tokens.",
        examples=[0.93],
    )
    expected_cache_tokens: int = Field(description="Tokens that were expected from the cache.", examples=[4096])
    cost_usd: float | None = Field(description="Null if the price of any call is not known.", examples=[0.0123])
    unpriced_calls: int = Field(
        validation_alias="unpriced_count", description="Calls without a known price.", examples=[0]
    )


class UsageReportView(View):
    """Days in order; other rows by tokens, most first."""

    by: UsageBy = Field(examples=["day"])
    since: datetime = Field(description="Start of the period, inclusive.", examples=[EXAMPLE_TIME])
    until: datetime = Field(description="End of the period, exclusive.", examples=[EXAMPLE_TIME])
    data: list[UsageRowView]
    total: UsageRowView = Field(description="All calls of the period; its key is `total`.")
    complete: bool = Field(description="Whether all rows are included.", examples=[True])


@get(
    "/admin/api/usage",
    guards=[admin_only],
    summary="Report tokens, cost and cache share",
    response_description="The report.",
    description="Covers the calls that started at `from` or later and before `to`; by default the last 30 days, at "
    "most a year. Days are in UTC. For a fork, calls copied from its source do not count.",
    tags=["usage"],
    responses=document_admin_errors(),
)
async def report_usage(
    caller: NamedDependency[SkipValidation[ApiKey]],
    inspector: NamedDependency[SkipValidation[Inspector]],
    by: Annotated[UsageBy, QueryParameter(description="How to group.")] = UsageBy.DAY,
    since: Annotated[
        datetime | None, QueryParameter(name="from", description="Start of the period, inclusive.")
    ] = None,
    until: Annotated[datetime | None, QueryParameter(name="to", description="End of the period, exclusive.")] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=ROW_LIMIT)] = 100,
) -> Response[UsageReportView]:
    """Report the usage of the caller's tenant."""
    first, end = read_period(since, until, default=DEFAULT_PERIOD, longest=MAX_PERIOD)
    report = await inspector.report_usage(caller.tenant_id, by, since=first, until=end, limit=limit)
    answer: Response[Any] = answer_json(
        UsageReportView(
            by=by,
            since=first,
            until=end,
            data=[UsageRowView.of(row) for row in report.rows],
            total=UsageRowView.of(report.total),
            complete=report.is_complete,
        )
    )
    return answer
