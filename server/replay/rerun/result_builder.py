"""Builds the result of one step of a replay from the recorded answer and the candidate's."""

from datetime import datetime
from typing import Final

from server.conversation.call import Call, CallEnd, CallStart
from server.conversation.errors import Internal
from server.conversation.store import NewAnswer
from server.conversation.turn import ModelResponseTurn, TurnState
from server.replay.rerun.assertions import Subject
from server.replay.rerun.comparison import AnswerContent, Comparison, compare_answers
from server.replay.rerun.result import AnswerFacts, DivergenceKind, JudgeResult, Outcome, TurnResult
from server.replay.rerun.walk import WalkStep

BEYOND_RECORDING: Final = "beyond_recording"
"""The note of an answer without a recorded counterpart."""


def build_result(
    step: WalkStep,
    answer: NewAnswer | None,
    recorded_call: Call | None,
    *,
    note: str | None = None,
    judge: JudgeResult | None = None,
) -> TurnResult:
    """Build a result without its assertions, which are evaluated on `build_subject`.

    `answer`: the candidate's; None if the candidate was not called. `note` replaces the reason why nothing was
    compared.
    """
    recorded = step.recorded
    facts = None if recorded is None else _describe_recorded(recorded, recorded_call)
    if answer is None:
        return TurnResult(
            position=step.position,
            source_seq=None if recorded is None else recorded.seq,
            replay_seq=step.answer_seq,
            attempt=None,
            outcome=Outcome.NOT_COMPARED,
            note=_describe_missing(recorded),
            recorded=facts,
        )
    comparison = _compare(recorded, answer)
    outcome = Outcome.NOT_COMPARED if comparison is None else comparison.outcome
    return TurnResult(
        position=step.position,
        source_seq=None if recorded is None else recorded.seq,
        replay_seq=step.answer_seq,
        attempt=_call_of(answer)[0].attempt,
        outcome=Outcome.FAILED if answer.error_code else outcome,
        kinds=(DivergenceKind.ERROR,) if answer.error_code else () if comparison is None else comparison.kinds,
        similarity=None if comparison is None else comparison.similarity,
        severity=1.0 if answer.error_code else 0.0 if comparison is None else comparison.severity,
        note=note or (None if comparison or answer.error_code else _describe_missing(recorded)),
        recorded=facts,
        candidate=_describe_candidate(answer),
        judge=judge,
    )


def build_subject(step: WalkStep, answer: NewAnswer, result: TurnResult) -> Subject:
    """Build the subject of the assertions. `result`: from `build_result`."""
    recorded = step.recorded
    return Subject(
        candidate=AnswerContent(blocks=answer.blocks, stop_reason=answer.stop_reason),
        recorded=None if recorded is None else AnswerContent(blocks=recorded.blocks, stop_reason=recorded.stop_reason),
        similarity=result.similarity,
        facts=result.candidate or _describe_candidate(answer),
    )


def is_comparable(recorded: ModelResponseTurn | None) -> bool:
    """Return whether there is a complete recorded answer."""
    return recorded is not None and recorded.state is TurnState.COMPLETE


def _describe_recorded(turn: ModelResponseTurn, call: Call | None) -> AnswerFacts:
    end = None if call is None else call.end
    return AnswerFacts(
        stop_reason=turn.stop_reason,
        error_code=turn.error_code,
        usage=turn.usage,
        cost_usd=turn.cost_usd,
        latency_ms=None if call is None or end is None else _milliseconds(call.start, end.ended_at),
        first_byte_ms=None if call is None or end is None else _milliseconds(call.start, end.first_byte_at),
    )


def _describe_candidate(answer: NewAnswer) -> AnswerFacts:
    """Build the facts of an answer: usage and cost of all attempts, times of the call that produced it."""
    start, end = _call_of(answer)
    return AnswerFacts(
        stop_reason=answer.stop_reason,
        error_code=answer.error_code,
        usage=answer.usage,
        cost_usd=answer.cost_usd,
        latency_ms=_milliseconds(start, end.ended_at),
        first_byte_ms=_milliseconds(start, end.first_byte_at),
    )


def _call_of(answer: NewAnswer) -> tuple[CallStart, CallEnd]:
    if answer.start is None or answer.end is None:
        raise Internal("An answer of the candidate has a call.")
    return answer.start, answer.end


def _milliseconds(start: CallStart, until: datetime | None) -> int | None:
    return None if until is None else max(0, round((until - start.started_at).total_seconds() * 1000))


def _compare(recorded: ModelResponseTurn | None, answer: NewAnswer) -> Comparison | None:
    if recorded is None or not is_comparable(recorded) or answer.error_code is not None:
        return None
    return compare_answers(
        AnswerContent(blocks=recorded.blocks, stop_reason=recorded.stop_reason),
        AnswerContent(blocks=answer.blocks, stop_reason=answer.stop_reason),
    )


def _describe_missing(recorded: ModelResponseTurn | None) -> str:
    if recorded is None:
        return BEYOND_RECORDING
    if recorded.state is TurnState.COMPLETE:
        raise Internal("A complete answer was not compared.")
    return f"recorded_{recorded.state.value}"
