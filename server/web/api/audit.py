"""The audit log over HTTP."""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any

from litestar import Response, get
from litestar.di import NamedDependency, Provide
from litestar.params import FromQuery, QueryParameter, SkipValidation
from pydantic import AliasPath, Field

from server.conversation.api_key import ApiKey
from server.conversation.audit import AuditFilter, AuditLog, Outcome
from server.conversation.errors import CursorInvalid
from server.conversation.page import PAGE_LIMIT
from server.web.api.inspection import choose_tenant
from server.web.api.views import CONVERSATION_ID, EXAMPLE_TIME, PageView, View
from server.web.auth import admin_only
from server.web.errors import document_admin_errors
from server.web.json_text import answer_json
from server.web.validation import in_utc


class AuditEntryView(View):
    """An action of an operator, or an attempt."""

    id: str = Field(examples=["audit_01jd0z8s3bf6h9kq2m4n6p8r0t"])
    happened_at: datetime = Field(examples=[EXAMPLE_TIME])
    tenant_id: str | None = Field(
        description="The tenant whose data was affected; null if unknown.",
        examples=["tenant_01jd0z8s3bf6h9kq2m4n6p8r0t"],
    )
    action: str = Field(examples=["conversation.erase"])
    outcome: Outcome = Field(examples=["done"])
    object_id: str | None = Field(description="The object of the action.", examples=[CONVERSATION_ID])
    api_key_id: str | None = Field(
        validation_alias=AliasPath("actor", "key_id"),
        description="The key of the operator; null for the command line and for unknown keys.",
        examples=["key_01jd0z8s3bf6h9kq2m4n6p8r0t"],
    )
    session_id: str | None = Field(
        validation_alias=AliasPath("actor", "session_id"), description="Null if no page was used.", examples=[None]
    )
    address: str | None = Field(
        validation_alias=AliasPath("actor", "address"), description="Null for the command line.", examples=["192.0.2.7"]
    )
    details: Mapping[str, Any] = Field(description="Details, without content or secrets.", examples=[{}])


class AuditPage(PageView[AuditEntryView]):
    """Entries of the log, newest first."""


def provide_wanted(
    *,
    action: FromQuery[str | None] = None,
    api_key_id: FromQuery[str | None] = None,
    object_id: FromQuery[str | None] = None,
    outcome: FromQuery[Outcome | None] = None,
    since: Annotated[
        datetime | None, QueryParameter(name="from", description="Start of the period, inclusive.")
    ] = None,
    until: Annotated[datetime | None, QueryParameter(name="to", description="End of the period, exclusive.")] = None,
) -> AuditFilter:
    """Read the filter from the query."""
    return AuditFilter(
        action=action,
        key_id=api_key_id,
        object_id=object_id,
        outcome=outcome,
        since=in_utc("from", since),
        until=in_utc("to", until),
    )


@get(
    "/admin/api/audit",
    guards=[admin_only],
    dependencies={"wanted": Provide(provide_wanted, sync_to_thread=False)},
    summary="The audit log",
    response_description="A page of entries.",
    description="Actions of operators, newest first. All filters can be combined. `tenant` selects another tenant, or "
    "`all`, which includes entries without a tenant, such as logins with unknown keys. It requires the scope "
    "`superadmin`.",
    tags=["inspection"],
    responses=document_admin_errors(CursorInvalid),
)
async def list_audit_entries(
    caller: NamedDependency[SkipValidation[ApiKey]],
    audit_log: NamedDependency[SkipValidation[AuditLog]],
    wanted: NamedDependency[SkipValidation[AuditFilter]],
    tenant: FromQuery[str | None] = None,
    cursor: FromQuery[str | None] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_LIMIT)] = 50,
) -> Response[AuditPage]:
    """List entries."""
    page = await audit_log.list_entries(choose_tenant(caller, tenant), wanted, cursor=cursor, limit=limit)
    return answer_json(AuditPage.of(page))
