"""Compacting a conversation and taking a compaction back, each with a page that says what it would come to."""

from litestar import Response, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, SkipValidation

from server.compaction.report import CompactionOutcome
from server.conversation.store import Store
from server.inspection.operator_actions import AdminActions, Operator
from server.inspection.port import Timeline
from server.web.admin.action_pages import HEAD, PAGE_OPERATOR, page_of
from server.web.admin.compaction_labels import describe_action, tell_reason
from server.web.admin.entry import read_form
from server.web.admin.notices import with_notice
from server.web.admin.rendering import answer_page, answer_redirect
from server.web.request import StrataRequest


@get("/conversations/{conversation_id:str}/compact", dependencies={**PAGE_OPERATOR, **HEAD})
async def confirm_compaction(
    request: StrataRequest,
    conversation_id: FromPath[str],
    timeline: NamedDependency[SkipValidation[Timeline]],
    operator: NamedDependency[SkipValidation[Operator]],
    actions: NamedDependency[SkipValidation[AdminActions]],
) -> Response[bytes]:
    """What the policy would do, and what force would do, side by side."""
    planned = await actions.compact(operator, conversation_id, dry_run=True)
    forced = await actions.compact(operator, conversation_id, force=True, dry_run=True)
    return answer_page(
        request,
        "compact.html",
        timeline=timeline,
        planned=planned,
        forced=forced,
        describe_action=describe_action,
        tell_reason=tell_reason,
    )


@post("/conversations/{conversation_id:str}/compact", status_code=303, dependencies=PAGE_OPERATOR)
async def compact_on_page(
    request: StrataRequest,
    conversation_id: FromPath[str],
    operator: NamedDependency[SkipValidation[Operator]],
    actions: NamedDependency[SkipValidation[AdminActions]],
) -> Response[bytes]:
    """Back to the conversation; where nothing was moved, to the page that says why."""
    force = "force" in await read_form(request)
    report = await actions.compact(operator, conversation_id, force=force)
    if report.outcome is CompactionOutcome.UNCHANGED:
        return answer_redirect(with_notice(f"{page_of(conversation_id)}/compact", "unchanged"))
    return answer_redirect(page_of(conversation_id, report.outcome.value))


@get("/conversations/{conversation_id:str}/undo", dependencies={**PAGE_OPERATOR, **HEAD})
async def confirm_undo(
    request: StrataRequest,
    conversation_id: FromPath[str],
    timeline: NamedDependency[SkipValidation[Timeline]],
    operator: NamedDependency[SkipValidation[Operator]],
    store: NamedDependency[SkipValidation[Store]],
) -> Response[bytes]:
    """Which compaction is the latest, and what becomes of it."""
    latest = (await store.list_epochs(operator.tenant_id, conversation_id, limit=1)).items
    # Without any history there is nothing to take back: it was undone already.
    undoable = latest[0] if latest and latest[0].last_segment is not None else None
    return answer_page(request, "undo_compaction.html", timeline=timeline, latest=undoable)


@post("/conversations/{conversation_id:str}/undo", status_code=303, dependencies=PAGE_OPERATOR)
async def undo_on_page(
    conversation_id: FromPath[str],
    operator: NamedDependency[SkipValidation[Operator]],
    actions: NamedDependency[SkipValidation[AdminActions]],
) -> Response[bytes]:
    """Back to the conversation."""
    await actions.undo_compaction(operator, conversation_id)
    return answer_redirect(page_of(conversation_id, "undone"))
