"""What operators do to conversations, over HTTP: the actions of `/v1` for admin keys, told in the audit log."""

from typing import Final

from litestar import Response, delete, post
from litestar.datastructures import ResponseHeader
from litestar.di import NamedDependency, Provide
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, FromQuery, JSONBody, SkipValidation

from server.conversation.api_key import ApiKey
from server.conversation.audit import Actor
from server.conversation.errors import (
    BodyMalformed,
    BodyTooLarge,
    CompactionNotFound,
    ConversationBusy,
    ConversationNotFound,
    DatabaseUnavailable,
    EpochMoved,
    KeyRejected,
    MediaTypeUnsupported,
    ScopeMissing,
    StrataError,
    SummaryUnavailable,
    TurnNotFound,
    TurnNotRunning,
    ValidationFailed,
)
from server.conversation.store import Store
from server.inspection.operator_actions import AdminActions, Operator
from server.inspection.port import Inspector
from server.web.admin.entry import Entry
from server.web.api.compactions import CompactionBody, CompactionReportView
from server.web.api.conversation_body import ForkBody
from server.web.api.conversations import ErasureView
from server.web.api.inspection import tenant_scope
from server.web.api.turns import ACCEPTED, CancelBody, answer_cancelled
from server.web.api.views import ConversationView, TurnAnswer
from server.web.auth import admin_only
from server.web.errors import document_errors
from server.web.headers import write_etag
from server.web.json_text import answer_json
from server.web.request import StrataRequest

_ETAG: Final = [ResponseHeader(name="etag", description="The revision, in quotes.", documentation_only=True)]


def _document(*kinds: type[StrataError], body: bool = False) -> dict[int, ResponseSpec]:
    reading = (BodyMalformed, BodyTooLarge, MediaTypeUnsupported) if body else ()
    return document_errors(ValidationFailed, KeyRejected, ScopeMissing, *reading, DatabaseUnavailable, *kinds)


async def find_tenant_for(inspector: Inspector, conversation_id: str, reach: str | None, own_tenant_id: str) -> str:
    """On whose conversation somebody acts: their own tenant's, or anybody's where their reach has no bounds.

    One that does not exist is looked for, and not found, in their own tenant.
    """
    return reach or await inspector.find_tenant(conversation_id) or own_tenant_id


async def provide_operator(
    request: StrataRequest,
    conversation_id: FromPath[str],
    caller: NamedDependency[SkipValidation[ApiKey]],
    inspector: NamedDependency[SkipValidation[Inspector]],
    entry: NamedDependency[SkipValidation[Entry]],
) -> Operator:
    """Who acts, through a key."""
    return Operator(
        tenant_id=await find_tenant_for(inspector, conversation_id, tenant_scope(caller), caller.tenant_id),
        actor=Actor(key_id=caller.id, address=entry.address_of(request)),
    )


OPERATOR: Final = {"operator": Provide(provide_operator)}
"""For routes with a `conversation_id`: handlers get the `operator`."""


@post(
    "/admin/api/conversations/{conversation_id:str}/fork",
    guards=[admin_only],
    dependencies=OPERATOR,
    summary="Fork a conversation, as an operator",
    response_description="The new conversation.",
    description="As `POST /v1/conversations/{id}/fork`, with a row in the audit log. The fork belongs to the tenant of "
    "the original.",
    response_headers=_ETAG,
    tags=["actions"],
    responses=_document(ConversationNotFound, TurnNotFound, body=True),
)
async def fork_as_operator(
    conversation_id: FromPath[str],
    data: JSONBody[ForkBody],
    operator: NamedDependency[SkipValidation[Operator]],
    actions: NamedDependency[SkipValidation[AdminActions]],
    store: NamedDependency[SkipValidation[Store]],
) -> Response[ConversationView]:
    """The new conversation."""
    fork = await actions.fork(operator, conversation_id, data.at_seq)
    made = await store.load_conversation(operator.tenant_id, fork.id)
    headers = {"etag": write_etag(made.revision), "location": f"/admin/api/conversations/{made.id}"}
    return answer_json(ConversationView.showing(made), 201, headers)


