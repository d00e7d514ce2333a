"""Pages that fork, cancel, compact, undo, erase and export a conversation.

Each action has a page that describes its effect and a form that carries it out, through the same audited `actions` as
`/admin/api` (`server.web.api.actions`).
"""

from collections.abc import Mapping
from typing import Annotated, Final

from litestar import Response, get, post
from litestar.di import NamedDependency, Provide
from litestar.params import FromPath, QueryParameter, SkipValidation

from server.compaction.report import CompactionOutcome
from server.conversation.block import TextBlock
from server.conversation.errors import TurnNotFound
from server.conversation.turn import ModelResponseTurn, ToolResponseTurn, Turn, TurnState, UserTaskTurn
from server.conversation.turn_text import read_text
from server.inspection.actions import ConversationActions
from server.inspection.admin_sessions import AdminSession
from server.inspection.port import Inspector
from server.inspection.timeline import Timeline
from server.web.admin.labels import describe_outcome, describe_reason, label_rows, with_notice
from server.web.admin.rendering import answer_page, answer_redirect
from server.web.admin.sessions import read_form
from server.web.api.actions import OPERATOR_ACTIONS, export_conversation
from server.web.body import MAX_BIGINT
from server.web.request import StrataRequest

_EXCERPT_CHARS: Final = 600
_KINDS: Final[Mapping[type[Turn], str]] = {
    UserTaskTurn: "user task",
    ToolResponseTurn: "tool results",
    ModelResponseTurn: "answer",
}
_DIGITS: Final = len(str(MAX_BIGINT))


async def provide_timeline(
    conversation_id: FromPath[str],
    session: NamedDependency[SkipValidation[AdminSession]],
    inspector: NamedDependency[SkipValidation[Inspector]],
) -> Timeline:
    """Load the facts of a conversation and its newest turn."""
    return await inspector.load_timeline(session.tenant_scope, conversation_id, limit=1)


_TIMELINE: Final = {"timeline": Provide(provide_timeline)}


def _conversation_url(conversation_id: str, notice: str) -> str:
    return with_notice(f"/admin/conversations/{conversation_id}", notice)


@get("/conversations/{conversation_id:str}/fork")
async def confirm_fork(
    request: StrataRequest,
    conversation_id: FromPath[str],
    session: NamedDependency[SkipValidation[AdminSession]],
    inspector: NamedDependency[SkipValidation[Inspector]],
    at_seq: Annotated[int | None, QueryParameter(ge=1, le=MAX_BIGINT)] = None,
) -> Response[bytes]:
    """Show the turn to fork at: the newest one unless `at_seq` names another."""
    timeline = await inspector.load_timeline(session.tenant_scope, conversation_id, around_seq=at_seq, limit=1)
    turn = timeline.turns[0].turn if timeline.turns else None
    if at_seq is not None and (turn is None or turn.seq != at_seq):
        raise TurnNotFound
    return answer_page(
        request,
        "fork.html",
        timeline=timeline,
        turn=turn,
        kind=None if turn is None else _KINDS[type(turn)],
        is_input=not isinstance(turn, ModelResponseTurn),
        excerpt="" if turn is None else _excerpt(turn),
    )


@post("/conversations/{conversation_id:str}/fork", status_code=303, dependencies=OPERATOR_ACTIONS)
async def fork_on_page(
    request: StrataRequest,
    conversation_id: FromPath[str],
    actions: NamedDependency[SkipValidation[ConversationActions]],
) -> Response[bytes]:
    """Fork, and redirect to the fork."""
    fork = await actions.fork(conversation_id, _read_seq(await read_form(request), "at_seq"))
    return answer_redirect(_conversation_url(fork.id, "forked"))


@get("/conversations/{conversation_id:str}/cancel", dependencies=_TIMELINE)
async def confirm_cancel(
    request: StrataRequest, timeline: NamedDependency[SkipValidation[Timeline]]
) -> Response[bytes]:
    """Show the running turn."""
    return answer_page(request, "cancel.html", timeline=timeline)


@post("/conversations/{conversation_id:str}/cancel", status_code=303, dependencies=OPERATOR_ACTIONS)
async def cancel_on_page(
    request: StrataRequest,
    conversation_id: FromPath[str],
    actions: NamedDependency[SkipValidation[ConversationActions]],
) -> Response[bytes]:
    """Cancel the turn that the page showed, and no later one."""
    cancelled = await actions.cancel(conversation_id, _read_seq(await read_form(request), "turn_seq"))
    if cancelled.ended is None:
        return answer_redirect(_conversation_url(conversation_id, "cancelling"))
    notice = "cancelled" if cancelled.ended.turn.state is TurnState.CANCELLED else "ended"
    return answer_redirect(_conversation_url(conversation_id, notice))


@get("/conversations/{conversation_id:str}/compact", dependencies={**OPERATOR_ACTIONS, **_TIMELINE})
async def confirm_compaction(
    request: StrataRequest,
    conversation_id: FromPath[str],
    timeline: NamedDependency[SkipValidation[Timeline]],
    actions: NamedDependency[SkipValidation[ConversationActions]],
) -> Response[bytes]:
    """Show what would be done by the policy and by force."""
    return answer_page(
        request,
        "compact.html",
        timeline=timeline,
        planned=await actions.compact(conversation_id, dry_run=True),
        forced=await actions.compact(conversation_id, force=True, dry_run=True),
        describe_outcome=describe_outcome,
        describe_reason=describe_reason,
    )


