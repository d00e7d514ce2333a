"""Background jobs of a tenant."""

from datetime import datetime
from typing import Any

from litestar import Response, get
from litestar.di import NamedDependency
from litestar.params import SkipValidation
from pydantic import Field

from server.conversation.api_key import ApiKey
from server.conversation.errors import DatabaseUnavailable, KeyRejected, ScopeMissing
from server.inspection.port import Inspector
from server.web.api.views import EXAMPLE_TIME, View
from server.web.auth import admin_only
from server.web.errors import document_errors
from server.web.json_text import answer_json


class JobStatusView(View):
    """The tenant's jobs of one name."""

    name: str = Field(examples=["compaction"])
    waiting: int = Field(validation_alias="waiting_count", description="Jobs that could start now.", examples=[2])
    running: int = Field(
        validation_alias="running_count",
        description="Includes the jobs of a worker that has died, until another takes them over.",
        examples=[1],
    )
    later: int = Field(validation_alias="later_count", description="Jobs scheduled for a later time.", examples=[0])
    postponed: int = Field(
        validation_alias="postponed_count", description="Queued jobs that were tried before.", examples=[0]
    )
    failed: int = Field(
        validation_alias="failed_count", description="Jobs given up in the last 24 hours.", examples=[0]
    )
    oldest_waiting_at: datetime | None = Field(
        description="Since when the oldest waiting job could have started.", examples=[EXAMPLE_TIME]
    )
    last_error: str | None = Field(
        description="Why a job was last given up or postponed: an error code or class.",
        examples=["summary_unavailable"],
    )
    last_error_at: datetime | None = Field(examples=[EXAMPLE_TIME])


class JobListView(View):
    """The jobs by name. Names without jobs are omitted."""

    data: list[JobStatusView]


@get(
    "/admin/api/jobs",
    guards=[admin_only],
    summary="Report background jobs",
    response_description="The jobs of the key's tenant, by name.",
    description="Waiting, running and recently failed jobs. Names without jobs are omitted, and so are jobs of the "
    "server itself; `strata jobs` shows all of them.",
    tags=["jobs"],
    responses=document_errors(KeyRejected, ScopeMissing, DatabaseUnavailable),
)
async def report_jobs(
    caller: NamedDependency[SkipValidation[ApiKey]],
    inspector: NamedDependency[SkipValidation[Inspector]],
) -> Response[JobListView]:
    """Report the jobs of the caller's tenant."""
    statuses = await inspector.report_jobs(caller.tenant_id)
    answer: Response[Any] = answer_json(JobListView(data=[JobStatusView.of(status) for status in statuses]))
    return answer
