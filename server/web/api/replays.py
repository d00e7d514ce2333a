"""Replays for operators, under `/admin/api`."""

from collections.abc import AsyncIterator
from typing import Annotated, Any, Final

from litestar import Response, delete, get, post
from litestar.di import NamedDependency, Provide
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter, SkipValidation
from litestar.response import Stream

from server.conversation.api_key import ApiKey
from server.conversation.audit import Actor
from server.conversation.errors import (
    AssistantNotFound,
    BodyMalformed,
    BodyTooLarge,
    ConversationNotFound,
    CursorInvalid,
    DatabaseUnavailable,
    KeyRejected,
    MediaTypeUnsupported,
    ReplayBusy,
    ReplayEnded,
    ReplayNotFound,
    ScopeMissing,
    StrataError,
    TemplateWorkersBusy,
    ValidationFailed,
)
from server.conversation.page import PAGE_LIMIT
from server.replay.rerun.export import FILE_ENDINGS, MEDIA_TYPES, ExportFormat
from server.replay.rerun.export import export_replay as write_export
from server.replay.rerun.port import Replays
from server.replay.rerun.replay import ItemState
from server.replay.rerun.result import DivergenceKind, Outcome, ResultFilter, ResultOrder
from server.replay.rerun.service import ReplayService
from server.web.api.actions import ErasureView
from server.web.api.inspection import choose_tenant, tenant_scope
from server.web.api.replay_bodies import ContinueBody, ReplayBody
from server.web.api.replay_views import (
    ReplayEstimateView,
    ReplayItemPage,
    ReplayItemView,
    ReplayPage,
    ReplayReportView,
    ReplayResultPage,
    ReplayResultView,
    ReplayView,
)
from server.web.auth import admin_only
from server.web.errors import document_errors
from server.web.json_text import answer_json

_ERRORS: Final = (ValidationFailed, KeyRejected, ScopeMissing, DatabaseUnavailable)
_BODY: Final = (BodyMalformed, BodyTooLarge, MediaTypeUnsupported)
_REPLAY: Final = "/{replay_id:str}"
_Limit = Annotated[int, QueryParameter(ge=1, le=PAGE_LIMIT)]
_FILE: Final = ResponseSpec(
    data_container=bytes,
    generate_examples=False,
    media_type="application/octet-stream",
    description="JSON, CSV, or tests for promptfoo.",
)


def _route(path: str, *errors: type[StrataError], **options: Any) -> dict[str, Any]:
    """Return the options of a route under `/admin/api/replays`, which fails with these errors."""
    return {
        "path": f"/admin/api/replays{path}",
        "guards": [admin_only],
        "tags": ["replays"],
        "responses": document_errors(*_ERRORS, *errors),
        **options,
    }


@post(
    **_route("", *_BODY, ConversationNotFound, AssistantNotFound, TemplateWorkersBusy),
    summary="Create a replay",
    response_description="The replay, or with `dry_run` its estimate, with status 200.",
    description="Sends stored conversations to a candidate and compares the answers. The conversations are selected "
    "now, and workers start to run the replay. With `dry_run` nothing is written and no provider is called.",
)
async def create_replay(
    data: JSONBody[ReplayBody],
    caller: NamedDependency[SkipValidation[ApiKey]],
    replay_service: NamedDependency[SkipValidation[ReplayService]],
    actor: NamedDependency[SkipValidation[Actor]],
) -> Response[ReplayView | ReplayEstimateView]:
    """Create the replay, or return its estimate."""
    draft = data.to_draft()
    if data.dry_run:
        plan = await replay_service.plan(caller.tenant_id, draft)
        return answer_json(ReplayEstimateView.of(plan.estimate))
    replay = await replay_service.create(caller.tenant_id, draft, actor=actor)
    return answer_json(ReplayView.of(replay), 201, {"location": f"/admin/api/replays/{replay.id}"})


@get(
    **_route("", CursorInvalid),
    summary="List replays",
    response_description="A page of the list.",
    description="Newest first. `tenant` selects another tenant, or `all`, and requires the scope `superadmin`.",
)
async def list_replays(
    caller: NamedDependency[SkipValidation[ApiKey]],
    replay_service: NamedDependency[SkipValidation[ReplayService]],
    tenant: FromQuery[str | None] = None,
    cursor: FromQuery[str | None] = None,
    limit: _Limit = 20,
) -> Response[ReplayPage]:
    """Return a page of the list."""
    page = await replay_service.replays.list_replays(choose_tenant(caller, tenant), cursor=cursor, limit=limit)
    return answer_json(ReplayPage(data=[ReplayView.of(item) for item in page.items], next_cursor=page.next_cursor))


