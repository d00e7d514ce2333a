"""The list of conversations with its filters, and the pages that save, rename and delete views of it."""

from typing import Final
from urllib.parse import parse_qsl

from litestar import Response, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, SkipValidation

from server.conversation.audit import Actor
from server.conversation.errors import BodyMalformed, ValidationFailed
from server.conversation.turn import StopReason
from server.inspection.admin_sessions import AdminSession
from server.inspection.conversation_list import NAME_LIMIT, VIEW_LIMIT, InspectedState, SavedViews, clean_name
from server.inspection.port import Inspector
from server.web.admin.conversation_filters import FILTER_NAMES, FLAGS, read_filters, write_filters
from server.web.admin.labels import with_notice
from server.web.admin.rendering import answer_page, answer_redirect, pushed_address
from server.web.admin.sessions import read_form
from server.web.request import StrataRequest

_ROWS: Final = 50
_PLAIN: Final = frozenset({"text", "state", "active_within"})
"""Filters that are always visible. The others are collapsed until one is used."""
_SPANS: Final = {"1h": "the last hour", "24h": "the last 24 hours", "7d": "the last 7 days", "30d": "the last 30 days"}
_VIEWS: Final = "/admin/views"


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


@get("/views")
async def show_views(
    request: StrataRequest,
    session: NamedDependency[SkipValidation[AdminSession]],
    saved_views: NamedDependency[SkipValidation[SavedViews]],
) -> Response[bytes]:
    """Show all views with their filters."""
    views = await saved_views.list_views(session.key.tenant_id)
    return answer_page(
        request,
        "views.html",
        views=views,
        urls={view.id: write_filters(view.filters) for view in views},
        view_limit=VIEW_LIMIT,
        name_limit=NAME_LIMIT,
    )


@post("/views", status_code=303)
async def save_view_on_page(
    request: StrataRequest,
    actor: NamedDependency[SkipValidation[Actor]],
    session: NamedDependency[SkipValidation[AdminSession]],
    saved_views: NamedDependency[SkipValidation[SavedViews]],
) -> Response[bytes]:
    """Save the filters of the list."""
    form = await read_form(request)
    try:
        query = dict(parse_qsl(form.get("filters", ""), max_num_fields=len(FILTER_NAMES)))
    except ValueError:
        raise BodyMalformed("The filters cannot be read.", hint="Reload the list.") from None
    _, filled = read_filters(query)
    if not filled:
        raise ValidationFailed("There is no filter to save.", hint="Filter the list first.")
    view = await saved_views.save_view(session.key.tenant_id, clean_name(form.get("name", "")), filled, actor)
    return answer_redirect(with_notice(write_filters(view.filters), "view-saved"))


@post("/views/{view_id:str}/rename", status_code=303)
async def rename_view_on_page(
    request: StrataRequest,
    view_id: FromPath[str],
    actor: NamedDependency[SkipValidation[Actor]],
    session: NamedDependency[SkipValidation[AdminSession]],
    saved_views: NamedDependency[SkipValidation[SavedViews]],
) -> Response[bytes]:
    """Rename a view."""
    name = clean_name((await read_form(request)).get("name", ""))
    await saved_views.rename_view(session.key.tenant_id, view_id, name, actor)
    return answer_redirect(with_notice(_VIEWS, "view-renamed"))


@get("/views/{view_id:str}/delete")
async def confirm_view_deletion(
    request: StrataRequest,
    view_id: FromPath[str],
    session: NamedDependency[SkipValidation[AdminSession]],
    saved_views: NamedDependency[SkipValidation[SavedViews]],
) -> Response[bytes]:
    """Ask for confirmation."""
    view = await saved_views.load_view(session.key.tenant_id, view_id)
    return answer_page(request, "delete_view.html", view=view, url=write_filters(view.filters))


@post("/views/{view_id:str}/delete", status_code=303)
async def delete_view_on_page(
    view_id: FromPath[str],
    actor: NamedDependency[SkipValidation[Actor]],
    session: NamedDependency[SkipValidation[AdminSession]],
    saved_views: NamedDependency[SkipValidation[SavedViews]],
) -> Response[bytes]:
    """Delete a view."""
    await saved_views.delete_view(session.key.tenant_id, view_id, actor)
    return answer_redirect(with_notice(_VIEWS, "view-deleted"))
