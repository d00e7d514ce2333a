"""Fork, cancel, compact, undo, erase and export: one handler per action, for clients and for operators.

Clients can also list compactions.

A handler gets `actions`, which are bound to a tenant. Under `/v1` it is the tenant of the key. Under `/admin/api` it is
the tenant of the conversation, as far as the key may act on it, and the actions are audited. The pages under `/admin`
use the same `actions` (`OPERATOR_ACTIONS`) and answer with redirects.
"""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Self

from litestar import Response, delete, get, post
from litestar.datastructures import ResponseHeader
from litestar.di import NamedDependency, Provide
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter, SkipValidation
from litestar.response import Stream
from pydantic import ConfigDict, Field

from server.archive.file import ARCHIVE_MEDIA_TYPE
from server.compaction.compactor import Compactor
from server.compaction.report import CompactionOutcome
from server.conversation.api_key import ApiKey
from server.conversation.audit import Actor, AuditLog
from server.conversation.errors import (
    CompactionNotFound,
    ConversationBusy,
    ConversationNotFound,
    CursorInvalid,
    EpochMoved,
    StrataError,
    SummaryUnavailable,
    TurnNotFound,
    TurnNotRunning,
)
from server.conversation.page import PAGE_LIMIT
from server.conversation.store import ErasureReport, Store
from server.inspection.actions import Archives, Audit, ConversationActions
from server.inspection.port import Inspector
from server.turns.service import TurnService
from server.web.api.inspection import tenant_scope
from server.web.api.turns import ACCEPTED, answer_running, view_end
from server.web.api.views import CONVERSATION_ID, CompactionView, ConversationView, PageView, TurnAnswer, View
from server.web.auth import admin_only, client_only
from server.web.body import MAX_BIGINT, Body
from server.web.errors import document_admin_errors, document_client_errors
from server.web.headers import write_etag
from server.web.json_text import answer_json

ETAG: Final = [ResponseHeader(name="etag", description="The revision, in quotes.", documentation_only=True)]

_REPORT_EXAMPLE: Final[dict[str, Any]] = {
    "conversation_id": CONVERSATION_ID,
    "outcome": "compacted",
    "reason": "carrying_cost",
    "dry_run": False,
    "epoch": 2,
    "first_seq": 1,
    "last_seq": 12,
    "moved_tokens": 2400,
    "segment_tokens": 1300,
    "request_tokens": 4100,
    "saved_tokens_per_call": 1900.0,
    "saved_usd_per_call": 0.0038,
    "thinking_kept": True,
    "window_short": False,
    "blocked": False,
}


class ForkBody(Body):
    """Where the new conversation branches off."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"at_seq": 4}]})

    at_seq: int = Field(ge=1, le=MAX_BIGINT, description="The last turn that both conversations share.")


class CancelBody(Body):
    """Which turn to cancel."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"turn_seq": 2}]})

    turn_seq: int | None = Field(
        default=None,
        ge=1,
        le=MAX_BIGINT,
        description="The `seq` of the answer. Keeps a late request from cancelling the next turn.",
    )


class CompactionBody(Body):
    """How to compact."""

    model_config = ConfigDict(json_schema_extra={"examples": [{}, {"dry_run": True}, {"force": True}]})

    dry_run: bool = Field(default=False, description="Change nothing; report what would be done.")
    force: bool = Field(default=False, description="Move every exchange that may be moved, regardless of the policy.")


class CompactionReportView(View):
    """What was done, or would be done. Token counts are estimates."""

    model_config = ConfigDict(json_schema_extra={"examples": [_REPORT_EXAMPLE]})

    conversation_id: str
    outcome: CompactionOutcome = Field(description="The result.")
    reason: str = Field(description="Why the conversation was compacted, or why not.")
    dry_run: bool = Field(validation_alias="is_dry_run")
    epoch: int = Field(description="The epoch of the conversation afterwards.")
    first_seq: int | None = Field(description="First of the turns that were moved.")
    last_seq: int | None = Field(description="Last of the turns that were moved.")
    moved_tokens: int = Field(description="Size of these turns as messages.")
    segment_tokens: int = Field(description="Size of these turns as history.")
    request_tokens: int | None = Field(description="Size of the next request, without the new task.")
    saved_tokens_per_call: float = Field(description="In uncached input tokens.")
    saved_usd_per_call: float | None = Field(description="Null if the price is not known.")
    thinking_kept: bool = Field(description="False: the remaining turns are sent without their thinking.")
    window_short: bool = Field(
        validation_alias="is_window_short", description="Requests are close to the size of the model's window."
    )
    blocked: bool = Field(
        validation_alias="is_blocked", description="The conversation has to be compacted and cannot be."
    )