@get(
    **_route(_REPLAY, ReplayNotFound),
    summary="Show a replay",
    response_description="The replay.",
    description="The state, the progress and the spending of a replay.",
)
async def show_replay(
    replay_id: FromPath[str],
    caller: NamedDependency[SkipValidation[ApiKey]],
    replay_service: NamedDependency[SkipValidation[ReplayService]],
) -> Response[ReplayView]:
    """Return the replay."""
    return answer_json(ReplayView.of(await replay_service.replays.load_replay(tenant_scope(caller), replay_id)))


@get(
    **_route(f"{_REPLAY}/report", ReplayNotFound),
    summary="Show the report of a replay",
    response_description="The report of the results that exist now.",
    description="Counts, distributions of the recorded and the candidate's answers, and confidence intervals of means.",
)
async def report_replay(
    replay_id: FromPath[str],
    caller: NamedDependency[SkipValidation[ApiKey]],
    replay_service: NamedDependency[SkipValidation[ReplayService]],
) -> Response[ReplayReportView]:
    """Return the report."""
    return answer_json(ReplayReportView.of(await replay_service.replays.report_replay(tenant_scope(caller), replay_id)))


@get(
    **_route(f"{_REPLAY}/items", ReplayNotFound, CursorInvalid),
    summary="List the items of a replay",
    response_description="A page of the list.",
    description="One item per conversation and repetition, by number.",
)
async def list_replay_items(
    replay_id: FromPath[str],
    caller: NamedDependency[SkipValidation[ApiKey]],
    replay_service: NamedDependency[SkipValidation[ReplayService]],
    # `state` is a reserved name of the framework.
    item_state: Annotated[ItemState | None, QueryParameter(name="state")] = None,
    cursor: FromQuery[str | None] = None,
    limit: _Limit = 20,
) -> Response[ReplayItemPage]:
    """Return a page of the list."""
    page = await replay_service.replays.list_items(
        tenant_scope(caller), replay_id, state=item_state, cursor=cursor, limit=limit
    )
    data = [ReplayItemView.of(item) for item in page.items]
    return answer_json(ReplayItemPage(data=data, next_cursor=page.next_cursor))


def provide_wanted(
    *,
    item: Annotated[int | None, QueryParameter(ge=1, le=2**31 - 1)] = None,
    outcome: FromQuery[Outcome | None] = None,
    kind: FromQuery[DivergenceKind | None] = None,
    order: FromQuery[ResultOrder] = ResultOrder.POSITION,
    failed_assertion: FromQuery[bool] = False,
) -> ResultFilter:
    """Build the filter of results from the query string."""
    return ResultFilter(number=item, outcome=outcome, kind=kind, has_failed_assertion=failed_assertion, order=order)


@get(
    **_route(f"{_REPLAY}/results", ReplayNotFound, CursorInvalid),
    dependencies={"wanted": Provide(provide_wanted, sync_to_thread=False)},
    summary="List the results of a replay",
    response_description="A page of the list.",
    description="One result per answer of the candidate. `order=worst` lists the most severe differences first.",
)
async def list_replay_results(
    replay_id: FromPath[str],
    caller: NamedDependency[SkipValidation[ApiKey]],
    replay_service: NamedDependency[SkipValidation[ReplayService]],
    wanted: NamedDependency[SkipValidation[ResultFilter]],
    cursor: FromQuery[str | None] = None,
    limit: _Limit = 20,
) -> Response[ReplayResultPage]:
    """Return a page of the list."""
    page = await replay_service.replays.list_results(
        tenant_scope(caller), replay_id, wanted=wanted, cursor=cursor, limit=limit
    )
    data = [ReplayResultView.of(stored) for stored in page.items]
    return answer_json(ReplayResultPage(data=data, next_cursor=page.next_cursor))


@get(
    **_route(f"{_REPLAY}/export", responses={200: _FILE, **document_errors(*_ERRORS, ReplayNotFound)}),
    media_type="application/octet-stream",
    summary="Export a replay",
    response_description="The file.",
    description="`json`: the replay, its report, and every result with both answers. `csv`: one row per answer. "
    "`promptfoo`: one test case per recorded answer.",
)
async def export_replay(
    replay_id: FromPath[str],
    caller: NamedDependency[SkipValidation[ApiKey]],
    replay_service: NamedDependency[SkipValidation[ReplayService]],
    form: Annotated[ExportFormat, QueryParameter(name="format")] = ExportFormat.JSON,
) -> Stream:
    """Stream the file. Errors are raised before the first byte is sent."""
    return await answer_export(replay_service.replays, tenant_scope(caller), replay_id, form)


