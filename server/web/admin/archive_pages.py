"""A conversation leaves: as a file, or for good. Both pages say first what it holds."""

from litestar import Response, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, SkipValidation
from litestar.response import Stream

from server.inspection.admin_sessions import AdminSession
from server.inspection.operator_actions import AdminActions, Operator
from server.inspection.port import Inspector, Timeline
from server.web.admin.action_pages import HEAD, PAGE_OPERATOR, provide_head
from server.web.admin.entry import read_form
from server.web.admin.erasure_labels import tell_rows
from server.web.admin.notices import with_notice
from server.web.admin.rendering import answer_page, answer_redirect
from server.web.api.exports import answer_export
from server.web.request import StrataRequest


@get("/conversations/{conversation_id:str}/export", dependencies={**PAGE_OPERATOR, **HEAD})
async def confirm_export(
    request: StrataRequest,
    conversation_id: FromPath[str],
    timeline: NamedDependency[SkipValidation[Timeline]],
    operator: NamedDependency[SkipValidation[Operator]],
    actions: NamedDependency[SkipValidation[AdminActions]],
) -> Response[bytes]:
    """What the file is going to hold."""
    held = await actions.erase(operator, conversation_id, dry_run=True)
    return answer_page(request, "export.html", timeline=timeline, held=held)


@post("/conversations/{conversation_id:str}/export", status_code=200, dependencies=PAGE_OPERATOR)
async def download_export(
    conversation_id: FromPath[str],
    operator: NamedDependency[SkipValidation[Operator]],
    actions: NamedDependency[SkipValidation[AdminActions]],
) -> Stream:
    """The file. Sent for with a form, so that nobody is made to fetch it by a link."""
    return await answer_export(actions, operator, conversation_id)


@get("/conversations/{conversation_id:str}/erase", dependencies={**PAGE_OPERATOR, **HEAD})
async def confirm_erasure(
    request: StrataRequest,
    timeline: NamedDependency[SkipValidation[Timeline]],
    operator: NamedDependency[SkipValidation[Operator]],
    actions: NamedDependency[SkipValidation[AdminActions]],
) -> Response[bytes]:
    """A dry run: what goes, row by row."""
    return await _ask(request, timeline, operator, actions, is_mistyped=False)


@post("/conversations/{conversation_id:str}/erase", status_code=303, dependencies=PAGE_OPERATOR)
async def erase_on_page(
    request: StrataRequest,
    conversation_id: FromPath[str],
    session: NamedDependency[SkipValidation[AdminSession]],
    inspector: NamedDependency[SkipValidation[Inspector]],
    operator: NamedDependency[SkipValidation[Operator]],
    actions: NamedDependency[SkipValidation[AdminActions]],
) -> Response[bytes]:
    """To the list. Only where the id was typed: it cannot be undone."""
    typed = (await read_form(request)).get("confirmed_id", "").strip()
    if typed != conversation_id:
        timeline = await provide_head(conversation_id, session, inspector)
        return await _ask(request, timeline, operator, actions, is_mistyped=True)
    await actions.erase(operator, conversation_id)
    return answer_redirect(with_notice("/admin/conversations", "erased"))


async def _ask(
    request: StrataRequest, timeline: Timeline, operator: Operator, actions: AdminActions, *, is_mistyped: bool
) -> Response[bytes]:
    doomed = await actions.erase(operator, timeline.conversation.id, dry_run=True)
    return answer_page(
        request,
        "erase.html",
        status_code=422 if is_mistyped else 200,
        timeline=timeline,
        doomed=doomed,
        rows=tell_rows(doomed.rows),
        is_mistyped=is_mistyped,
    )
