"""Saved views: named filters of the list of conversations."""

from datetime import datetime
from typing import Annotated, Final, Self
from urllib.parse import urlencode

from litestar import Response, delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody, SkipValidation
from pydantic import ConfigDict, Field

from server.conversation.api_key import ApiKey
from server.conversation.audit import Actor
from server.conversation.errors import (
    DatabaseUnavailable,
    KeyRejected,
    ScopeMissing,
    ViewExists,
    ViewLimitReached,
    ViewNotFound,
)
from server.inspection.conversation_list import NAME_LIMIT, SavedView, SavedViews, clean_name
from server.web.admin.conversation_filters import FILTER_NAMES, read_filters
from server.web.api.views import EXAMPLE_TIME, View
from server.web.auth import admin_only
from server.web.body import Body, TextLimit
from server.web.errors import document_admin_errors, document_errors
from server.web.json_text import answer_json
from server.web.validation import refuse

_VIEW_ID: Final = "view_01jd0z8s3bf6h9kq2m4n6p8r0t"
_EXAMPLE: Final = {"error_code": "provider_overloaded", "active_within": "7d"}


class SavedViewBody(Body):
    """Filters to save."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"name": "Overloads of the week", "filters": {**_EXAMPLE}}]}
    )

    name: Annotated[str, TextLimit(NAME_LIMIT, blank=False)] = Field(description="Unique within the tenant.")
    filters: dict[str, str] = Field(
        min_length=1,
        max_length=len(FILTER_NAMES),
        description="As in the query of `/admin/api/conversations`, all values as strings, flags as `1`. Use "
        "`active_within` for times relative to now.",
    )


class SavedViewView(View):
    """A saved view."""

    id: str = Field(examples=[_VIEW_ID])
    name: str = Field(examples=["Overloads of the week"])
    filters: dict[str, str] = Field(examples=[_EXAMPLE])
    page: str = Field(
        description="The page of the list with these filters.",
        examples=["/admin/conversations?error_code=provider_overloaded&active_within=7d"],
    )
    api_key_id: str | None = Field(description="The key that saved it.", examples=["key_01jd0z8s3bf6h9kq2m4n6p8r0t"])
    created_at: datetime = Field(examples=[EXAMPLE_TIME])

    @classmethod
    def of(cls, view: SavedView) -> Self:
        return cls(
            id=view.id,
            name=view.name,
            filters=dict(view.filters),
            page=f"/admin/conversations?{urlencode(view.filters, errors='replace')}",
            api_key_id=view.key_id,
            created_at=view.created_at,
        )


class SavedViewPage(View):
    """Saved views, by name."""

    data: list[SavedViewView]
    next_cursor: str | None = Field(
        default=None, description="Always null: all views are on one page.", examples=[None]
    )


@get(
    "/admin/api/views",
    guards=[admin_only],
    summary="List saved views",
    response_description="All views of the tenant, by name.",
    description="Named filters of the list of conversations.",
    tags=["inspection"],
    responses=document_errors(KeyRejected, ScopeMissing, DatabaseUnavailable),
)
async def list_views(
    caller: NamedDependency[SkipValidation[ApiKey]],
    saved_views: NamedDependency[SkipValidation[SavedViews]],
) -> Response[SavedViewPage]:
    """List all views."""
    views = await saved_views.list_views(caller.tenant_id)
    return answer_json(SavedViewPage(data=[SavedViewView.of(view) for view in views]))


@post(
    "/admin/api/views",
    guards=[admin_only],
    status_code=201,
    summary="Save a view",
    response_description="The view.",
    description="Saves filters under a name. Audited.",
    tags=["inspection"],
    responses=document_admin_errors(ViewExists, ViewLimitReached, body=True),
)
async def save_view(
    data: JSONBody[SavedViewBody],
    caller: NamedDependency[SkipValidation[ApiKey]],
    saved_views: NamedDependency[SkipValidation[SavedViews]],
    actor: NamedDependency[SkipValidation[Actor]],
) -> Response[SavedViewView]:
    """Save a view. Rejects unknown filters and values that the list would not accept."""
    for name in data.filters:
        if name not in FILTER_NAMES:
            raise refuse("filters", f"Expected filters among {', '.join(FILTER_NAMES)}")
    _, filled = read_filters(data.filters)
    if not filled:
        raise refuse("filters", "Expected a filter that is not empty")
    view = await saved_views.save_view(caller.tenant_id, clean_name(data.name), filled, actor)
    return answer_json(SavedViewView.of(view), 201)


@delete(
    "/admin/api/views/{view_id:str}",
    guards=[admin_only],
    status_code=204,
    summary="Delete a saved view",
    response_description="The view was deleted.",
    description="Conversations are not affected. Audited.",
    tags=["inspection"],
    responses=document_errors(ViewNotFound, KeyRejected, ScopeMissing, DatabaseUnavailable),
)
async def delete_view(
    view_id: FromPath[str],
    caller: NamedDependency[SkipValidation[ApiKey]],
    saved_views: NamedDependency[SkipValidation[SavedViews]],
    actor: NamedDependency[SkipValidation[Actor]],
) -> None:
    """Delete a view."""
    await saved_views.delete_view(caller.tenant_id, view_id, actor)
