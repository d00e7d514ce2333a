"""What replays have asked and been answered, over HTTP: each item's conversation, and its calls to the byte."""

from typing import Annotated, Final

from litestar import Response, get
from litestar.di import NamedDependency
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
from server.replay.rerun.calls import ReplayCalls
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
    data_container=bytes, generate_examples=False, media_type=_OCTETS, description="The bytes, as they are."
)


@get(
    f"{_ITEM}/conversation",
    guards=[admin_only],
    summary="A replayed conversation as it went",
    response_description="A part of its timeline.",
    description="What the candidate was asked and said, with the calls that were made for each turn and those of no "
    "turn, such as a judge's. Turns of a teacher-forced replay say what was recorded. The newest turns, or those "
    "behind `after`.",
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
    """A part of the timeline."""
    timeline = await replay_calls.load_timeline(tenant_scope(caller), replay_id, number, after_seq=after, limit=limit)
    return answer_json(TimelineView.of(timeline))


@get(
    _CALL,
    guards=[admin_only],
    summary="One call of a replay",
    response_description="All that is known of it.",
    description="As for a call of a live conversation. A result names its call: `replay_seq` and `attempt`. "
    "`turn_seq` is below zero for calls of no turn.",
    tags=_TAGS,
    responses=document_errors(*_ERRORS, CallNotFound),
)
async def inspect_replayed_call(
    replay_id: FromPath[str],
    number: FromPath[int],
    turn_seq: FromPath[int],
    attempt: FromPath[int],
    caller: NamedDependency[SkipValidation[ApiKey]],
    replay_calls: NamedDependency[SkipValidation[ReplayCalls]],
) -> Response[CallView]:
    """The call."""
    found = await replay_calls.inspect_call(tenant_scope(caller), replay_id, number, turn_seq, attempt)
    return answer_json(CallView.of(found))


@get(
    f"{_CALL}/response",
    guards=[admin_only],
    media_type=_OCTETS,
    summary="The raw response of a replay's call",
    response_description="The bytes, as they came from the wire.",
    description="Every byte of the body, signatures included. Empty where nothing came, or retention has removed it.",
    tags=_TAGS,
    responses={200: _BYTES, **document_errors(*_ERRORS, CallNotFound)},
)
async def show_replayed_response(
    replay_id: FromPath[str],
    number: FromPath[int],
    turn_seq: FromPath[int],
    attempt: FromPath[int],
    caller: NamedDependency[SkipValidation[ApiKey]],
    replay_calls: NamedDependency[SkipValidation[ReplayCalls]],
) -> Response[bytes]:
    """The raw bytes."""
    raw = await replay_calls.load_response(tenant_scope(caller), replay_id, number, turn_seq, attempt)
    return answer_bytes(raw, "response")


@get(
    f"{_CALL}/request",
    guards=[admin_only],
    media_type=_OCTETS,
    summary="The request of a replay's call",
    response_description="The bytes, made again from what is stored.",
    description="`x-strata-proof` says whether they have the stored hash: `equal`, `different`, or `impossible`, then "
    "there are none.",
    tags=_TAGS,
    responses={200: _BYTES, **document_errors(*_ERRORS, CallNotFound)},
)
async def show_replayed_request(
    replay_id: FromPath[str],
    number: FromPath[int],
    turn_seq: FromPath[int],
    attempt: FromPath[int],
    caller: NamedDependency[SkipValidation[ApiKey]],
    replay_calls: NamedDependency[SkipValidation[ReplayCalls]],
) -> Response[bytes]:
    """The bytes of the request."""
    made = await replay_calls.rebuild_request(tenant_scope(caller), replay_id, number, turn_seq, attempt)
    return answer_bytes(made.body or b"", "request", {"x-strata-proof": made.proof.value})