@post(
    **_route(f"{_REPLAY}/pause", ReplayNotFound, ReplayEnded),
    status_code=200,
    summary="Pause a replay",
    response_description="The replay.",
    description="Open calls are finished, and no other call is sent. Pausing twice changes nothing.",
)
async def pause_replay(
    replay_id: FromPath[str],
    caller: NamedDependency[SkipValidation[ApiKey]],
    replay_service: NamedDependency[SkipValidation[ReplayService]],
    actor: NamedDependency[SkipValidation[Actor]],
) -> Response[ReplayView]:
    """Pause the replay and return it."""
    replay = await replay_service.replays.pause_replay(tenant_scope(caller), replay_id, actor=actor)
    return answer_json(ReplayView.of(replay))


@post(
    **_route(f"{_REPLAY}/continue", *_BODY, ReplayNotFound, ReplayEnded),
    status_code=200,
    summary="Continue a replay",
    response_description="The replay.",
    description="Continues a paused replay, or with a larger budget one that its budget stopped; skipped items then "
    "wait again. Limits that are left out do not change, and without a body none does.",
)
async def continue_replay(
    replay_id: FromPath[str],
    caller: NamedDependency[SkipValidation[ApiKey]],
    replay_service: NamedDependency[SkipValidation[ReplayService]],
    actor: NamedDependency[SkipValidation[Actor]],
    data: JSONBody[ContinueBody | None] = None,
) -> Response[ReplayView]:
    """Continue the replay and return it."""
    limits = None
    if data is not None and data.limits is not None:
        replay = await replay_service.replays.load_replay(tenant_scope(caller), replay_id)
        limits = data.limits.merge_into(replay.draft.limits)
    replay = await replay_service.continue_(tenant_scope(caller), replay_id, actor=actor, limits=limits)
    return answer_json(ReplayView.of(replay))


@post(
    **_route(f"{_REPLAY}/cancel", ReplayNotFound, ReplayEnded),
    status_code=200,
    summary="Cancel a replay",
    response_description="The replay.",
    description="Waiting items are cancelled now, running items when their call has ended. Results are kept.",
)
async def cancel_replay(
    replay_id: FromPath[str],
    caller: NamedDependency[SkipValidation[ApiKey]],
    replay_service: NamedDependency[SkipValidation[ReplayService]],
    actor: NamedDependency[SkipValidation[Actor]],
) -> Response[ReplayView]:
    """Cancel the replay and return it."""
    replay = await replay_service.replays.cancel_replay(tenant_scope(caller), replay_id, actor=actor)
    return answer_json(ReplayView.of(replay))


@delete(
    **_route(_REPLAY, ReplayNotFound, ReplayBusy),
    status_code=200,
    summary="Erase a replay",
    response_description="The number of erased rows by table.",
    description="Erases the replay, its results and its replay conversations. The recorded conversations are not "
    "changed. With `dry_run` nothing is erased.",
)
async def erase_replay(
    replay_id: FromPath[str],
    caller: NamedDependency[SkipValidation[ApiKey]],
    replay_service: NamedDependency[SkipValidation[ReplayService]],
    actor: NamedDependency[SkipValidation[Actor]],
    *,
    dry_run: FromQuery[bool] = False,
) -> Response[ErasureView]:
    """Erase the replay and return the numbers of erased rows."""
    report = await replay_service.replays.erase_replay(tenant_scope(caller), replay_id, actor=actor, dry_run=dry_run)
    return answer_json(ErasureView.showing(report, dry_run=dry_run))


async def answer_export(replays: Replays, tenant_id: str | None, replay_id: str, form: ExportFormat) -> Stream:
    """Answer with a file. Raises `ReplayNotFound` before anything is sent."""
    replay = await replays.load_replay(tenant_id, replay_id)
    parts = write_export(replays, replay, form)
    first = await anext(parts)
    # The id of an existing replay is safe in a header.
    name = f"{replay.id}.{FILE_ENDINGS[form]}"
    headers = {"content-disposition": f'attachment; filename="{name}"', "cache-control": "no-store"}
    return Stream(_stream(first, parts), media_type=MEDIA_TYPES[form], headers=headers)


async def _stream(first: bytes, others: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for part in others:
        yield part
