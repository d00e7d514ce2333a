"""The pages of replays: the list, a replay with its report, its items, and the answers of an item side by side."""

from collections.abc import Sequence
from typing import Annotated, Any, Final
from urllib.parse import urlencode

from litestar import Response, get
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, QueryParameter, SkipValidation
from litestar.response import Stream

from server.inspection.admin_sessions import AdminSession
from server.inspection.timeline import CallOutline
from server.replay.rerun.calls import ReplayCalls
from server.replay.rerun.export import ExportFormat
from server.replay.rerun.figures import describe_unpriced
from server.replay.rerun.full_results import list_full_results
from server.replay.rerun.replay import Candidate, ItemState, Replay
from server.replay.rerun.result import DivergenceKind, Outcome, ResultFilter, ResultOrder
from server.replay.rerun.service import ReplayService
from server.web.admin.call_links import TURNS_ON_PAGE, ItemLinks
from server.web.admin.conversation_filters import label_filters
from server.web.admin.rendering import answer_page
from server.web.admin.replay_action_pages import ACTIONS, actions_for
from server.web.admin.replay_charts import HEIGHT, WIDTH, draw_chart
from server.web.admin.replay_results import build_shown_result
from server.web.api.replays import answer_export
from server.web.request import StrataRequest

_ROWS: Final = 50
_WORST_ROWS: Final = 20
_FAILED_ROWS: Final = 10
_LAST_PAGE: Final = 10**6
_OUTCOMES: Final = {outcome.value: outcome for outcome in Outcome}
_KINDS: Final = {kind.value: kind for kind in DivergenceKind}
_STATES: Final = {state.value: state for state in ItemState}


@get("/replays")
async def show_replays(
    request: StrataRequest,
    session: NamedDependency[SkipValidation[AdminSession]],
    replay_service: NamedDependency[SkipValidation[ReplayService]],
    cursor: FromQuery[str | None] = None,
    deleted: FromQuery[str | None] = None,
) -> Response[bytes]:
    """Show a page of replays, newest first."""
    page = await replay_service.replays.list_replays(session.tenant_scope, cursor=cursor, limit=_ROWS)
    return answer_page(
        request,
        "replays.html",
        replays=page.items,
        is_first=cursor is None,
        was_deleted=deleted is not None,
        next_url=f"/admin/replays?{urlencode({'cursor': page.next_cursor})}" if page.next_cursor else None,
    )


@get("/replays/{replay_id:str}")
async def show_replay_page(
    request: StrataRequest,
    replay_id: FromPath[str],
    session: NamedDependency[SkipValidation[AdminSession]],
    replay_service: NamedDependency[SkipValidation[ReplayService]],
    outcome: FromQuery[str] = "",
    kind: FromQuery[str] = "",
    failed_assertion: FromQuery[str] = "",
    cursor: FromQuery[str | None] = None,
) -> Response[bytes]:
    """Show the progress, the report and the worst results of a replay. The filters are in the query string."""
    replay = await replay_service.replays.load_replay(session.tenant_scope, replay_id)
    wanted = ResultFilter(
        outcome=_OUTCOMES.get(outcome),
        kind=_KINDS.get(kind),
        has_failed_assertion=bool(failed_assertion),
        order=ResultOrder.WORST,
    )
    results = await replay_service.replays.list_results(
        session.tenant_scope, replay.id, wanted=wanted, cursor=cursor, limit=_WORST_ROWS
    )
    failed = await replay_service.replays.list_items(
        session.tenant_scope, replay.id, state=ItemState.FAILED, limit=_FAILED_ROWS
    )
    report = await replay_service.replays.report_replay(session.tenant_scope, replay.id)
    named = {"outcome": outcome, "kind": kind, "failed_assertion": failed_assertion}
    filters = {name: value for name, value in named.items() if value}
    next_query = urlencode({**filters, "cursor": results.next_cursor}) if results.next_cursor else None
    return answer_page(
        request,
        "replay.html",
        **_progress(replay),
        report=report,
        charts=[draw_chart(measured) for measured in report.measures],
        chart_width=WIDTH,
        chart_height=HEIGHT,
        results=results.items,
        links_of=lambda number: ItemLinks(replay=replay, number=number),
        filters=filters,
        outcomes=list(_OUTCOMES),
        kinds=list(_KINDS),
        is_first=cursor is None,
        first_url=f"/admin/replays/{replay.id}?{urlencode(filters)}",
        next_url=f"/admin/replays/{replay.id}?{next_query}" if next_query else None,
        failed_items=failed.items,
        has_more_failed=failed.next_cursor is not None,
        formats=list(ExportFormat),
        changed=_list_changed(replay.draft.candidate),
        chosen_by=label_filters(replay.draft.selection.filters),
    )


