"""The overview page: problems, cost and latency of a period, with links to details."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final
from urllib.parse import urlencode

from litestar import Response, get
from litestar.di import NamedDependency
from litestar.params import SkipValidation

from server.conversation.audit import AuditFilter, AuditLog
from server.conversation.errors import ValidationFailed
from server.conversation.time_span import read_span
from server.inspection.admin_sessions import AdminSession
from server.inspection.overview import (
    ALARM_LIMIT,
    MAX_PERIOD,
    ChartSheet,
    OverviewBy,
    OverviewStep,
    build_charts,
    choose_step,
)
from server.inspection.port import Inspector
from server.web.admin.conversation_filters import FLAGS, read_time
from server.web.admin.labels import name_action, object_url
from server.web.admin.rendering import answer_page, show_text
from server.web.request import StrataRequest

SPANS: Final[Mapping[str, str]] = {"24h": "24 hours", "7d": "7 days", "30d": "30 days"}
_USUAL: Final = "24h"
_ENTRIES: Final = 5
_NAME_LIMIT: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenTime:
    """The period of the page, and its query parameters."""

    since: datetime
    until: datetime
    span: str | None
    """None if the period has explicit start and end times."""
    query: Mapping[str, str]

    @property
    def list_query(self) -> Mapping[str, str]:
        """The same period as filters of the list of conversations."""
        after = {"active_after": _short(self.since)}
        return after if self.span else {**after, "active_before": _short(self.until)}


@get("/")
async def show_overview_page(
    request: StrataRequest,
    session: NamedDependency[SkipValidation[AdminSession]],
    inspector: NamedDependency[SkipValidation[Inspector]],
    audit_log: NamedDependency[SkipValidation[AuditLog]],
) -> Response[bytes]:
    """Show the overview. Period and grouping are query parameters."""
    asked = {name: value.strip() for name, value in request.query_params.items()}
    chosen = choose_time(asked.get("time", ""), asked.get("from", ""), asked.get("to", ""), datetime.now(UTC))
    grouping = _read_by(asked.get("by", ""))
    tenant_id = session.tenant_scope
    overview = await inspector.load_overview(tenant_id, grouping, since=chosen.since, until=chosen.until)
    sheet = build_charts(overview, since=chosen.since, until=chosen.until)
    return answer_page(
        request,
        "overview.html",
        overview=overview,
        sheet=sheet,
        sheet_json=_write_sheet(sheet, overview.step),
        chosen=chosen,
        by=grouping,
        groupings=list(OverviewBy),
        spans=SPANS,
        by_urls={each: _address({**chosen.query, "by": each.value}) for each in OverviewBy},
        span_urls={span: _address({"time": span, "by": grouping.value}) for span in SPANS},
        list_query=urlencode(chosen.list_query),
        flags=FLAGS,
        alarm_limit=ALARM_LIMIT,
        name_action=name_action,
        object_url=object_url,
        jobs=await inspector.report_jobs(tenant_id),
        entries=(await audit_log.list_entries(tenant_id, AuditFilter(), limit=_ENTRIES)).items,
    )


def choose_time(span: str, since: str, until: str, now: datetime) -> ChosenTime:
    """Return the period: a duration until now, or explicit times. Raises `ValidationFailed`.

    A duration starts with a whole step, so that the first number is comparable with the others.
    """
    if not (since or until):
        length = read_span(span or _USUAL)
        if length is None or not timedelta() < length <= MAX_PERIOD - timedelta(days=1):
            raise _refusal("time", "Use a duration such as 24h, 7d or 30d, at most a year.")
        return ChosenTime(
            since=_step_before(now - length, choose_step(now - length, now)),
            until=now,
            span=span or _USUAL,
            query={"time": span} if span else {},
        )
    end = read_time("to", until) if until else now
    first = read_time("from", since) if since else end - timedelta(days=1)
    if not timedelta() < end - first <= MAX_PERIOD:
        raise _refusal("from", "Use a time before the end, at most a year earlier.")
    query = {name: value for name, value in (("from", since), ("to", until)) if value}
    return ChosenTime(since=first, until=end, span=None, query=query)


def _step_before(moment: datetime, step: OverviewStep) -> datetime:
    hour = moment.replace(minute=0, second=0, microsecond=0)
    return hour if step is OverviewStep.HOUR else hour.replace(hour=0)


def _read_by(by: str) -> OverviewBy:
    try:
        return OverviewBy(by) if by else OverviewBy.MODEL
    except ValueError:
        raise _refusal("by", f"Use one of: {', '.join(OverviewBy)}.") from None


def _write_sheet(sheet: ChartSheet, step: OverviewStep) -> str:
    """Encode the chart data for the script, in ASCII, as the value of an attribute."""
    return json.dumps(
        {
            "step": step.value,
            "steps": [int(at.timestamp()) for at in sheet.steps],
            "names": [show_text(name)[:_NAME_LIMIT] for name in sheet.names],
            "charts": [
                {"measure": chart.measure, "unit": chart.unit, "lines": [list(line.values) for line in chart.lines]}
                for chart in sheet.charts
            ],
        }
    )


def _address(query: Mapping[str, str]) -> str:
    return f"/admin?{urlencode(query)}"


def _short(moment: datetime) -> str:
    """Format a time for a browser's time field, to the minute."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M")


def _refusal(name: str, sentence: str) -> ValidationFailed:
    fault = {"path": name, "source": "query", "message": sentence}
    return ValidationFailed(f"“{name}” cannot be used. {sentence}", hint="Go back and correct it.", errors=[fault])
