"""Replays over HTTP: made, looked at, stopped, taken away. For operators, under `/admin/api`."""

from collections.abc import AsyncIterator
from typing import Annotated, Final

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
_ONE: Final = document_errors(*_ERRORS, ReplayNotFound)
_BODY: Final = (BodyMalformed, BodyTooLarge, MediaTypeUnsupported)
_TAGS: Final = ["replays"]
_Limit = Annotated[int, QueryParameter(ge=1, le=PAGE_LIMIT)]
_FILE: Final = ResponseSpec(
    data_container=bytes,
    generate_examples=False,
    media_type="application/octet-stream",
    description="JSON, CSV, or tests for promptfoo.",
)


@post(
    "/admin/api/replays",
    guards=[admin_only],
    summary="Make a replay",
    response_description="The replay, or with `dry_run` what it would come to, as status 200.",
    description="Stored conversations once more, through a candidate. The conversations are fixed now, and workers run "
    "it from now on. With `dry_run` nothing is written and nobody is asked.",
    tags=_TAGS,
    responses=document_errors(*_ERRORS, *_BODY, ConversationNotFound, AssistantNotFound, TemplateWorkersBusy),
)
async def create_replay(
    data: JSONBody[ReplayBody],
    caller: NamedDependency[SkipValidation[ApiKey]],
    replay_service: NamedDependency[SkipValidation[ReplayService]],
    actor: NamedDependency[SkipValidation[Actor]],
) -> Response[ReplayView | ReplayEstimateView]:
    """The replay, or its estimate."""
    draft = data.to_draft()
    if data.dry_run:
        plan = await replay_service.plan(caller.tenant_id, draft)
        return answer_json(ReplayEstimateView.of(plan.estimate))
    replay = await replay_service.create(caller.tenant_id, draft, actor=actor)
    return answer_json(ReplayView.of(replay), 201, {"location": f"/admin/api/replays/{replay.id}"})


@get(
    "/admin/api/replays",
    guards=[admin_only],
    summary="All replays",
    response_description="A page of them.",
    description="Newest first. `tenant` names another tenant than the key's, or `all`: that takes the scope "
    "`superadmin`.",
    tags=_TAGS,
    responses=document_errors(*_ERRORS, CursorInvalid),
)
async def list_replays(
    caller: NamedDependency[SkipValidation[ApiKey]],
    replay_service: NamedDependency[SkipValidation[ReplayService]],
    tenant: FromQuery[str | None] = None,
    cursor: FromQuery[str | None] = None,
    limit: _Limit = 20,
) -> Response[ReplayPage]:
    """A page of the list."""
    page = await replay_service.replays.list_replays(choose_tenant(caller, tenant), cursor=cursor, limit=limit)
    return answer_json(ReplayPage(data=[ReplayView.of(item) for item in page.items], next_cursor=page.next_cursor))


@get(
    "/admin/api/replays/{replay_id:str}",
    guards=[admin_only],
    summary="One replay",
    response_description="The replay as it stands.",
    description="Ask again to see how far it is.",
    tags=_TAGS,
    responses=_ONE,
)
async def show_replay(
    replay_id: FromPath[str],
    caller: NamedDependency[SkipValidation[ApiKey]],
    replay_service: NamedDependency[SkipValidation[ReplayService]],
) -> Response[ReplayView]:
    """The replay."""
    return answer_json(ReplayView.of(await replay_service.replays.load_replay(tenant_scope(caller), replay_id)))


@get(
    "/admin/api/replays/{replay_id:str}/report",
    guards=[admin_only],
    summary="What came out, as numbers",
    response_description="The report, as far as the replay is.",
    description="Counts, distributions of the recorded and the candidate's answers, and how sure their means are.",
    tags=_TAGS,
    responses=_ONE,
)
async def report_replay(
    replay_id: FromPath[str],
    caller: NamedDependency[SkipValidation[ApiKey]],
    replay_service: NamedDependency[SkipValidation[ReplayService]],
) -> Response[ReplayReportView]:
    """The report."""
    return answer_json(ReplayReportView.of(await replay_service.replays.report_replay(tenant_scope(caller), replay_id)))