@post(
    "/admin/api/conversations/{conversation_id:str}/cancel",
    guards=[admin_only],
    dependencies=OPERATOR,
    status_code=200,
    summary="Cancel the running turn, as an operator",
    response_description="The turn as it ended.",
    description="As `POST /v1/conversations/{id}/cancel`, with a row in the audit log. What had arrived is kept.",
    tags=["actions"],
    responses={202: ACCEPTED, **_document(ConversationNotFound, TurnNotRunning, body=True)},
)
async def cancel_as_operator(
    conversation_id: FromPath[str],
    operator: NamedDependency[SkipValidation[Operator]],
    actions: NamedDependency[SkipValidation[AdminActions]],
    store: NamedDependency[SkipValidation[Store]],
    data: JSONBody[CancelBody | None] = None,
) -> Response[TurnAnswer]:
    """The end of the turn, or the promise of it."""
    handle = await actions.cancel(operator, conversation_id, None if data is None else data.turn_seq)
    location = f"/admin/api/conversations/{conversation_id}?around={handle.seq}"
    return await answer_cancelled(handle, store, operator.tenant_id, {"location": location})


@post(
    "/admin/api/conversations/{conversation_id:str}/compactions",
    guards=[admin_only],
    dependencies=OPERATOR,
    status_code=200,
    summary="Compact a conversation now, as an operator",
    response_description="What was done, or why nothing was.",
    description="As `POST /v1/conversations/{id}/compactions`. The audit log has a row where something was done, or "
    "failed; a dry run leaves none.",
    tags=["actions"],
    responses=_document(ConversationNotFound, EpochMoved, SummaryUnavailable, body=True),
)
async def compact_as_operator(
    conversation_id: FromPath[str],
    data: JSONBody[CompactionBody],
    operator: NamedDependency[SkipValidation[Operator]],
    actions: NamedDependency[SkipValidation[AdminActions]],
) -> Response[CompactionReportView]:
    """The report."""
    report = await actions.compact(operator, conversation_id, force=data.force, dry_run=data.dry_run)
    return answer_json(CompactionReportView.of(report))


@delete(
    "/admin/api/conversations/{conversation_id:str}/compactions/latest",
    guards=[admin_only],
    dependencies=OPERATOR,
    status_code=200,
    summary="Undo the latest compaction, as an operator",
    response_description="What was undone.",
    description="As `DELETE /v1/conversations/{id}/compactions/latest`, with a row in the audit log.",
    tags=["actions"],
    responses=_document(ConversationNotFound, CompactionNotFound, EpochMoved),
)
async def undo_compaction_as_operator(
    conversation_id: FromPath[str],
    operator: NamedDependency[SkipValidation[Operator]],
    actions: NamedDependency[SkipValidation[AdminActions]],
) -> Response[CompactionReportView]:
    """The report."""
    return answer_json(CompactionReportView.of(await actions.undo_compaction(operator, conversation_id)))


@delete(
    "/admin/api/conversations/{conversation_id:str}",
    guards=[admin_only],
    dependencies=OPERATOR,
    status_code=200,
    summary="Erase a conversation, as an operator",
    response_description="What went, or would go.",
    description="As `DELETE /v1/conversations/{id}`, with a row in the audit log, which outlives the conversation. "
    "With `dry_run=true` nothing goes, and there is no row.",
    tags=["actions"],
    responses=_document(ConversationNotFound, ConversationBusy),
)
async def erase_as_operator(
    conversation_id: FromPath[str],
    operator: NamedDependency[SkipValidation[Operator]],
    actions: NamedDependency[SkipValidation[AdminActions]],
    *,
    dry_run: FromQuery[bool] = False,
) -> Response[ErasureView]:
    """The rows by table."""
    return answer_json(ErasureView.of(await actions.erase(operator, conversation_id, dry_run=dry_run), dry_run=dry_run))
