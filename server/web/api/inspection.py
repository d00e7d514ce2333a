"""Conversations, timelines and calls for operators, under `/admin/api`."""

from typing import Annotated, Final

from litestar import Response, get
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, FromQuery, QueryParameter, SkipValidation

from server.conversation.api_key import ApiKey, Scope
from server.conversation.errors import (
    CallNotFound,
    ConversationNotFound,
    CursorInvalid,
    ScopeMissing,
)
from server.conversation.page import PAGE_LIMIT
from server.inspection.calls import CallInspector
from server.inspection.conversation_list import InspectionFilter
from server.inspection.port import Inspector
from server.inspection.timeline import TIMELINE_LIMIT
from server.web.api.call_views import CallView
from server.web.api.inspection_filters import FILTERS
from server.web.api.inspection_views import InspectionPageView, TimelineView
from server.web.auth import admin_only
from server.web.errors import document_admin_errors
from server.web.json_text import answer_json
from server.web.validation import refuse

ALL_TENANTS: Final = "all"
_OCTETS: Final = "application/octet-stream"


def choose_tenant(caller: ApiKey, tenant: str | None) -> str | None:
    """Return the tenant of a list, or None for all. Raises `ScopeMissing` for another tenant without the scope."""
    if tenant is None or tenant == caller.tenant_id:
        return caller.tenant_id
    if not caller.opens(Scope.SUPERADMIN):
        raise ScopeMissing(scope=Scope.SUPERADMIN.value)
    return None if tenant == ALL_TENANTS else tenant


def tenant_scope(caller: ApiKey) -> str | None:
    """Return the tenant whose conversations the caller may open, or None for all."""
    return None if caller.opens(Scope.SUPERADMIN) else caller.tenant_id


@get(
    "/admin/api/conversations",
    guards=[admin_only],
    dependencies=FILTERS,
    summary="List conversations by activity",
    response_description="A page of the list.",
    description="Latest activity first. All filters can be combined. `text` are words that one turn contains, `phrase` "
    "is a literal text. Facts are counted a few seconds after the turns. Counts are estimates unless `count_exact` is "
    "true. `tenant` selects another tenant, or `all`, and requires the scope `superadmin`.",
    tags=["inspection"],
    responses=document_admin_errors(CursorInvalid),
)
async def inspect_conversations(
    caller: NamedDependency[SkipValidation[ApiKey]],
    inspector: NamedDependency[SkipValidation[Inspector]],
    filters: NamedDependency[SkipValidation[InspectionFilter]],
    tenant: FromQuery[str | None] = None,
    cursor: FromQuery[str | None] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_LIMIT)] = 20,
) -> Response[InspectionPageView]:
    """List conversations."""
    page = await inspector.list_conversations(
        choose_tenant(caller, tenant), filters=filters, cursor=cursor, limit=limit
    )
    return answer_json(InspectionPageView.of(page))


@get(
    "/admin/api/conversations/{conversation_id:str}",
    guards=[admin_only],
    summary="Show a timeline",
    response_description="A part of the timeline.",
    description="The newest turns, or those after `after`, before `before` or around `around`, in order, each with its "
    "calls and its context; the running turn; and the compactions. Fewer turns than `limit` are returned if they are "
    "very large.",
    tags=["inspection"],
    responses=document_admin_errors(ConversationNotFound),
)
async def inspect_conversation(
    conversation_id: FromPath[str],
    caller: NamedDependency[SkipValidation[ApiKey]],
    inspector: NamedDependency[SkipValidation[Inspector]],
    after: Annotated[int | None, QueryParameter(ge=0)] = None,
    before: Annotated[int | None, QueryParameter(ge=0)] = None,
    around: Annotated[int | None, QueryParameter(ge=0)] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=TIMELINE_LIMIT)] = 50,
) -> Response[TimelineView]:
    """Load a part of the timeline."""
    if sum(seq is not None for seq in (after, before, around)) > 1:
        raise refuse("around", "Expected one of `after`, `before` and `around`", source="query")
    timeline = await inspector.load_timeline(
        tenant_scope(caller), conversation_id, after_seq=after, before_seq=before, around_seq=around, limit=limit
    )
    return answer_json(TimelineView.of(timeline))


