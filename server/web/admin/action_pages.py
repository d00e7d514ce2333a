"""Actions on a conversation, each with a page that says what is going to happen: forking it, cancelling its turn.

Whoever sees all tenants acts on the conversation's own; the audit log's row is that tenant's.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final

from litestar import Response, get, post
from litestar.di import NamedDependency, Provide
from litestar.params import FromPath, QueryParameter, SkipValidation

from server.conversation.block import TextBlock
from server.conversation.errors import TurnNotFound
from server.conversation.turn import ModelResponseTurn, ToolResponseTurn, Turn, TurnState, UserTaskTurn
from server.conversation.turn_text import read_text
from server.inspection.admin_sessions import AdminSession
from server.inspection.operator_actions import AdminActions, Operator
from server.inspection.port import Inspector, Timeline
from server.web.admin.entry import Entry, read_form
from server.web.admin.notices import with_notice
from server.web.admin.rendering import answer_page, answer_redirect
from server.web.api.operator_actions import find_tenant_for
from server.web.api.turns import wait_for_cancelled
from server.web.body import LARGEST_BIGINT
from server.web.request import StrataRequest

_EXCERPT_CHARS: Final = 600
_KINDS: Final[Mapping[type[Turn], str]] = {
    UserTaskTurn: "user task",
    ToolResponseTurn: "tool results",
    ModelResponseTurn: "answer",
}
_LIST: Final = "/admin/conversations"
_DIGITS: Final = len(str(LARGEST_BIGINT))


async def provide_page_operator(
    request: StrataRequest,
    conversation_id: FromPath[str],
    session: NamedDependency[SkipValidation[AdminSession]],
    inspector: NamedDependency[SkipValidation[Inspector]],
    entry: NamedDependency[SkipValidation[Entry]],
) -> Operator:
    """Who acts, through a page."""
    return Operator(
        tenant_id=await find_tenant_for(inspector, conversation_id, session.tenant_scope, session.key.tenant_id),
        actor=session.actor(entry.address_of(request)),
    )


async def provide_head(
    conversation_id: FromPath[str],
    session: NamedDependency[SkipValidation[AdminSession]],
    inspector: NamedDependency[SkipValidation[Inspector]],
) -> Timeline:
    """What a page says of the conversation before it asks: all but its turns, of which it has the newest."""
    return await inspector.load_timeline(session.tenant_scope, conversation_id, limit=1)


PAGE_OPERATOR: Final = {"operator": Provide(provide_page_operator)}
"""For pages with a `conversation_id`: handlers get the `operator`."""
HEAD: Final = {"timeline": Provide(provide_head)}
"""And these the `timeline`."""


def page_of(conversation_id: str, notice: str | None = None) -> str:
    """The address of a conversation's page."""
    path = f"{_LIST}/{conversation_id}"
    return path if notice is None else with_notice(path, notice)


@get("/conversations/{conversation_id:str}/fork")
async def confirm_fork(
    request: StrataRequest,
    conversation_id: FromPath[str],
    session: NamedDependency[SkipValidation[AdminSession]],
    inspector: NamedDependency[SkipValidation[Inspector]],
    at_seq: Annotated[int | None, QueryParameter(ge=1, le=LARGEST_BIGINT)] = None,
) -> Response[bytes]:
    """From which turn on? The newest, unless another is named; what it says is shown."""
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


@post("/conversations/{conversation_id:str}/fork", status_code=303, dependencies=PAGE_OPERATOR)
async def fork_on_page(
    request: StrataRequest,
    conversation_id: FromPath[str],
    operator: NamedDependency[SkipValidation[Operator]],
    actions: NamedDependency[SkipValidation[AdminActions]],
) -> Response[bytes]:
    """To the fork."""
    fork = await actions.fork(operator, conversation_id, _read_seq(await read_form(request), "at_seq"))
    return answer_redirect(page_of(fork.id, "forked"))


@get("/conversations/{conversation_id:str}/cancel", dependencies=HEAD)
async def confirm_cancel(
    request: StrataRequest, timeline: NamedDependency[SkipValidation[Timeline]]
) -> Response[bytes]:
    """Which turn runs, since when, and where."""
    return answer_page(request, "cancel.html", timeline=timeline)


@post("/conversations/{conversation_id:str}/cancel", status_code=303, dependencies=PAGE_OPERATOR)
async def cancel_on_page(
    request: StrataRequest,
    conversation_id: FromPath[str],
    operator: NamedDependency[SkipValidation[Operator]],
    actions: NamedDependency[SkipValidation[AdminActions]],
) -> Response[bytes]:
    """Back to the conversation when the turn has ended. Only the turn that the page showed is cancelled."""
    handle = await actions.cancel(operator, conversation_id, _read_seq(await read_form(request), "turn_seq"))
    ended = await wait_for_cancelled(handle)
    if ended is None:
        return answer_redirect(page_of(conversation_id, "cancelling"))
    return answer_redirect(
        page_of(conversation_id, "cancelled" if ended.turn.state is TurnState.CANCELLED else "ended")
    )


def _excerpt(turn: Turn) -> str:
    """How the turn begins: what is said, or else what it holds."""
    said = tuple(block for block in turn.blocks if isinstance(block, TextBlock) and block.text.strip())
    return read_text(said or turn.blocks)[:_EXCERPT_CHARS]


def _read_seq(form: Mapping[str, Any], name: str) -> int:
    """The number of a turn in a form. What is none raises `TurnNotFound`."""
    text = form.get(name, "").strip()
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS) or not 1 <= int(text) <= LARGEST_BIGINT:
        raise TurnNotFound("A turn has a number: 1, 2, 3.", hint="Go back and give the number of a turn.")
    return int(text)
