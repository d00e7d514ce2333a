"""Routes to take, follow and list turns.

A turn belongs to the server and does not end with the connection. A request for a turn is answered in one of three
ways: with a stream of its events, with its result when it has ended, or with 202 at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal
from uuid import uuid4

from litestar import Response, get, post
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter, SkipValidation
from pydantic import Field

from server.conversation.api_key import ApiKey
from server.conversation.conversation import Conversation, ConversationState, ConversationStatus
from server.conversation.errors import (
    ConversationBusy,
    ConversationNotFound,
    CursorInvalid,
    HistoryRuleBroken,
    IdempotencyKeyReused,
    Internal,
    ProviderFailed,
    QueueFull,
    RevisionMismatch,
    ShuttingDown,
    TurnInterrupted,
    TurnNotFound,
    every_error,
)
from server.conversation.event import TurnEnded
from server.conversation.page import PAGE_LIMIT
from server.conversation.store import NewInput, Store
from server.conversation.turn import FAILURE_MEMBERS, TurnState
from server.turns.handle import TurnHandle
from server.turns.request import TurnRequest
from server.turns.service import TurnService
from server.web.api.turn_body import TurnInput, read_turn_request
from server.web.api.views import (
    InputTurnView,
    ModelTurnView,
    RunningAnswer,
    RunningTurnView,
    StatusView,
    TurnAnswer,
    View,
    find_error,
    view_turn,
)
from server.web.auth import REFUSAL, client_only, client_sparing_duplicates, provide_caller
from server.web.errors import ANSWERS, answer_headers, build_problem, document_client_errors
from server.web.headers import LastEventId, TurnHeaders, read_last_event_id, wants_stream
from server.web.json_text import answer_json, encode_json
from server.web.problem import PROBLEM_MEDIA_TYPE
from server.web.request import PROBLEM_CODE, StrataRequest, part_of, request_id_of
from server.web.sse import StreamOptions, TurnStream


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOptions:
    """Settings of the routes for turns."""

    image_limit_bytes: int
    stream: StreamOptions


class TurnPage(View):
    """Turns in order."""

    data: list[InputTurnView | ModelTurnView]
    next_cursor: str | None = Field(description="Null: there are no more.", examples=[None])


ACCEPTED: Final = ResponseSpec(
    data_container=RunningAnswer, generate_examples=False, description="The input is stored, the turn is running."
)


_NOTHING_LEFT: Final = ResponseSpec(
    data_container=None, generate_examples=False, description="The turn has ended, and there are no further events."
)


@post(
    "/v1/conversations/{conversation_id:str}/turns",
    guards=[client_sparing_duplicates],
    status_code=200,
    summary="Take a turn",
    response_description="The ended turn. With `Accept: text/event-stream`: its events while it runs.",
    description="Send the new input: a task of the user, or the results of all pending tool calls. The input is stored "
    "before the model is called, and the answer before the turn ends. A disconnect does not cancel the turn.\n\n"
    "`Accept: application/json` waits for the end, `Accept: text/event-stream` streams, `Prefer: respond-async` "
    "answers 202 at once. A turn that fails is answered with the problem of its error, with the turn in `turn`.",
    tags=["turns"],
    responses={
        202: ACCEPTED,
        **document_client_errors(
            ConversationNotFound,
            HistoryRuleBroken,
            ConversationBusy,
            QueueFull,
            RevisionMismatch,
            IdempotencyKeyReused,
            ShuttingDown,
            TurnInterrupted,
            *every_error(ProviderFailed),
            body=True,
        ),
    },
)
async def take_turn(
    request: StrataRequest,
    conversation_id: FromPath[str],
    data: JSONBody[TurnInput],
    turn_headers: NamedDependency[SkipValidation[TurnHeaders]],
) -> Response[TurnAnswer]:
    """Answer with a stream, with the ended turn, or with 202.

    It has one dependency and looks the others up: Litestar starts a task for each dependency if there are several,
    which would be a tenth of what a turn costs.
    """
    caller = await provide_caller(request)
    store: Store = part_of(request.scope, "store")
    turn_service: TurnService = part_of(request.scope, "turn_service")
    turn_options: TurnOptions = part_of(request.scope, "turn_options")
    turn_request = await read_turn_request(
        conversation_id, data, turn_headers, image_limit_bytes=turn_options.image_limit_bytes
    )
    request.forget_body()
    await _check_rate(request, store, caller.tenant_id, turn_request)
    handle = await turn_service.take_turn(caller.tenant_id, turn_request)
    headers = {"idempotency-replayed": "true"} if handle.duplicate else {}
    if wants_stream(request.headers.get("accept")):
        return _stream(handle, turn_options, headers)
    if turn_headers.prefers_async:
        conversation = await store.load_conversation(caller.tenant_id, conversation_id)
        if _is_running(conversation, handle.seq) or not handle.duplicate:
            return answer_running(handle.seq, conversation, {**headers, "preference-applied": "respond-async"})
    return _answer_ended(request, await handle.wait(), headers)


@get(
    "/v1/conversations/{conversation_id:str}/turns",
    guards=[client_only],
    summary="List the turns of a conversation",
    response_description="A page of turns.",
    description="Oldest first, or newest first with `order=desc`. A running answer is not included.",
    tags=["turns"],
    responses=document_client_errors(ConversationNotFound, CursorInvalid),
)
async def list_turns(
    conversation_id: FromPath[str],
    caller: NamedDependency[SkipValidation[ApiKey]],
    store: NamedDependency[SkipValidation[Store]],
    cursor: FromQuery[str | None] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_LIMIT)] = 20,
    order: FromQuery[Literal["asc", "desc"]] = "asc",
) -> Response[TurnPage]:
    page = await store.list_turns(
        caller.tenant_id, conversation_id, cursor=cursor, limit=limit, newest_first=order == "desc"
    )
    return answer_json(TurnPage(data=[view_turn(turn) for turn in page.items], next_cursor=page.next_cursor))


@get(
    "/v1/conversations/{conversation_id:str}/turns/{seq:int}",
    guards=[client_only],
    summary="Load a turn",
    response_description="The turn.",
    description="A running answer has the state `running` and no content; its events have the content so far.",
    tags=["turns"],
    responses=document_client_errors(ConversationNotFound, TurnNotFound),
)
async def show_turn(
    conversation_id: FromPath[str],
    seq: FromPath[int],
    caller: NamedDependency[SkipValidation[ApiKey]],
    store: NamedDependency[SkipValidation[Store]],
) -> Response[InputTurnView | ModelTurnView | RunningTurnView]:
    try:
        return answer_json(view_turn(await store.load_turn(caller.tenant_id, conversation_id, seq)))
    except TurnNotFound:
        if _is_running(await store.load_conversation(caller.tenant_id, conversation_id), seq):
            return answer_json(RunningTurnView(seq=seq), headers={"retry-after": "1"})
    # It may have ended between the two reads.
    return answer_json(view_turn(await store.load_turn(caller.tenant_id, conversation_id, seq)))


@get(
    "/v1/conversations/{conversation_id:str}/turns/{seq:int}/events",
    guards=[client_only],
    summary="Stream the events of a turn",
    response_description="The events, from the first or from the one after `last-event-id`.",
    description="Works while the turn runs and after it has ended, from any server process. The numbers of events do "
    "not change. If there are no further events, the answer is 204, after which a browser does not reconnect.",
    tags=["turns"],
    responses={204: _NOTHING_LEFT, **document_client_errors(ConversationNotFound, TurnNotFound)},
)
async def follow_turn(
    conversation_id: FromPath[str],
    seq: FromPath[int],
    caller: NamedDependency[SkipValidation[ApiKey]],
    turn_service: NamedDependency[SkipValidation[TurnService]],
    turn_options: NamedDependency[SkipValidation[TurnOptions]],
    after: Annotated[
        int | None, QueryParameter(ge=0, description="Same as `last-event-id`, for clients that cannot set headers.")
    ] = None,
    last_event_id: LastEventId = None,
) -> Response[bytes]:
    last_seen = read_last_event_id(last_event_id, after)
    handle = await turn_service.follow_turn(caller.tenant_id, conversation_id, seq)
    return _stream(handle, turn_options, {}, after=last_seen)


async def _check_rate(request: StrataRequest, store: Store, tenant_id: str, turn_request: TurnRequest) -> None:
    """Raise the `RateLimited` that the guard deferred, unless the turn was accepted before."""
    refusal = request.scope["state"].get(REFUSAL)
    if refusal is None:
        return
    turn = NewInput(
        conversation_id=turn_request.conversation_id,
        kind=turn_request.kind,
        blocks=turn_request.blocks,
        body_hash=turn_request.body_hash,
        lease_token=uuid4(),
        lease_owner="",
        lease_seconds=0,
        idempotency_key=turn_request.idempotency_key,
        announces_retry=turn_request.announces_retry,
    )
    if await store.find_duplicate(tenant_id, turn) is None:
        raise refusal


def _is_running(conversation: Conversation, seq: int) -> bool:
    """Return whether this is the number of the running answer."""
    return conversation.state is ConversationState.RUNNING and conversation.next_seq == seq + 1


def _stream(handle: TurnHandle, options: TurnOptions, headers: Mapping[str, str], *, after: int = 0) -> Response[Any]:
    return TurnStream(handle.read(after), options.stream, headers=headers)


def answer_running(seq: int, conversation: Conversation, headers: Mapping[str, str]) -> Response[Any]:
    status = ConversationStatus(
        id=conversation.id,
        revision=conversation.revision,
        state=conversation.state,
        pending_calls=conversation.pending_calls,
    )
    answer = RunningAnswer(turn=RunningTurnView(seq=seq), conversation=StatusView.of(status))
    return answer_json(answer, 202, {"location": f"/v1/conversations/{conversation.id}/turns/{seq}", **headers})


def view_end(ended: TurnEnded) -> TurnAnswer:
    return TurnAnswer(turn=ModelTurnView.of(ended.turn), conversation=StatusView.of(ended.conversation))


def _answer_ended(request: StrataRequest, ended: TurnEnded, headers: dict[str, str]) -> Response[Any]:
    """Answer with a turn that completed or was cancelled; otherwise with the problem of its error.

    A client must not repeat such a request: without an idempotency key it would take another turn, with the key it
    would get the same one.
    """
    view = view_end(ended)
    if ended.turn.state in {TurnState.COMPLETE, TurnState.CANCELLED}:
        return answer_json(view, 200, headers)
    kind = (find_error(view.turn.error.code) if view.turn.error else None) or Internal
    request.scope["state"][PROBLEM_CODE] = kind.code
    error = kind(**{name: value for name in FAILURE_MEMBERS if (value := ended.turn.ending.get(name)) is not None})
    problem = build_problem(error, request_id_of(request.scope)).model_dump(exclude_none=True)
    # Only a delay that the provider requested: the default delay of the code would suggest that a retry helps.
    waiting = answer_headers(error) if "retry_after_seconds" in error.details else {}
    members = {"conversation_id": ended.conversation.id, "turn_seq": ended.turn.seq, **view.model_dump()}
    return Response(
        content=encode_json({**problem, **members}),
        status_code=ANSWERS[kind].status,
        media_type=PROBLEM_MEDIA_TYPE,
        headers={**headers, **waiting, "x-should-retry": "false"},
    )
