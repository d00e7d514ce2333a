"""The answers of a replay conversation: what was recorded, or what the candidate said, with the calls that stand
behind it.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Final

from server.conversation.block import JsonValue
from server.conversation.call import CallEnd, CallStart
from server.conversation.manifest import CONTINUATION
from server.conversation.store import NewAnswer
from server.conversation.turn import ModelResponseTurn, Native, StopReason, TurnState, open_call_ids
from server.conversation.usage import Usage, add_usages
from server.payload.call_records import add_costs, build_call_start
from server.payload.preparation import PreparedPayload
from server.providers.model_profile import find_profile
from server.replay.rerun.call import CallOutcome
from server.replay.rerun.source import RecordedStep

NOT_ASKED: Final = "not_asked"
"""The error code, and the kind of the warning, of a call that only stands in the place of a recorded one."""
_NO_EPOCH: Final = 0
"""What was made in it was made behind nothing that is sent now: its thinking is withheld."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedStep:
    """A payload for one step, beside what was recorded of it."""

    prepared: PreparedPayload
    request: bytes
    is_same_request: bool
    """It says what the recorded one said, to the same provider."""

    def keeps_thinking(self, recorded: ModelResponseTurn, native: Native) -> bool:
        """Whether a recorded answer is worth as much here as it was. On a prefix-bound model thinking is valid only
        behind the very request that it answered, and would be refused behind another one.
        """
        provider = self.prepared.provider.name
        if native.dialect != provider or self.is_same_request or not native.data:
            return True
        return not find_profile(provider, recorded.model).prefix_bound

    def needs_stand_in(self, recorded: ModelResponseTurn, native: Native) -> bool:
        """Whether the turn must not refer to the candidate's own call.

        A prefix-bound model wants the thinking of the calls that it is given results for, or none at all. So where the
        thinking of calls is lost, nothing before them keeps its own: that follows from calls of no epoch.
        """
        has_calls = recorded.state is TurnState.COMPLETE and bool(open_call_ids(recorded.blocks))
        return has_calls and not self.keeps_thinking(recorded, native)


def have_same_blocks(one: Sequence[Mapping[str, JsonValue]], other: Sequence[Mapping[str, JsonValue]]) -> bool:
    """Whether two requests say the same, by their manifests. Cache markers do not count, nor does a paused answer that
    one of them continues: it is a part of what is answered.
    """
    one, other = ([entry for entry in each if entry["kind"] != CONTINUATION] for each in (one, other))
    if not one or len(one) != len(other):
        return False
    return all(
        (first["kind"], first["role"], first["hash"]) == (second["kind"], second["role"], second["hash"])
        for first, second in zip(one, other, strict=True)
    )


def forced_answer(
    recorded: ModelResponseTurn,
    recorded_step: RecordedStep,
    prepared_step: PreparedStep,
    outcome: CallOutcome,
    ends: Sequence[CallEnd],
    *,
    spare_attempt: int,
) -> NewAnswer:
    """A turn of a teacher-forced replay conversation: it says what was recorded, and took what the candidate's calls
    took.

    `ends`: of all calls that were made for it. `spare_attempt`: a number before theirs, for one that stands in.
    """
    call, native = (outcome.start, outcome.end), recorded_step.native
    if prepared_step.needs_stand_in(recorded, native):
        call = _stand_in(prepared_step, spare_attempt, epoch=_NO_EPOCH)
    elif not prepared_step.keeps_thinking(recorded, native):
        native = _without_thinking(native, prepared_step)
    return _recorded_answer(recorded, native, recorded_step, call, ends)


def passed_answer(
    recorded: ModelResponseTurn, recorded_step: RecordedStep, prepared_step: PreparedStep | None, attempt: int
) -> NewAnswer:
    """A turn whose answer broke off when it was recorded. Nobody is asked; later requests make of it what they made.

    `prepared_step`: None where it broke off before any call.
    """
    if prepared_step is None:
        return _recorded_answer(recorded, recorded_step.native, recorded_step, None, ())
    native = recorded_step.native
    if not prepared_step.keeps_thinking(recorded, native):
        native = _without_thinking(native, prepared_step)
    return _recorded_answer(recorded, native, recorded_step, _stand_in(prepared_step, attempt), ())


def own_answer(prepared: PreparedPayload, outcome: CallOutcome, ends: Sequence[CallEnd]) -> NewAnswer:
    """A turn of a free-running replay conversation."""
    answer, failed = outcome.answer, outcome.end.error_code is not None
    return NewAnswer(
        blocks=answer.blocks,
        native=answer.native or Native(dialect=prepared.provider.name, data=b""),
        state=TurnState.FAILED if failed else TurnState.COMPLETE,
        stop_reason=StopReason.ERROR if failed else answer.stop_reason,
        error_code=outcome.end.error_code,
        usage=add_usages([end.usage for end in ends]),
        cost_usd=add_costs([end.cost_usd for end in ends]),
        pending_call_ids=() if failed else open_call_ids(answer.blocks),
        provider=prepared.provider.name,
        model=prepared.model,
        account=prepared.provider.account,
        start=outcome.start,
        end=outcome.end,
        model_version=answer.model_version,
    )


def _recorded_answer(
    recorded: ModelResponseTurn,
    native: Native,
    recorded_step: RecordedStep,
    call: tuple[CallStart, CallEnd] | None,
    ends: Sequence[CallEnd],
) -> NewAnswer:
    return NewAnswer(
        blocks=recorded.blocks,
        native=native,
        state=recorded.state,
        stop_reason=recorded.stop_reason,
        error_code=recorded.error_code,
        usage=add_usages([end.usage for end in ends]) if ends else Usage(),
        cost_usd=add_costs([end.cost_usd for end in ends]),
        pending_call_ids=open_call_ids(recorded.blocks) if recorded.state is TurnState.COMPLETE else (),
        provider=recorded.provider,
        model=recorded.model,
        account=None if recorded_step.call is None else recorded_step.call.start.account,
        start=None if call is None else call[0],
        end=None if call is None else call[1],
    )


def _without_thinking(native: Native, prepared_step: PreparedStep) -> Native:
    return Native(dialect=native.dialect, data=prepared_step.prepared.provider.unsigned_message(native.data) or b"")


def _stand_in(prepared_step: PreparedStep, attempt: int, *, epoch: int | None = None) -> tuple[CallStart, CallEnd]:
    """In the place of a recorded call: what follows has to know in which epoch it was, with which dynamic block."""
    prepared, now = prepared_step.prepared, datetime.now(UTC)
    payload = prepared.built.payload
    start = build_call_start(prepared, attempt, prepared.provider.open_stream(payload), payload)
    start = replace(
        start,
        epoch=prepared.epoch if epoch is None else epoch,
        started_at=now,
        request_hash=hashlib.sha256(prepared_step.request).digest(),
        warnings=(*start.warnings, {"kind": NOT_ASKED}),
    )
    return start, CallEnd(ended_at=now, first_byte_at=None, status=None, cost_usd=Decimal(0), error_code=NOT_ASKED)
