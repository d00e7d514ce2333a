"""The page with the list of conversations and its filters."""

from typing import Final

from litestar import Response, get
from litestar.di import NamedDependency
from litestar.params import SkipValidation

from server.conversation.turn import StopReason
from server.inspection.admin_sessions import AdminSession
from server.inspection.conversation_list import NAME_LIMIT, InspectedState, SavedViews
from server.inspection.port import Inspector
from server.web.admin.conversation_filters import FLAGS, read_filters, write_filters
from server.web.admin.rendering import answer_page, answer_redirect, pushed_address
from server.web.request import StrataRequest

_ROWS: Final = 50
_PLAIN: Final = frozenset({"text", "state", "active_within"})
"""Filters that are always visible. The others are collapsed until one is used."""
_SPANS: Final = {"1h": "the last hour", "24h": "the last 24 hours", "7d": "the last 7 days", "30d": "the last 30 days"}


@get("/conversations")
async def show_conversations(
    request: StrataRequest,
    session: NamedDependency[SkipValidation[AdminSession]],
    inspector: NamedDependency[SkipValidation[Inspector]],
    saved_views: NamedDependency[SkipValidation[SavedViews]],
) -> Response[bytes]:
    """Show conversations, latest activity first. The filters are query parameters."""
    query = dict(request.query_params.items())
    filters, filled = read_filters(query)
    kept = {name: query[name] for name in ("cursor", "notice") if query.get(name)}
    address = write_filters(filled, **kept)
    pushed = pushed_address(request, address)
    if pushed is None and "" in query.values():
        return answer_redirect(address)
    cursor = kept.get("cursor")
    page = await inspector.list_conversations(session.tenant_scope, filters=filters, cursor=cursor, limit=_ROWS)
    views = await saved_views.list_views(session.key.tenant_id)
    # The only page: the count is exact.
    is_all = cursor is None and page.next_cursor is None
    return answer_page(
        request,
        "conversations.html",
        headers=pushed,
        count=len(page.items) if is_all else max(page.estimated_count, len(page.items)),
        is_count_exact=is_all or page.is_count_exact,
        page=page,
        filters=filled,
        flags=FLAGS,
        spans=_SPANS,
        states=list(InspectedState),
        stop_reasons=list(StopReason),
        more_open=bool(filled.keys() - _PLAIN),
        views=[(view, write_filters(view.filters)) for view in views],
        here=write_filters(filled),
        filters_query=write_filters(filled).partition("?")[2],
        name_limit=NAME_LIMIT,
        shows_tenant=session.tenant_scope is None,
        is_first=cursor is None,
        first_url=write_filters(filled),
        next_url=write_filters(filled, cursor=page.next_cursor) if page.next_cursor else None,
    )