@get(
    "/admin/api/replays/{replay_id:str}/items",
    guards=[admin_only],
    summary="The items of a replay",
    response_description="A page of them.",
    description="Each conversation in each repetition, by number.",
    tags=_TAGS,
    responses=document_errors(*_ERRORS, ReplayNotFound, CursorInvalid),
)
async def list_replay_items(
    replay_id: FromPath[str],
    caller: NamedDependency[SkipValidation[ApiKey]],
    replay_service: NamedDependency[SkipValidation[ReplayService]],
    # `state` is a reserved name of the framework's.
    item_state: Annotated[ItemState | None, QueryParameter(name="state")] = None,
    cursor: FromQuery[str | None] = None,
    limit: _Limit = 20,
) -> Response[ReplayItemPage]:
    """A page of them."""
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
    """Which results, as a query string says it."""
    return ResultFilter(number=item, outcome=outcome, kind=kind, has_failed_assertion=failed_assertion, order=order)


@get(
    "/admin/api/replays/{replay_id:str}/results",
    guards=[admin_only],
    dependencies={"wanted": Provide(provide_wanted, sync_to_thread=False)},
    summary="The results of a replay",
    response_description="A page of them.",
    description="An answer of the candidate's each. `order=worst` begins with what differs most.",
    tags=_TAGS,
    responses=document_errors(*_ERRORS, ReplayNotFound, CursorInvalid),
)
async def list_replay_results(
    replay_id: FromPath[str],
    caller: NamedDependency[SkipValidation[ApiKey]],
    replay_service: NamedDependency[SkipValidation[ReplayService]],
    wanted: NamedDependency[SkipValidation[ResultFilter]],
    cursor: FromQuery[str | None] = None,
    limit: _Limit = 20,
) -> Response[ReplayResultPage]:
    """A page of them."""
    page = await replay_service.replays.list_results(
        tenant_scope(caller), replay_id, wanted=wanted, cursor=cursor, limit=limit
    )
    data = [ReplayResultView.of(stored) for stored in page.items]
    return answer_json(ReplayResultPage(data=data, next_cursor=page.next_cursor))


@get(
    "/admin/api/replays/{replay_id:str}/export",
    guards=[admin_only],
    media_type="application/octet-stream",
    summary="Export a replay",
    response_description="The file.",
    description="`json`: the replay, its report, and every result with both answers. `csv`: a row an answer. "
    "`promptfoo`: a test case for each recorded answer.",
    tags=_TAGS,
    responses={200: _FILE, **_ONE},
)
async def export_replay(
    replay_id: FromPath[str],
    caller: NamedDependency[SkipValidation[ApiKey]],
    replay_service: NamedDependency[SkipValidation[ReplayService]],
    form: Annotated[ExportFormat, QueryParameter(name="format")] = ExportFormat.JSON,
) -> Stream:
    """The file as it is read. What can be refused is refused before its first byte."""
    return await answer_export(replay_service.replays, tenant_scope(caller), replay_id, form)


@post(
    "/admin/api/replays/{replay_id:str}/pause",
    guards=[admin_only],
    status_code=200,
    summary="Pause a replay",
    response_description="The replay.",
    description="Calls on their way are finished, no other leaves. Pausing twice changes nothing.",
    tags=_TAGS,
    responses=document_errors(*_ERRORS, ReplayNotFound, ReplayEnded),
)
async def pause_replay(
    replay_id: FromPath[str],
    caller: NamedDependency[SkipValidation[ApiKey]],
    replay_service: NamedDependency[SkipValidation[ReplayService]],
    actor: NamedDependency[SkipValidation[Actor]],
) -> Response[ReplayView]:
    """The replay."""
    return answer_json(
        ReplayView.of(await replay_service.replays.pause_replay(tenant_scope(caller), replay_id, actor=actor))
    )


