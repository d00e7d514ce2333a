"""The page and the downloads of a replay's call, the same as those of a live conversation's call."""

from dataclasses import replace
from typing import Any, Final

from litestar import Response, get
from litestar.di import NamedDependency, Provide
from litestar.params import FromPath, SkipValidation

from server.inspection.admin_sessions import AdminSession
from server.replay.rerun.calls import ReplayCallKey, ReplayCalls
from server.replay.rerun.service import ReplayService
from server.web.admin.call_links import ItemLinks
from server.web.admin.call_pages import answer_call, answer_call_json
from server.web.api.inspection import answer_bytes
from server.web.request import StrataRequest

_PATH: Final = "/replays/{replay_id:str}/items/{number:int}/calls/{turn_seq:int}/{attempt:int}"


def provide_call_key(
    replay_id: FromPath[str],
    number: FromPath[int],
    turn_seq: FromPath[int],
    attempt: FromPath[int],
    session: NamedDependency[SkipValidation[AdminSession]],
) -> ReplayCallKey:
    """Build the key of the call that the path names."""
    return ReplayCallKey(
        tenant_id=session.tenant_scope, replay_id=replay_id, number=number, turn_seq=turn_seq, attempt=attempt
    )


_CALL_KEY: Final = {"call_key": Provide(provide_call_key, sync_to_thread=False)}


@get(_PATH, dependencies=_CALL_KEY)
async def show_replayed_call_page(
    request: StrataRequest,
    call_key: NamedDependency[SkipValidation[ReplayCallKey]],
    replay_service: NamedDependency[SkipValidation[ReplayService]],
    replay_calls: NamedDependency[SkipValidation[ReplayCalls]],
) -> Response[bytes]:
    """Show the call."""
    found = await replay_calls.inspect_call(call_key)
    previous = None
    if found.previous is not None:
        previous_key = replace(call_key, turn_seq=found.previous.turn_seq, attempt=found.previous.start.attempt)
        previous = await replay_calls.rebuild_request(previous_key)
    replay = await replay_service.replays.load_replay(call_key.tenant_id, call_key.replay_id)
    return await answer_call(request, found, previous, ItemLinks(replay=replay, number=call_key.number))


@get(f"{_PATH}/request", dependencies=_CALL_KEY)
async def download_replayed_request(
    call_key: NamedDependency[SkipValidation[ReplayCallKey]],
    replay_calls: NamedDependency[SkipValidation[ReplayCalls]],
) -> Response[bytes]:
    """Download the rebuilt request."""
    rebuilt = await replay_calls.rebuild_request(call_key)
    return answer_bytes(rebuilt.body or b"", _name("request", call_key), {"x-strata-proof": rebuilt.proof.value})


@get(f"{_PATH}/response", dependencies=_CALL_KEY)
async def download_replayed_response(
    call_key: NamedDependency[SkipValidation[ReplayCallKey]],
    replay_calls: NamedDependency[SkipValidation[ReplayCalls]],
) -> Response[bytes]:
    """Download the raw response."""
    return answer_bytes(await replay_calls.load_response(call_key), _name("response", call_key))


@get(f"{_PATH}/json", dependencies=_CALL_KEY)
async def download_replayed_call(
    call_key: NamedDependency[SkipValidation[ReplayCallKey]],
    replay_calls: NamedDependency[SkipValidation[ReplayCalls]],
) -> Response[Any]:
    """Download the call as JSON, as `/admin/api` returns it."""
    return answer_call_json(await replay_calls.inspect_call(call_key), _name("call", call_key))


def _name(part: str, key: ReplayCallKey) -> str:
    return f"{part}-{key.number}-{key.turn_seq}-{key.attempt}"
