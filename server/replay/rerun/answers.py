"""The answers that are stored in replay conversations: the recorded ones or the candidate's, with their calls."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Final

from server.conversation.call import Call, CallEnd, CallStart
from server.conversation.errors import Internal
from server.conversation.store import NewAnswer
from server.conversation.turn import ModelResponseTurn, Native, StopReason, TurnState, open_call_ids
from server.conversation.usage import Usage, add_usages
from server.payload.call_records import add_costs, build_call_start
from server.payload.preparation import PreparedPayload
from server.providers.continuation import fold_earlier, fold_events
from server.providers.model_profile import find_profile
from server.replay.rerun.payload import is_same_request
from server.replay.rerun.source import RecordedStep
from server.turns.stored import OpenFold, bodies_before, is_stream

NOT_ASKED: Final = "not_asked"
"""The error code, and the kind of the warning, of a placeholder: a call that was not made."""
ANSWER_GONE: Final = "answer_gone"
"""The error code of an answer whose bytes were removed by retention before it was compared."""
_NO_EPOCH: Final = 0
"""The epoch of a call whose thinking must not be sent again: no prefix that is sent now belongs to it."""


def needs_placeholder(prepared: PreparedPayload, recorded: ModelResponseTurn, recorded_step: RecordedStep) -> bool:
    """Return whether the stored turn must not refer to the candidate's own call, but to a placeholder.

    A prefix-bound model requires the thinking of the tool calls that it gets results for, or none at all. If the
    thinking of these calls is not valid, no earlier thinking may be sent either. A call without an epoch has that
    effect.
    """
    has_calls = recorded.state is TurnState.COMPLETE and bool(open_call_ids(recorded.blocks))
    return has_calls and not _keeps_thinking(prepared, recorded, recorded_step)


def force_answer(
    recorded: ModelResponseTurn,
    recorded_step: RecordedStep,
    prepared: PreparedPayload,
    own: NewAnswer,
    *,
    spare_attempt: int,
) -> NewAnswer:
    """Build a turn of a teacher-forced replay conversation: the recorded content with the candidate's call and cost.

    `spare_attempt`: the number of the placeholder, if one is needed; it precedes the candidate's attempts.
    """
    start, end, native = own.start, own.end, recorded_step.native
    if start is not None and needs_placeholder(prepared, recorded, recorded_step):
        start, end = _placeholder(replace(start, attempt=spare_attempt, epoch=_NO_EPOCH))
    elif not _keeps_thinking(prepared, recorded, recorded_step):
        native = _without_thinking(native, prepared)
    stored = _recorded_answer(recorded, native, recorded_step, start, end)
    return replace(stored, usage=own.usage, cost_usd=own.cost_usd)


def copy_answer(
    recorded: ModelResponseTurn,
    recorded_step: RecordedStep,
    prepared: PreparedPayload | None,
    attempt: int,
    request_hash: bytes,
) -> NewAnswer:
    """Build the turn of an incomplete recorded answer. The candidate is not called; the turn only becomes history.

    `prepared`: None if the recorded turn ended before any call.
    """
    if prepared is None:
        return _recorded_answer(recorded, recorded_step.native, recorded_step, None, None)
    native = recorded_step.native
    if not _keeps_thinking(prepared, recorded, recorded_step):
        native = _without_thinking(native, prepared)
    payload = prepared.built.payload
    start = build_call_start(prepared, attempt, prepared.provider.open_stream(payload), payload)
    start, end = _placeholder(replace(start, request_hash=request_hash))
    return _recorded_answer(recorded, native, recorded_step, start, end)


def read_answer(calls: Sequence[Call], folds: Mapping[str, OpenFold]) -> NewAnswer | None:
    """Read the candidate's answer from the stored calls of a turn. None if the candidate was not called."""
    made = [call for call in calls if call.end is not None and call.end.error_code != NOT_ASKED]
    if not made:
        return None
    call, ends = made[-1], [each.end for each in made if each.end is not None]
    earlier, end = bodies_before(call, calls), ends[-1]
    is_gone = end.error_code is None and (not end.raw_response or None in earlier)
    code = ANSWER_GONE if is_gone else end.error_code
    open_fold = folds.get(call.start.provider)
    if open_fold is None:
        raise Internal(f"There is no provider {call.start.provider}.")
    fold = open_fold()
    fold_earlier(fold, [body or b"" for body in earlier])
    if is_stream(call):
        fold_events(fold, end.raw_response or b"")
    answer = fold.answer
    return NewAnswer(
        blocks=answer.blocks,
        native=answer.native or Native(dialect=call.start.provider, data=b""),
        state=TurnState.COMPLETE if code is None else TurnState.FAILED,
        stop_reason=answer.stop_reason if code is None else StopReason.ERROR,
        error_code=code,
        usage=add_usages([each.usage for each in ends]),
        cost_usd=add_costs([each.cost_usd for each in ends]),
        pending_call_ids=open_call_ids(answer.blocks) if code is None else (),
        provider=call.start.provider,
        model=call.start.model,
        account=call.start.account,
        start=call.start,
        end=replace(end, error_code=code),
        model_version=answer.model_version,
    )


def _recorded_answer(
    recorded: ModelResponseTurn,
    native: Native,
    recorded_step: RecordedStep,
    start: CallStart | None,
    end: CallEnd | None,
) -> NewAnswer:
    return NewAnswer(
        blocks=recorded.blocks,
        native=native,
        state=recorded.state,
        stop_reason=recorded.stop_reason,
        error_code=recorded.error_code,
        usage=Usage(),
        cost_usd=Decimal(0),
        pending_call_ids=open_call_ids(recorded.blocks) if recorded.state is TurnState.COMPLETE else (),
        provider=recorded.provider,
        model=recorded.model,
        account=None if recorded_step.call is None else recorded_step.call.start.account,
        start=start,
        end=end,
    )


def _keeps_thinking(prepared: PreparedPayload, recorded: ModelResponseTurn, recorded_step: RecordedStep) -> bool:
    """Return whether the thinking of a recorded answer stays valid. On a prefix-bound model it is valid only after
    exactly the request that it answered.
    """
    provider, native = prepared.provider.name, recorded_step.native
    if native.dialect != provider or not native.data or is_same_request(prepared, recorded_step.call):
        return True
    return not find_profile(provider, recorded.model).prefix_bound


def _without_thinking(native: Native, prepared: PreparedPayload) -> Native:
    return Native(dialect=native.dialect, data=prepared.provider.unsigned_message(native.data) or b"")


def _placeholder(start: CallStart) -> tuple[CallStart, CallEnd]:
    """Build a call that was not made. Later requests are built from its epoch and its dynamic block."""
    now = datetime.now(UTC)
    start = replace(start, started_at=now, warnings=(*start.warnings, {"kind": NOT_ASKED}))
    return start, CallEnd(ended_at=now, first_byte_at=None, status=None, cost_usd=Decimal(0), error_code=NOT_ASKED)