@post("/conversations/{conversation_id:str}/compact", status_code=303, dependencies=OPERATOR_ACTIONS)
async def compact_on_page(
    request: StrataRequest,
    conversation_id: FromPath[str],
    actions: NamedDependency[SkipValidation[ConversationActions]],
) -> Response[bytes]:
    """Compact. If nothing was moved, redirect to the page that gives the reason."""
    report = await actions.compact(conversation_id, force="force" in await read_form(request))
    if report.outcome is CompactionOutcome.UNCHANGED:
        return answer_redirect(with_notice(f"/admin/conversations/{conversation_id}/compact", "unchanged"))
    return answer_redirect(_conversation_url(conversation_id, report.outcome.value))


@get("/conversations/{conversation_id:str}/undo", dependencies={**OPERATOR_ACTIONS, **_TIMELINE})
async def confirm_undo(
    request: StrataRequest,
    conversation_id: FromPath[str],
    timeline: NamedDependency[SkipValidation[Timeline]],
    actions: NamedDependency[SkipValidation[ConversationActions]],
) -> Response[bytes]:
    """Show the latest compaction."""
    latest = (await actions.store.list_epochs(actions.tenant_id, conversation_id, limit=1)).items
    # An epoch without a segment has nothing to undo: the compaction was undone before.
    undoable = latest[0] if latest and latest[0].last_segment is not None else None
    return answer_page(request, "undo_compaction.html", timeline=timeline, latest=undoable)


@post("/conversations/{conversation_id:str}/undo", status_code=303, dependencies=OPERATOR_ACTIONS)
async def undo_on_page(
    conversation_id: FromPath[str], actions: NamedDependency[SkipValidation[ConversationActions]]
) -> Response[bytes]:
    await actions.undo_compaction(conversation_id)
    return answer_redirect(_conversation_url(conversation_id, "undone"))


@get("/conversations/{conversation_id:str}/export", dependencies={**OPERATOR_ACTIONS, **_TIMELINE})
async def confirm_export(
    request: StrataRequest,
    conversation_id: FromPath[str],
    timeline: NamedDependency[SkipValidation[Timeline]],
    actions: NamedDependency[SkipValidation[ConversationActions]],
) -> Response[bytes]:
    """Show what the file will contain."""
    held = await actions.erase(conversation_id, dry_run=True)
    return answer_page(request, "export.html", timeline=timeline, held=held)


# A form and not a link, so that no other site can start the download.
download_export: Final = post(
    "/conversations/{conversation_id:str}/export", status_code=200, dependencies=OPERATOR_ACTIONS
)(export_conversation)


@get("/conversations/{conversation_id:str}/erase", dependencies={**OPERATOR_ACTIONS, **_TIMELINE})
async def confirm_erasure(
    request: StrataRequest,
    timeline: NamedDependency[SkipValidation[Timeline]],
    actions: NamedDependency[SkipValidation[ConversationActions]],
) -> Response[bytes]:
    """Show the rows that would be erased."""
    return await _answer_erasure(request, timeline, actions)


@post("/conversations/{conversation_id:str}/erase", status_code=303, dependencies=OPERATOR_ACTIONS)
async def erase_on_page(
    request: StrataRequest,
    conversation_id: FromPath[str],
    session: NamedDependency[SkipValidation[AdminSession]],
    inspector: NamedDependency[SkipValidation[Inspector]],
    actions: NamedDependency[SkipValidation[ConversationActions]],
) -> Response[bytes]:
    """Erase if the id was typed, because it cannot be undone; else show the page again."""
    typed = (await read_form(request)).get("confirmed_id", "").strip()
    if typed != conversation_id:
        timeline = await provide_timeline(conversation_id, session, inspector)
        return await _answer_erasure(request, timeline, actions, is_mistyped=True)
    await actions.erase(conversation_id)
    return answer_redirect(with_notice("/admin/conversations", "erased"))


async def _answer_erasure(
    request: StrataRequest, timeline: Timeline, actions: ConversationActions, *, is_mistyped: bool = False
) -> Response[bytes]:
    erasure = await actions.erase(timeline.conversation.id, dry_run=True)
    return answer_page(
        request,
        "erase.html",
        status_code=422 if is_mistyped else 200,
        timeline=timeline,
        erasure=erasure,
        rows=label_rows(erasure.rows),
        is_mistyped=is_mistyped,
    )


def _excerpt(turn: Turn) -> str:
    """Return the beginning of the text of a turn; of its other blocks if it has no text."""
    texts = tuple(block for block in turn.blocks if isinstance(block, TextBlock) and block.text.strip())
    return read_text(texts or turn.blocks)[:_EXCERPT_CHARS]


def _read_seq(form: Mapping[str, str], name: str) -> int:
    """Return the number of a turn from a form. Raises `TurnNotFound` for anything else."""
    text = form.get(name, "").strip()
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS) or not 1 <= int(text) <= MAX_BIGINT:
        raise TurnNotFound("The number of a turn is 1 or more.", hint="Go back and enter the number of a turn.")
    return int(text)