class CompactionPage(PageView[CompactionView]):
    """Compactions, newest first."""


class ErasureView(View):
    """The rows that were erased, or would be."""

    dry_run: bool = Field(examples=[True])
    rows: dict[str, int] = Field(description="Number of rows by table.", examples=[{"conversations": 1, "turns": 2}])
    stored_bytes: int | None = Field(
        description="Size of these rows in the database. Null unless it is a dry run.", examples=[48200]
    )

    @classmethod
    def showing(cls, report: ErasureReport, *, dry_run: bool) -> Self:
        return cls(dry_run=dry_run, rows=dict(report.rows), stored_bytes=report.stored_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Templates of the `location` headers."""

    conversation: str
    turn: str


_CLIENT_LINKS: Final = Links(
    conversation="/v1/conversations/{conversation_id}", turn="/v1/conversations/{conversation_id}/turns/{seq}"
)
_OPERATOR_LINKS: Final = Links(
    conversation="/admin/api/conversations/{conversation_id}",
    turn="/admin/api/conversations/{conversation_id}?around={seq}",
)


async def provide_client_actions(
    caller: NamedDependency[SkipValidation[ApiKey]],
    store: NamedDependency[SkipValidation[Store]],
    turn_service: NamedDependency[SkipValidation[TurnService]],
    compactor: NamedDependency[SkipValidation[Compactor]],
    archives: NamedDependency[SkipValidation[Archives]],
) -> ConversationActions:
    """Return the actions of a client on the conversations of its own tenant. They are not audited."""
    return ConversationActions(
        tenant_id=caller.tenant_id,
        audit=None,
        compactor=compactor,
        store=store,
        turn_service=turn_service,
        archives=archives,
    )


async def provide_operator_actions(
    conversation_id: FromPath[str],
    caller: NamedDependency[SkipValidation[ApiKey]],
    actor: NamedDependency[SkipValidation[Actor]],
    inspector: NamedDependency[SkipValidation[Inspector]],
    audit_log: NamedDependency[SkipValidation[AuditLog]],
    client_actions: NamedDependency[SkipValidation[ConversationActions]],
) -> ConversationActions:
    """Return the audited actions of an operator, in the tenant of the conversation if the key reaches all tenants.

    If the conversation does not exist, the tenant is the key's own, in which the action does not find it either.
    """
    tenant_id = tenant_scope(caller) or await inspector.find_tenant(conversation_id) or caller.tenant_id
    audit = Audit(log=audit_log, tenant_id=tenant_id, actor=actor)
    return replace(client_actions, tenant_id=tenant_id, audit=audit)


CLIENT_ACTIONS: Final = {
    "actions": Provide(provide_client_actions),
    "links": Provide(lambda: _CLIENT_LINKS, sync_to_thread=False),
}
OPERATOR_ACTIONS: Final = {
    "client_actions": Provide(provide_client_actions),
    "actions": Provide(provide_operator_actions),
    "links": Provide(lambda: _OPERATOR_LINKS, sync_to_thread=False),
}
"""For routes with a `conversation_id`."""


async def fork_conversation(
    conversation_id: FromPath[str],
    data: JSONBody[ForkBody],
    actions: NamedDependency[SkipValidation[ConversationActions]],
    links: NamedDependency[SkipValidation[Links]],
) -> Response[ConversationView]:
    """Answer 201 with the new conversation."""
    fork = await actions.fork(conversation_id, data.at_seq)
    headers = {"etag": write_etag(fork.revision), "location": links.conversation.format(conversation_id=fork.id)}
    return answer_json(ConversationView.of(fork), 201, headers)


async def cancel_turn(
    conversation_id: FromPath[str],
    actions: NamedDependency[SkipValidation[ConversationActions]],
    links: NamedDependency[SkipValidation[Links]],
    data: JSONBody[CancelBody | None] = None,
) -> Response[TurnAnswer]:
    """Answer 200 with the ended turn, or 202 if it is still running."""
    cancelled = await actions.cancel(conversation_id, None if data is None else data.turn_seq)
    if cancelled.ended is not None:
        return answer_json(view_end(cancelled.ended))
    conversation = await actions.store.load_conversation(actions.tenant_id, conversation_id)
    location = links.turn.format(conversation_id=conversation_id, seq=cancelled.seq)
    return answer_running(cancelled.seq, conversation, {"location": location})


async def compact_conversation(
    conversation_id: FromPath[str],
    data: JSONBody[CompactionBody],
    actions: NamedDependency[SkipValidation[ConversationActions]],
) -> Response[CompactionReportView]:
    report = await actions.compact(conversation_id, force=data.force, dry_run=data.dry_run)
    return answer_json(CompactionReportView.of(report))


async def undo_compaction(
    conversation_id: FromPath[str], actions: NamedDependency[SkipValidation[ConversationActions]]
) -> Response[CompactionReportView]:
    return answer_json(CompactionReportView.of(await actions.undo_compaction(conversation_id)))


async def erase_conversation(
    conversation_id: FromPath[str],
    actions: NamedDependency[SkipValidation[ConversationActions]],
    *,
    dry_run: FromQuery[bool] = False,
) -> Response[ErasureView]:
    return answer_json(ErasureView.showing(await actions.erase(conversation_id, dry_run=dry_run), dry_run=dry_run))


async def export_conversation(
    conversation_id: FromPath[str], actions: NamedDependency[SkipValidation[ConversationActions]]
) -> Stream:
    """Stream the archive as a download. Errors are raised before the answer begins."""
    lines = actions.export(conversation_id)
    first = await anext(lines)

    async def all_lines() -> AsyncIterator[bytes]:
        yield first
        async for line in lines:
            yield line

    headers = {
        # The id was found in the database, so it is safe in a header.
        "content-disposition": f'attachment; filename="{conversation_id}.jsonl"',
        "cache-control": "no-store",
        "x-content-type-options": "nosniff",
    }
    return Stream(all_lines(), media_type=ARCHIVE_MEDIA_TYPE, headers=headers)


@get(
    "/v1/conversations/{conversation_id:str}/compactions",
    guards=[client_only],
    summary="List the compactions of a conversation",
    response_description="A page of compactions.",
    description="Newest first, including summaries and compactions that were undone.",
    tags=["conversations"],
    responses=document_client_errors(ConversationNotFound, CursorInvalid),
)
async def list_compactions(
    conversation_id: FromPath[str],
    caller: NamedDependency[SkipValidation[ApiKey]],
    store: NamedDependency[SkipValidation[Store]],
    cursor: FromQuery[str | None] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_LIMIT)] = 20,
) -> Response[CompactionPage]:
    page = await store.list_epochs(caller.tenant_id, conversation_id, cursor=cursor, limit=limit)
    return answer_json(
        CompactionPage(data=[CompactionView.of(item) for item in page.items], next_cursor=page.next_cursor)
    )


_Handler = Callable[..., Any]


def _route_for_both(  # noqa: PLR0913  reason: the texts of the OpenAPI document
    method: type[post | delete],
    path: str,
    handler: _Handler,
    *,
    tag: str,
    summary: str,
    response_description: str,
    description: str,
    audit_description: str = "The action is recorded in the audit log.",
    errors: tuple[type[StrataError], ...],
    responses: dict[int, ResponseSpec] | None = None,
    reads_body: bool = False,
    **options: Any,
) -> tuple[HTTPRouteHandler, HTTPRouteHandler]:
    """Serve a handler under `/v1` for clients and under `/admin/api` for operators."""
    client_route = method(
        f"/v1/conversations/{{conversation_id:str}}{path}",
        guards=[client_only],
        dependencies=CLIENT_ACTIONS,
        summary=summary,
        response_description=response_description,
        description=description,
        tags=[tag],
        responses={**(responses or {}), **document_client_errors(*errors, body=reads_body)},
        **options,
    )
    client_url = f"/v1/conversations/{{id}}{path}"
    operator_route = method(
        f"/admin/api/conversations/{{conversation_id:str}}{path}",
        guards=[admin_only],
        dependencies=OPERATOR_ACTIONS,
        operation_id=f"{handler.__name__}_as_operator",
        summary=f"{summary}, as an operator",
        response_description=response_description,
        description=f"Same as `{method.__name__.upper()} {client_url}`. {audit_description}",
        tags=["actions"],
        responses={**(responses or {}), **document_admin_errors(*errors, body=reads_body)},
        **options,
    )
    return client_route(handler), operator_route(handler)


ROUTES: Final = (
    list_compactions,
    *_route_for_both(
        post,
        "/fork",
        fork_conversation,
        tag="conversations",
        summary="Fork a conversation",
        response_description="The new conversation.",
        description="Creates a conversation with the turns up to and including `at_seq`. Its first request begins with "
        "the same bytes as the original's. The original is not changed.",
        audit_description="The fork belongs to the tenant of the original. The action is recorded in the audit log.",
        errors=(ConversationNotFound, TurnNotFound),
        reads_body=True,
        response_headers=ETAG,
    ),
    *_route_for_both(
        post,
        "/cancel",
        cancel_turn,
        tag="turns",
        summary="Cancel the running turn",
        response_description="The turn as it ended.",
        description="The part of the answer that has arrived is kept. Waits up to 10 seconds for the turn to end; "
        "answers 202 if it is still running then.",
        errors=(ConversationNotFound, TurnNotRunning),
        responses={202: ACCEPTED},
        reads_body=True,
        status_code=200,
    ),
    *_route_for_both(
        post,
        "/compactions",
        compact_conversation,
        tag="conversations",
        summary="Compact a conversation now",
        response_description="What was done, or why nothing was done.",
        description="The policy of the assistant decides whether the conversation is compacted; with `force` every "
        "exchange that may be moved is moved. With `dry_run` nothing is changed. A running turn is not affected.",
        audit_description="A compaction, and an attempt that failed, is recorded in the audit log; a dry run is not.",
        errors=(ConversationNotFound, EpochMoved, SummaryUnavailable),
        reads_body=True,
        status_code=200,
    ),
    *_route_for_both(
        delete,
        "/compactions/latest",
        undo_compaction,
        tag="conversations",
        summary="Undo the latest compaction",
        response_description="What was undone.",
        description="The turns become messages again; a summary is replaced by the history that it summarised. The "
        "next request has the same bytes as it would have had without the compaction. Afterwards the conversation is "
        "compacted only with `force`, when its assistant changes, or when requests come close to the window.",
        errors=(ConversationNotFound, CompactionNotFound, ConversationBusy, EpochMoved),
        status_code=200,
    ),
    *_route_for_both(
        delete,
        "",
        erase_conversation,
        tag="conversations",
        summary="Erase a conversation",
        response_description="The rows that were erased, or would be.",
        description="Erases every turn, all raw bytes, segments, caches and replay results. With `dry_run=true` "
        "nothing is erased.",
        audit_description="The action is recorded in the audit log, which is kept; a dry run is not recorded.",
        errors=(ConversationNotFound, ConversationBusy),
        status_code=200,
    ),
    get(
        "/admin/api/conversations/{conversation_id:str}/export",
        guards=[admin_only],
        dependencies=OPERATOR_ACTIONS,
        media_type=ARCHIVE_MEDIA_TYPE,
        summary="Export a conversation",
        response_description="The archive: one JSON object per line; the last line is the record `close`.",
        description="Exports everything of a conversation as JSONL: turns, calls, raw bytes in base64, images. `strata "
        "import` recreates the conversation from it. A file without its last line is incomplete and is refused. The "
        "action is recorded in the audit log before the first line is sent.",
        tags=["actions"],
        responses=document_admin_errors(ConversationNotFound, ConversationBusy),
    )(export_conversation),
)
