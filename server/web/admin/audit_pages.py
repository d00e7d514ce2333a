"""The page of the audit log."""

from collections.abc import Mapping
from typing import Annotated, Final
from urllib.parse import urlencode

from litestar import Response, get
from litestar.di import NamedDependency
from litestar.params import FromQuery, QueryParameter, SkipValidation

from server.conversation.audit import AuditFilter, AuditLog, Outcome
from server.inspection.admin_sessions import AdminSession
from server.web.admin.labels import ACTION_NAMES, name_action, object_url
from server.web.admin.rendering import answer_page, pushed_address
from server.web.request import StrataRequest

_ENTRIES: Final = 50
_OUTCOMES: Final = {outcome.value: outcome for outcome in Outcome}


@get("/audit")
async def show_audit_log(
    request: StrataRequest,
    session: NamedDependency[SkipValidation[AdminSession]],
    audit_log: NamedDependency[SkipValidation[AuditLog]],
    action: FromQuery[str] = "",
    key: FromQuery[str] = "",
    object_id: Annotated[str, QueryParameter(name="object")] = "",
    outcome: FromQuery[str] = "",
    cursor: FromQuery[str | None] = None,
) -> Response[bytes]:
    """Show a page of the log. The filters are query parameters; empty ones are ignored."""
    wanted = AuditFilter(
        action=action or None,
        key_id=key.strip() or None,
        object_id=object_id.strip() or None,
        outcome=_OUTCOMES.get(outcome),
    )
    values = {"action": action, "key": key.strip(), "object": object_id.strip(), "outcome": outcome}
    filters = {name: value for name, value in values.items() if value}
    pushed = pushed_address(request, _address({**filters, "cursor": cursor} if cursor else filters))
    page = await audit_log.list_entries(session.tenant_scope, wanted, cursor=cursor, limit=_ENTRIES)
    return answer_page(
        request,
        "audit.html",
        headers=pushed,
        entries=page.items,
        action_names=ACTION_NAMES,
        name_action=name_action,
        object_url=object_url,
        outcomes=list(_OUTCOMES),
        filters=filters,
        is_first=cursor is None,
        first_url=_address(filters),
        next_url=_address({**filters, "cursor": page.next_cursor}) if page.next_cursor else None,
    )


def _address(query: Mapping[str, str]) -> str:
    return f"/admin/audit?{urlencode(query)}" if query else "/admin/audit"
