"""Calls of replays under the lens: the same page as for any other call, and the same downloads."""

from typing import Any, Final

from litestar import Response, get
from litestar.di import NamedDependency
from litestar.params import FromPath, SkipValidation

from server.inspection.admin_sessions import AdminSession
from server.replay.rerun.calls import ReplayCalls
from server.replay.rerun.service import ReplayService
from server.web.admin.call_links import ItemLinks
from server.web.admin.call_pages import answer_call, answer_call_json
from server.web.api.inspection import answer_bytes
from server.web.request import StrataRequest

_PATH: Final = "/replays/{replay_id:str}/items/{number:int}/calls/{turn_seq:int}/{attempt:int}"


@get(_PATH)
async def show_replayed_call_page(
    request: StrataRequest,
    replay_id: FromPath[str],
    number: FromPath[int],
    turn_seq: FromPath[int],
    attempt: FromPath[int],
    session: NamedDependency[SkipValidation[AdminSession]],
    replay_service: NamedDependency[SkipValidation[ReplayService]],
    replay_calls: NamedDependency[SkipValidation[ReplayCalls]],
) -> Response[bytes]:
    """The whole call."""
    reach = session.tenant_scope
    found = await replay_calls.inspect_call(reach, replay_id, number, turn_seq, attempt)
    previous = None
    if found.previous is not None:
        previous = await replay_calls.rebuild_request(
            reach, replay_id, number, found.previous.turn_seq, found.previous.start.attempt
        )
    replay = await replay_service.replays.load_replay(reach, replay_id)
    return await answer_call(request, found, previous, ItemLinks(replay=replay, number=number))


@get(f"{_PATH}/request")
async def download_replayed_request(
    replay_id: FromPath[str],
    number: FromPath[int],
    turn_seq: FromPath[int],
    attempt: FromPath[int],
    session: NamedDependency[SkipValidation[AdminSession]],
    replay_calls: NamedDependency[SkipValidation[ReplayCalls]],
) -> Response[bytes]:
    """Every byte of the request, made again."""
    made = await replay_calls.rebuild_request(session.tenant_scope, replay_id, number, turn_seq, attempt)
    name = f"request-{number}-{turn_seq}-{attempt}"
    return answer_bytes(made.body or b"", name, {"x-strata-proof": made.proof.value})


@get(f"{_PATH}/response")
async def download_replayed_response(
    replay_id: FromPath[str],
    number: FromPath[int],
    turn_seq: FromPath[int],
    attempt: FromPath[int],
    session: NamedDependency[SkipValidation[AdminSession]],
    replay_calls: NamedDependency[SkipValidation[ReplayCalls]],
) -> Response[bytes]:
    """Every byte that came back."""
    raw = await replay_calls.load_response(session.tenant_scope, replay_id, number, turn_seq, attempt)
    return answer_bytes(raw, f"response-{number}-{turn_seq}-{attempt}")


@get(f"{_PATH}/json")
async def download_replayed_call(
    replay_id: FromPath[str],
    number: FromPath[int],
    turn_seq: FromPath[int],
    attempt: FromPath[int],
    session: NamedDependency[SkipValidation[AdminSession]],
    replay_calls: NamedDependency[SkipValidation[ReplayCalls]],
) -> Response[Any]:
    """The call as `/admin/api` answers it."""
    found = await replay_calls.inspect_call(session.tenant_scope, replay_id, number, turn_seq, attempt)
    return answer_call_json(found, f"call-{number}-{turn_seq}-{attempt}")