@get(
    "/admin/api/conversations/{conversation_id:str}/calls/{turn_seq:int}/{attempt:int}",
    guards=[admin_only],
    summary="Show a call",
    response_description="The call.",
    description="The four layers, the manifest, the rebuilt request compared with its stored hash, the response as "
    "frames and events, signatures, repairs, caching, cost by bucket, and the difference from the request of the "
    "previous call. `turn_seq` is negative for calls that belong to no turn.",
    tags=["inspection"],
    responses=document_admin_errors(ConversationNotFound, CallNotFound),
)
async def inspect_call(
    conversation_id: FromPath[str],
    turn_seq: FromPath[int],
    attempt: FromPath[int],
    caller: NamedDependency[SkipValidation[ApiKey]],
    call_inspector: NamedDependency[SkipValidation[CallInspector]],
) -> Response[CallView]:
    """Load a call."""
    found = await call_inspector.inspect_call(tenant_scope(caller), conversation_id, turn_seq, attempt)
    return answer_json(CallView.of(found))


async def show_response(
    conversation_id: FromPath[str],
    turn_seq: FromPath[int],
    attempt: FromPath[int],
    caller: NamedDependency[SkipValidation[ApiKey]],
    inspector: NamedDependency[SkipValidation[Inspector]],
) -> Response[bytes]:
    """Download the raw response."""
    stored = await inspector.load_stored_call(tenant_scope(caller), conversation_id, turn_seq, attempt)
    end = stored.call.end
    raw = b"" if end is None or end.raw_response is None else end.raw_response
    return answer_bytes(raw, f"response-{turn_seq}-{attempt}")


async def show_request(
    conversation_id: FromPath[str],
    turn_seq: FromPath[int],
    attempt: FromPath[int],
    caller: NamedDependency[SkipValidation[ApiKey]],
    call_inspector: NamedDependency[SkipValidation[CallInspector]],
) -> Response[bytes]:
    """Download the rebuilt request."""
    rebuilt = await call_inspector.rebuild_request(tenant_scope(caller), conversation_id, turn_seq, attempt)
    name = f"request-{turn_seq}-{attempt}"
    return answer_bytes(rebuilt.body or b"", name, {"x-strata-proof": rebuilt.proof.value})


def answer_bytes(body: bytes, name: str, headers: dict[str, str] | None = None) -> Response[bytes]:
    """Answer with a download that no browser shows as a page."""
    shared = {
        "content-disposition": f'attachment; filename="{name}.bin"',
        "cache-control": "no-store",
        "x-content-type-options": "nosniff",
    }
    return Response(content=body, media_type=_OCTETS, headers={**shared, **(headers or {})})


_CALL_PATH: Final = "/admin/api/conversations/{conversation_id:str}/calls/{turn_seq:int}/{attempt:int}"
_BYTES: Final = ResponseSpec(
    data_container=bytes, generate_examples=False, media_type=_OCTETS, description="The bytes."
)
ROUTES: Final = (
    inspect_conversations,
    inspect_conversation,
    inspect_call,
    # The pages serve the same handlers under their own paths.
    get(
        f"{_CALL_PATH}/response",
        guards=[admin_only],
        media_type=_OCTETS,
        summary="Download the raw response of a call",
        response_description="The bytes as received.",
        description="All bytes of the body, including signatures. Empty if none were received or retention removed "
        "them.",
        tags=["inspection"],
        responses={200: _BYTES, **document_admin_errors(ConversationNotFound, CallNotFound)},
    )(show_response),
    get(
        f"{_CALL_PATH}/request",
        guards=[admin_only],
        media_type=_OCTETS,
        summary="Download the request of a call",
        response_description="The bytes, rebuilt from stored data.",
        description="The header `x-strata-proof` is `equal` if the bytes have the stored hash, `different` if not, and "
        "`impossible` if the request cannot be rebuilt: the body is then empty.",
        tags=["inspection"],
        responses={200: _BYTES, **document_admin_errors(ConversationNotFound, CallNotFound)},
    )(show_request),
)
