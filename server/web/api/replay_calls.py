"""Replay conversations and their calls for operators, under `/admin/api`."""

from typing import Annotated, Final

from litestar import Response, get
from litestar.di import NamedDependency, Provide
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, QueryParameter, SkipValidation

from server.conversation.api_key import ApiKey
from server.conversation.errors import (
    CallNotFound,
    ConversationNotFound,
    DatabaseUnavailable,
    KeyRejected,
    ReplayNotFound,
    ScopeMissing,
    ValidationFailed,
)
from server.inspection.timeline import TIMELINE_LIMIT
from server.replay.rerun.calls import ReplayCallKey, ReplayCalls
from server.web.api.call_views import CallView
from server.web.api.inspection import answer_bytes, tenant_scope
from server.web.api.inspection_views import TimelineView
from server.web.auth import admin_only
from server.web.errors import document_errors
from server.web.json_text import answer_json

_ITEM: Final = "/admin/api/replays/{replay_id:str}/items/{number:int}"
_CALL: Final = f"{_ITEM}/calls/{{turn_seq:int}}/{{attempt:int}}"
_OCTETS: Final = "application/octet-stream"
_ERRORS: Final = (
    ValidationFailed, KeyRejected, ScopeMissing, DatabaseUnavailable, ReplayNotFound, ConversationNotFound,
)  # fmt: skip
_TAGS: Final = ["replays"]
_BYTES: Final = ResponseSpec(
    data_container=bytes, generate_examples=False, media_type=_OCTETS, description="The unchanged bytes."
)


def provide_call_key(
    replay_id: FromPath[str],
    number: FromPath[int],
    turn_seq: FromPath[int],
    attempt: FromPath[int],
    caller: NamedDependency[SkipValidation[ApiKey]],
) -> ReplayCallKey:
    """Build the key of the call that the path names."""
    return ReplayCallKey(
        tenant_id=tenant_scope(caller), replay_id=replay_id, number=number, turn_seq=turn_seq, attempt=attempt
    )


_CALL_KEY: Final = {"call_key": Provide(provide_call_key, sync_to_thread=False)}


@get(
    f"{_ITEM}/conversation",
    guards=[admin_only],
    summary="Show the timeline of a replay conversation",
    response_description="A part of the timeline.",
    description="The inputs and answers of an item, with the calls of each turn and the background calls, such as "
    "those of a judge. Turns of a teacher-forced replay contain the recorded answers. Returns the newest turns, or "
    "those after `after`.",
    tags=_TAGS,
    responses=document_errors(*_ERRORS),
)
async def show_replayed_conversation(
    replay_id: FromPath[str],
    number: FromPath[int],
    caller: NamedDependency[SkipValidation[ApiKey]],
    replay_calls: NamedDependency[SkipValidation[ReplayCalls]],
    after: Annotated[int | None, QueryParameter(ge=0)] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=TIMELINE_LIMIT)] = 50,
) -> Response[TimelineView]:
    """Return a part of the timeline."""
    timeline = await replay_calls.load_timeline(tenant_scope(caller), replay_id, number, after_seq=after, limit=limit)
    return answer_json(TimelineView.of(timeline))


@get(
    _CALL,
    guards=[admin_only],
    dependencies=_CALL_KEY,
    summary="Show a call of a replay",
    response_description="The call.",
    description="The same as for a call of a live conversation. A result names its call by `replay_seq` and `attempt`. "
    "`turn_seq` is negative for background calls.",
    tags=_TAGS,
    responses=document_errors(*_ERRORS, CallNotFound),
)
async def inspect_replayed_call(
    call_key: NamedDependency[SkipValidation[ReplayCallKey]],
    replay_calls: NamedDependency[SkipValidation[ReplayCalls]],
) -> Response[CallView]:
    """Return the call."""
    return answer_json(CallView.of(await replay_calls.inspect_call(call_key)))


@get(
    f"{_CALL}/response",
    guards=[admin_only],
    dependencies=_CALL_KEY,
    media_type=_OCTETS,
    summary="Show the raw response of a replay's call",
    response_description="The bytes of the body, as received.",
    description="Every byte of the body, including signatures. Empty if there was no response, or if retention has "
    "removed it.",
    tags=_TAGS,
    responses={200: _BYTES, **document_errors(*_ERRORS, CallNotFound)},
)
async def show_replayed_response(
    call_key: NamedDependency[SkipValidation[ReplayCallKey]],
    replay_calls: NamedDependency[SkipValidation[ReplayCalls]],
) -> Response[bytes]:
    """Return the raw response."""
    return answer_bytes(await replay_calls.load_response(call_key), "response")


@get(
    f"{_CALL}/request",
    guards=[admin_only],
    dependencies=_CALL_KEY,
    media_type=_OCTETS,
    summary="Show the request of a replay's call",
    response_description="The bytes of the body, rebuilt from the store.",
    description="`x-strata-proof` says whether the bytes have the stored hash: `equal`, `different`, or `impossible` "
    "if the request cannot be rebuilt. Then the body is empty.",
    tags=_TAGS,
    responses={200: _BYTES, **document_errors(*_ERRORS, CallNotFound)},
)
async def show_replayed_request(
    call_key: NamedDependency[SkipValidation[ReplayCallKey]],
    replay_calls: NamedDependency[SkipValidation[ReplayCalls]],
) -> Response[bytes]:
    """Return the rebuilt request."""
    rebuilt = await replay_calls.rebuild_request(call_key)
    return answer_bytes(rebuilt.body or b"", "request", {"x-strata-proof": rebuilt.proof.value})