@get("/replays/{replay_id:str}/progress")
async def show_replay_progress(
    request: StrataRequest,
    replay_id: FromPath[str],
    session: NamedDependency[SkipValidation[AdminSession]],
    replay_service: NamedDependency[SkipValidation[ReplayService]],
) -> Response[bytes]:
    """Show the part of the page that changes while the replay runs."""
    replay = await replay_service.replays.load_replay(session.tenant_scope, replay_id)
    return answer_page(request, "_replay_progress.html", **_progress(replay))


@get("/replays/{replay_id:str}/items")
async def show_replay_items(
    request: StrataRequest,
    replay_id: FromPath[str],
    session: NamedDependency[SkipValidation[AdminSession]],
    replay_service: NamedDependency[SkipValidation[ReplayService]],
    # `state` is a reserved name of the framework.
    named: Annotated[str, QueryParameter(name="state")] = "",
    cursor: FromQuery[str | None] = None,
) -> Response[bytes]:
    """Show a page of items by number, with the outcomes of each."""
    scope = session.tenant_scope
    replay = await replay_service.replays.load_replay(scope, replay_id)
    state = _STATES.get(named)
    page = await replay_service.replays.list_items(scope, replay.id, state=state, cursor=cursor, limit=_ROWS)
    counts = await replay_service.replays.count_outcomes(scope, replay.id, [item.number for item in page.items])
    home = f"/admin/replays/{replay.id}/items"
    filters = {} if state is None else {"state": state.value}
    return answer_page(
        request,
        "replay_items.html",
        replay=replay,
        unpriced_note=describe_unpriced(replay.unpriced_count),
        home=home,
        state=state,
        rows=[(item, counts.get(item.number)) for item in page.items],
        is_first=cursor is None,
        first_url=f"{home}?{urlencode(filters)}" if filters else home,
        next_url=f"{home}?{urlencode({**filters, 'cursor': page.next_cursor})}" if page.next_cursor else None,
    )


@get("/replays/{replay_id:str}/items/{number:int}")
async def show_replay_item(
    request: StrataRequest,
    replay_id: FromPath[str],
    number: FromPath[int],
    session: NamedDependency[SkipValidation[AdminSession]],
    replay_service: NamedDependency[SkipValidation[ReplayService]],
    replay_calls: NamedDependency[SkipValidation[ReplayCalls]],
    page: Annotated[int, QueryParameter(ge=1, le=_LAST_PAGE)] = 1,
) -> Response[bytes]:
    """Show the recorded and the candidate's answers of one item side by side."""
    scope = session.tenant_scope
    replay = await replay_service.replays.load_replay(scope, replay_id)
    item = await replay_service.replays.load_item(scope, replay_id, number)
    wanted = ResultFilter(number=number, first_position=(page - 1) * TURNS_ON_PAGE + 1)
    found = await list_full_results(replay_service.replays, replay, wanted=wanted, limit=TURNS_ON_PAGE)
    judged = [full.stored.result.position for full in found.items if full.stored.result.judge is not None]
    background: Sequence[CallOutline] = ()
    if item.replay_conversation_id is not None:
        background = (await replay_calls.load_timeline(scope, replay_id, number, limit=1)).background_calls
    return answer_page(
        request,
        "replay_item.html",
        replay=replay,
        item=item,
        links=ItemLinks(replay=replay, number=number),
        results=[build_shown_result(full) for full in found.items],
        background=background,
        judge_calls=await replay_service.replays.find_judge_calls(scope, replay_id, number, judged) if judged else {},
        page=page,
        has_more=found.next_cursor is not None,
    )


@get("/replays/{replay_id:str}/export")
async def export_replay_page(
    replay_id: FromPath[str],
    session: NamedDependency[SkipValidation[AdminSession]],
    replay_service: NamedDependency[SkipValidation[ReplayService]],
    form: Annotated[ExportFormat, QueryParameter(name="format")] = ExportFormat.JSON,
) -> Stream:
    """Download the replay."""
    return await answer_export(replay_service.replays, session.tenant_scope, replay_id, form)


def _list_changed(candidate: Candidate) -> list[str]:
    """Return the names of changes that are too long for the page. The export contains them."""
    parts = ("instructions", "variables", "tools", "compaction")
    return [*(part for part in parts if getattr(candidate, part) is not None), *candidate.templates]


def _progress(replay: Replay) -> dict[str, Any]:
    return {
        "replay": replay,
        "actions": {name: ACTIONS[name] for name in actions_for(replay)},
        "unpriced_note": describe_unpriced(replay.unpriced_count),
    }
