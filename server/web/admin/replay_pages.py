"""Replays: the list, what came out of one, and its turns side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final
from urllib.parse import urlencode

from litestar import Response, get
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, QueryParameter, SkipValidation
from litestar.response import Stream

from server.admin_sessions import AdminSession
from server.block import Block, TextBlock
from server.replay import ENDED_ITEM_STATES, ItemState, Replay, ReplayState
from server.replay_comparison import Said
from server.replay_export import ExportFormat, FullResult
from server.replay_reading import ReplayDesk
from server.replay_result import DivergenceKind, Outcome, ResultFilter, ResultOrder
from server.replay_sides import Sides, lay_side_by_side
from server.web.admin.rendering import answer_page
from server.web.admin.replay_action_pages import ACTIONS, actions_for
from server.web.admin.replay_charts import HEIGHT, WIDTH, draw_chart
from server.web.json_text import encode_json
from server.web.replays import answer_export
from server.web.request import StrataRequest

_ROWS: Final = 50
_WORST_ROWS: Final = 20
_TURNS: Final = 20
_LONGEST: Final = 12_000
"""Characters of an answer on a page; the export has the whole."""
_OUTCOMES: Final = {outcome.value: outcome for outcome in Outcome}
_KINDS: Final = {kind.value: kind for kind in DivergenceKind}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTurn:
    """A result as its page shows it."""

    full: FullResult
    sides: Sides
    task: str
    is_cut: bool


@get("/replays")
async def show_replays(
    request: StrataRequest,
    session: NamedDependency[SkipValidation[AdminSession]],
    replay_desk: NamedDependency[SkipValidation[ReplayDesk]],
    cursor: FromQuery[str | None] = None,
    deleted: FromQuery[str | None] = None,
) -> Response[bytes]:
    """A page of them, newest first."""
    page = await replay_desk.replays.list_replays(session.sees_tenant_id, cursor=cursor, limit=_ROWS)
    return answer_page(
        request,
        "replays.html",
        replays=[(replay, count_ended(replay)) for replay in page.items],
        is_first=cursor is None,
        was_deleted=deleted is not None,
        next_url=f"/admin/replays?{urlencode({'cursor': page.next_cursor})}" if page.next_cursor else None,
    )


@get("/replays/{replay_id:str}")
async def show_replay_page(
    request: StrataRequest,
    replay_id: FromPath[str],
    session: NamedDependency[SkipValidation[AdminSession]],
    replay_desk: NamedDependency[SkipValidation[ReplayDesk]],
    outcome: FromQuery[str] = "",
    kind: FromQuery[str] = "",
    failed_assertion: FromQuery[str] = "",
    cursor: FromQuery[str | None] = None,
) -> Response[bytes]:
    """How far it is, what came out, and what differs most. The filters live in the address."""
    replay = await replay_desk.replays.load_replay(session.sees_tenant_id, replay_id)
    wanted = ResultFilter(
        outcome=_OUTCOMES.get(outcome),
        kind=_KINDS.get(kind),
        has_failed_assertion=bool(failed_assertion),
        order=ResultOrder.WORST,
    )
    results = await replay_desk.replays.list_results(
        session.sees_tenant_id, replay.id, wanted=wanted, cursor=cursor, limit=_WORST_ROWS
    )
    report = await replay_desk.reports.report_replay(session.sees_tenant_id, replay.id)
    named = {"outcome": outcome, "kind": kind, "failed_assertion": failed_assertion}
    filters = {name: value for name, value in named.items() if value}
    behind = urlencode({**filters, "cursor": results.next_cursor}) if results.next_cursor else None
    return answer_page(
        request,
        "replay.html",
        **_progress(replay),
        report=report,
        charts=[draw_chart(measured) for measured in report.measures],
        chart_width=WIDTH,
        chart_height=HEIGHT,
        results=results.items,
        filters=filters,
        outcomes=list(_OUTCOMES),
        kinds=list(_KINDS),
        is_first=cursor is None,
        first_url=f"/admin/replays/{replay.id}?{urlencode(filters)}",
        next_url=f"/admin/replays/{replay.id}?{behind}" if behind else None,
        failed_items=(
            await replay_desk.replays.list_items(session.sees_tenant_id, replay.id, state=ItemState.FAILED, limit=10)
        ).items,
        formats=list(ExportFormat),
    )


@get("/replays/{replay_id:str}/progress")
async def show_replay_progress(
    request: StrataRequest,
    replay_id: FromPath[str],
    session: NamedDependency[SkipValidation[AdminSession]],
    replay_desk: NamedDependency[SkipValidation[ReplayDesk]],
) -> Response[bytes]:
    """The piece of the page that changes while it runs."""
    replay = await replay_desk.replays.load_replay(session.sees_tenant_id, replay_id)
    return answer_page(request, "_replay_progress.html", **_progress(replay))


@get("/replays/{replay_id:str}/items/{number:int}")
async def show_replay_item(
    request: StrataRequest,
    replay_id: FromPath[str],
    number: FromPath[int],
    session: NamedDependency[SkipValidation[AdminSession]],
    replay_desk: NamedDependency[SkipValidation[ReplayDesk]],
    cursor: FromQuery[str | None] = None,
) -> Response[bytes]:
    """The turns of one conversation in one repetition, recorded and candidate beside each other."""
    replay = await replay_desk.replays.load_replay(session.sees_tenant_id, replay_id)
    item = await replay_desk.replays.load_item(session.sees_tenant_id, replay_id, number)
    page = await replay_desk.reader.list_full(replay, wanted=ResultFilter(number=number), cursor=cursor, limit=_TURNS)
    behind = f"?{urlencode({'cursor': page.next_cursor})}" if page.next_cursor else None
    here = f"/admin/replays/{replay.id}/items/{number}"
    return answer_page(
        request,
        "replay_item.html",
        replay=replay,
        item=item,
        turns=[_show(full) for full in page.items],
        is_first=cursor is None,
        first_url=here,
        next_url=f"{here}{behind}" if behind else None,
        as_json=_as_text,
    )


@get("/replays/{replay_id:str}/export")
async def export_replay_page(
    replay_id: FromPath[str],
    session: NamedDependency[SkipValidation[AdminSession]],
    replay_desk: NamedDependency[SkipValidation[ReplayDesk]],
    form: Annotated[ExportFormat, QueryParameter(name="format")] = ExportFormat.JSON,
) -> Stream:
    """The file."""
    return await answer_export(replay_desk, session.sees_tenant_id, replay_id, form)


def count_ended(replay: Replay) -> int:
    """Items that are over, however."""
    return sum(replay.item_counts[state] for state in ENDED_ITEM_STATES)


def _progress(replay: Replay) -> dict[str, Any]:
    is_moving = replay.state is ReplayState.RUNNING or replay.item_counts[ItemState.RUNNING] > 0
    return {
        "replay": replay,
        "ended_count": count_ended(replay),
        "is_moving": is_moving,
        "actions": {name: ACTIONS[name] for name in actions_for(replay)},
    }


def _show(full: FullResult) -> ShownTurn:
    recorded = Said(blocks=(), stop_reason=None) if full.recorded is None else full.recorded
    cut = [_cut(said) for said in (recorded, full.candidate)]
    return ShownTurn(
        full=full,
        sides=lay_side_by_side(*cut),
        task=full.task[:_LONGEST],
        is_cut=any(len(said.text) > _LONGEST for said in (recorded, full.candidate)),
    )


def _cut(said: Said) -> Said:
    text = TextBlock(text=said.text[:_LONGEST])
    calls: Sequence[Block] = said.calls
    return Said(blocks=(text, *calls), stop_reason=said.stop_reason)


def _as_text(value: object) -> str:
    """Arguments of a call, bounded."""
    text = encode_json(value).decode()
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
