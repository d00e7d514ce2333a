"""The form of a new replay, and the actions on a replay, each with a confirmation page."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from litestar import Response, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, SkipValidation

from server.conversation.audit import Actor
from server.conversation.errors import AssistantNotFound, ConversationNotFound, ReplayNotFound, ValidationFailed
from server.inspection.admin_sessions import AdminSession
from server.providers.choice import KEY_VARIABLES
from server.replay.rerun.figures import list_estimate_notes
from server.replay.rerun.replay import OnMissingResult, Replay, ReplayMode, ReplayState
from server.replay.rerun.service import ReplayService
from server.web.admin.rendering import answer_page, answer_redirect
from server.web.admin.replay_forms import fill_limits, read_draft, read_fields, read_limits, seal
from server.web.admin.sessions import read_form
from server.web.request import StrataRequest

_DEFAULTS: Final = {"repetitions": "1", "parallelism": "4", "mode": ReplayMode.TEACHER_FORCED.value}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayAction:
    """The texts of an action's confirmation page."""

    question: str
    consequence: str
    button: str
    is_dangerous: bool = False


ACTIONS: Final[Mapping[str, ReplayAction]] = {
    "pause": ReplayAction(
        question="Pause this replay?",
        consequence="Open calls are finished. No other call is sent until the replay is continued.",
        button="Pause replay",
    ),
    "continue": ReplayAction(
        question="Continue this replay?",
        consequence="The replay continues after its last result, with these limits. An empty field removes its limit.",
        button="Continue replay",
    ),
    "cancel": ReplayAction(
        question="Cancel this replay?",
        consequence="Waiting items are cancelled now, running items when their call has ended. Results are kept. "
        "A cancelled replay cannot be continued.",
        button="Cancel replay",
        is_dangerous=True,
    ),
    "delete": ReplayAction(
        question="Delete this replay?",
        consequence="The replay, its results and its replay conversations are erased. The recorded conversations are "
        "not changed. This cannot be undone.",
        button="Delete replay",
        is_dangerous=True,
    ),
}


@get("/replays/new")
async def show_replay_form(
    request: StrataRequest, session: NamedDependency[SkipValidation[AdminSession]]
) -> Response[bytes]:
    """Show the form, filled from the query string: lists of conversations link to it with their filters."""
    query = dict(request.query_params.items())
    return _answer_form(request, session, {**_DEFAULTS, **read_fields(query)})


@post("/replays/new", status_code=200)
async def submit_replay_form(
    request: StrataRequest,
    actor: NamedDependency[SkipValidation[Actor]],
    session: NamedDependency[SkipValidation[AdminSession]],
    replay_service: NamedDependency[SkipValidation[ReplayService]],
) -> Response[bytes]:
    """Show the estimate, or create the replay if exactly these fields were estimated before."""
    form = await read_form(request)
    fields = read_fields(form)
    tenant_id = session.key.tenant_id
    try:
        draft = read_draft(fields)
        if form.get("seen") == seal(fields):
            replay = await replay_service.create(tenant_id, draft, actor=actor)
            return answer_redirect(f"/admin/replays/{replay.id}")
        plan = await replay_service.plan(tenant_id, draft)
    except (ValidationFailed, ConversationNotFound, AssistantNotFound) as error:
        return _answer_form(request, session, fields, fault=error.message, status_code=422)
    return _answer_form(
        request, session, fields, estimate=plan.estimate, notes=list_estimate_notes(plan.estimate), seen=seal(fields)
    )


@get("/replays/{replay_id:str}/{action:str}")
async def confirm_replay_action(
    request: StrataRequest,
    replay_id: FromPath[str],
    action: FromPath[str],
    session: NamedDependency[SkipValidation[AdminSession]],
    replay_service: NamedDependency[SkipValidation[ReplayService]],
) -> Response[bytes]:
    """Show the confirmation page of an action."""
    _find_action(action)
    replay = await replay_service.replays.load_replay(session.tenant_scope, replay_id)
    return _answer_confirmation(request, replay, action, fill_limits(replay.draft.limits))


@post("/replays/{replay_id:str}/{action:str}", status_code=303)
async def do_replay_action(
    request: StrataRequest,
    replay_id: FromPath[str],
    action: FromPath[str],
    actor: NamedDependency[SkipValidation[Actor]],
    session: NamedDependency[SkipValidation[AdminSession]],
    replay_service: NamedDependency[SkipValidation[ReplayService]],
) -> Response[bytes]:
    """Execute an action and redirect to the replay."""
    _find_action(action)
    scope = session.tenant_scope
    form = await read_form(request)
    match action:
        case "pause":
            await replay_service.replays.pause_replay(scope, replay_id, actor=actor)
        case "continue":
            replay = await replay_service.replays.load_replay(scope, replay_id)
            try:
                limits = read_limits(form, replay.draft.limits)
                await replay_service.continue_(scope, replay_id, actor=actor, limits=limits)
            except ValidationFailed as error:
                return _answer_confirmation(request, replay, action, form, fault=error.message)
        case "cancel":
            await replay_service.replays.cancel_replay(scope, replay_id, actor=actor)
        case _:
            await replay_service.replays.erase_replay(scope, replay_id, actor=actor)
            return answer_redirect("/admin/replays?deleted=1")
    return answer_redirect(f"/admin/replays/{replay_id}")


def actions_for(replay: Replay) -> tuple[str, ...]:
    """Return the actions that are possible in its state."""
    match replay.state:
        case ReplayState.RUNNING:
            return ("pause", "cancel")
        case ReplayState.PAUSED | ReplayState.STOPPED_BY_BUDGET:
            return ("continue", "cancel", "delete")
        case ReplayState.DONE | ReplayState.CANCELLED:
            return ("delete",)


def _answer_confirmation(
    request: StrataRequest, replay: Replay, action: str, fields: Mapping[str, str], *, fault: str | None = None
) -> Response[bytes]:
    return answer_page(
        request,
        "replay_action.html",
        status_code=200 if fault is None else 422,
        replay=replay,
        action=action,
        chosen=ACTIONS[action],
        fields=fields,
        fault=fault,
    )


def _find_action(action: str) -> ReplayAction:
    if action not in ACTIONS:
        raise ReplayNotFound("There is no such page of a replay.")
    return ACTIONS[action]


def _answer_form(
    request: StrataRequest,
    session: AdminSession,
    fields: Mapping[str, str],
    *,
    status_code: int = 200,
    **values: object,
) -> Response[bytes]:
    shown: dict[str, Any] = {"fault": None, "estimate": None, "notes": (), "seen": None, **values}
    return answer_page(
        request,
        "replay_new.html",
        status_code=status_code,
        fields=fields,
        modes=list(ReplayMode),
        policies=list(OnMissingResult),
        providers=list(KEY_VARIABLES),
        tenant_name=session.key.tenant_name,
        **shown,
    )
