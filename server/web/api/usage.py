"""What a tenant's calls took and cost, over HTTP."""

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Self

from litestar import Response, get
from litestar.di import NamedDependency
from litestar.params import QueryParameter, SkipValidation
from pydantic import Field

from server.conversation.api_key import ApiKey
from server.conversation.errors import DatabaseUnavailable, KeyRejected, ScopeMissing, ValidationFailed
from server.inspection.port import Inspector
from server.inspection.usage_report import DEFAULT_PERIOD, MAX_PERIOD, ROW_LIMIT, UsageBy, UsageRow
from server.web.api.block_views import View
from server.web.api.views import EXAMPLE_TIME, UsageView
from server.web.auth import admin_only
from server.web.errors import document_errors
from server.web.json_text import answer_json
from server.web.validation import in_utc, refuse


class UsageRowView(View):
    """The calls of one day, assistant, model or conversation."""

    key: str = Field(description="A day, an id, or a model's name, as `by` says.", examples=["2026-01-31"])
    name: str | None = Field(description="By assistant: what it is called now. Else null.", examples=[None])
    calls: int = Field(description="Each attempt counts, and each summary of a compaction.", examples=[12])
    usage: UsageView
    cache_share: float | None = Field(
        description="Of all input tokens, those that came from the provider's cache. Null where there were none.",
        examples=[0.93],
    )
    expected_cache_tokens: int = Field(description="Those that should have come from it.", examples=[4096])
    cost_usd: float | None = Field(description="Null where any call's price is not known.", examples=[0.0123])
    unpriced_calls: int = Field(description="How many of these there are.", examples=[0])

    @classmethod
    def of(cls, row: UsageRow) -> Self:
        """The view of a row."""
        return cls(
            key=row.key,
            name=row.name,
            calls=row.call_count,
            usage=UsageView.of(row.usage),
            cache_share=row.cache_share,
            expected_cache_tokens=row.expected_cache_tokens,
            cost_usd=None if row.cost_usd is None else float(row.cost_usd),
            unpriced_calls=row.unpriced_count,
        )


class UsageReportView(View):
    """Days in their order; everything else with what took the most tokens first."""

    by: UsageBy = Field(examples=["day"])
    since: datetime = Field(description="The first moment that counted.", examples=[EXAMPLE_TIME])
    until: datetime = Field(description="The first that did not.", examples=[EXAMPLE_TIME])
    data: list[UsageRowView]
    total: UsageRowView = Field(description="Of all calls of the time; its key is `total`.")
    complete: bool = Field(description="False: there are more rows than `limit`.", examples=[True])


@get(
    "/admin/api/usage",
    guards=[admin_only],
    summary="Tokens, cost and cache share",
    response_description="The report.",
    description="Of the calls that began at `from` or later and before `to`: the last 30 days, or what you name, a "
    "year at most. Days are those of UTC. A fork counts what was asked for it, not what it brought along.",
    tags=["usage"],
    responses=document_errors(ValidationFailed, KeyRejected, ScopeMissing, DatabaseUnavailable),
)
async def report_usage(
    caller: NamedDependency[SkipValidation[ApiKey]],
    inspector: NamedDependency[SkipValidation[Inspector]],
    by: Annotated[UsageBy, QueryParameter(description="What the rows stand for.")] = UsageBy.DAY,
    since: Annotated[datetime | None, QueryParameter(name="from", description="The first moment that counts.")] = None,
    until: Annotated[datetime | None, QueryParameter(name="to", description="The first that does not.")] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=ROW_LIMIT)] = 100,
) -> Response[UsageReportView]:
    """The report of the caller's tenant."""
    first, end = _read_range(in_utc("from", since), in_utc("to", until))
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


def _read_range(since: datetime | None, until: datetime | None) -> tuple[datetime, datetime]:
    end = until or datetime.now(UTC)
    try:
        first = since or end - DEFAULT_PERIOD
    except OverflowError:
        raise refuse("to", "Expected a later time", source="query") from None
    if not timedelta() < end - first <= MAX_PERIOD:
        raise refuse("from", "Expected a time before `to`, by a year at most", source="query")
    return first, end