@post(
    "/admin/api/replays/{replay_id:str}/continue",
    guards=[admin_only],
    status_code=200,
    summary="Continue a replay",
    response_description="The replay.",
    description="After a pause, or with a larger budget after it was spent: what was skipped waits again. Limits "
    "that are left out stay as they are; without a body all do.",
    tags=_TAGS,
    responses=document_errors(*_ERRORS, *_BODY, ReplayNotFound, ReplayEnded),
)
async def continue_replay(
    replay_id: FromPath[str],
    caller: NamedDependency[SkipValidation[ApiKey]],
    replay_service: NamedDependency[SkipValidation[ReplayService]],
    actor: NamedDependency[SkipValidation[Actor]],
    data: JSONBody[ContinueBody | None] = None,
) -> Response[ReplayView]:
    """The replay."""
    limits = None
    if data is not None and data.limits is not None:
        replay = await replay_service.replays.load_replay(tenant_scope(caller), replay_id)
        limits = data.limits.lay_over(replay.draft.limits)
    replay = await replay_service.continue_(tenant_scope(caller), replay_id, actor=actor, limits=limits)
    return answer_json(ReplayView.of(replay))


@post(
    "/admin/api/replays/{replay_id:str}/cancel",
    guards=[admin_only],
    status_code=200,
    summary="Cancel a replay",
    response_description="The replay.",
    description="Items that wait are cancelled now, those that run when their call is over. What came out stays.",
    tags=_TAGS,
    responses=document_errors(*_ERRORS, ReplayNotFound, ReplayEnded),
)
async def cancel_replay(
    replay_id: FromPath[str],
    caller: NamedDependency[SkipValidation[ApiKey]],
    replay_service: NamedDependency[SkipValidation[ReplayService]],
    actor: NamedDependency[SkipValidation[Actor]],
) -> Response[ReplayView]:
    """The replay."""
    return answer_json(
        ReplayView.of(await replay_service.replays.cancel_replay(tenant_scope(caller), replay_id, actor=actor))
    )


@delete(
    "/admin/api/replays/{replay_id:str}",
    guards=[admin_only],
    status_code=200,
    summary="Erase a replay",
    response_description="The rows by table.",
    description="With its results and all that its candidate was asked and said. The sources are not touched. With "
    "`dry_run` nothing is erased.",
    tags=_TAGS,
    responses=document_errors(*_ERRORS, ReplayNotFound, ReplayBusy),
)
async def erase_replay(
    replay_id: FromPath[str],
    caller: NamedDependency[SkipValidation[ApiKey]],
    replay_service: NamedDependency[SkipValidation[ReplayService]],
    actor: NamedDependency[SkipValidation[Actor]],
    *,
    dry_run: FromQuery[bool] = False,
) -> Response[ErasureView]:
    """What went with it."""
    report = await replay_service.replays.erase_replay(tenant_scope(caller), replay_id, actor=actor, dry_run=dry_run)
    return answer_json(ErasureView.showing(report, dry_run=dry_run))


async def answer_export(replays: Replays, tenant_id: str | None, replay_id: str, form: ExportFormat) -> Stream:
    """The answer with a file. Raises `ReplayNotFound` before anything is sent."""
    replay = await replays.load_replay(tenant_id, replay_id)
    pieces = write_export(replays, replay, form)
    first = await anext(pieces)
    # An id that was found is one of ours, and safe in a header.
    name = f"{replay.id}.{FILE_ENDINGS[form]}"
    headers = {"content-disposition": f'attachment; filename="{name}"', "cache-control": "no-store"}
    return Stream(_from(first, pieces), media_type=MEDIA_TYPES[form], headers=headers)


async def _from(first: bytes, others: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in others:
        yield piece
