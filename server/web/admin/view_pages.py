"""Pages to save, rename and delete views of the list of conversations."""

from typing import Final
from urllib.parse import parse_qsl

from litestar import Response, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, SkipValidation

from server.conversation.audit import Actor
from server.conversation.errors import BodyMalformed, ValidationFailed
from server.inspection.admin_sessions import AdminSession
from server.inspection.conversation_list import NAME_LIMIT, VIEW_LIMIT, SavedViews, clean_name
from server.web.admin.conversation_filters import FILTER_NAMES, read_filters, write_filters
from server.web.admin.notices import with_notice
from server.web.admin.rendering import answer_page, answer_redirect
from server.web.admin.sessions import read_form
from server.web.request import StrataRequest

_VIEWS: Final = "/admin/views"


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
