"""Builds the result of one step of a replay from the recorded and the candidate's answer."""

from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from server.conversation.block import Block
from server.conversation.call import Call
from server.conversation.errors import Internal
from server.conversation.turn import ModelResponseTurn, StopReason, TurnState
from server.conversation.usage import Usage
from server.replay.rerun.assertions import Subject
from server.replay.rerun.comparison import AnswerContent, Comparison, compare_answers
from server.replay.rerun.result import AnswerFacts, DivergenceKind, JudgeResult, Outcome, TurnResult
from server.replay.rerun.source import describe_recorded, milliseconds
from server.replay.rerun.walk import WalkStep

BEYOND_RECORDING: Final = "beyond_recording"
"""The note of an answer without a recorded counterpart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateAnswer:
    """The candidate's answer to one step."""

    blocks: tuple[Block, ...]
    stop_reason: StopReason | None
    error_code: str | None
    """None if the answer is complete."""
    call: Call
    """The call that produced it."""
    usage: Usage
    """Of all attempts."""
    cost_usd: Decimal | None


def describe_candidate(answer: CandidateAnswer) -> AnswerFacts:
    """Build the facts of an answer: usage and cost of all attempts, times of the call that produced it."""
    return AnswerFacts(
        stop_reason=answer.stop_reason,
        error_code=answer.error_code,
        usage=answer.usage,
        cost_usd=answer.cost_usd,
        latency_ms=milliseconds(answer.call, last=True),
        first_byte_ms=milliseconds(answer.call, last=False),
    )


def build_result(
    step: WalkStep,
    answer: CandidateAnswer | None,
    recorded_call: Call | None,
    *,
    note: str | None = None,
    judge: JudgeResult | None = None,
) -> TurnResult:
    """Build a result without its assertions, which are evaluated on `build_subject`.

    `answer`: None if the candidate was not called. `note` replaces the reason why nothing was compared.
    """
    recorded = step.recorded
    facts = None if recorded is None else describe_recorded(recorded, recorded_call)
    if answer is None:
        return TurnResult(
            position=step.position,
            source_seq=None if recorded is None else recorded.seq,
            replay_seq=2 * step.position,
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
        replay_seq=2 * step.position,
        attempt=answer.call.start.attempt,
        outcome=Outcome.FAILED if answer.error_code else outcome,
        kinds=(DivergenceKind.ERROR,) if answer.error_code else () if comparison is None else comparison.kinds,
        similarity=None if comparison is None else comparison.similarity,
        severity=1.0 if answer.error_code else 0.0 if comparison is None else comparison.severity,
        note=note or (None if comparison or answer.error_code else _describe_missing(recorded)),
        recorded=facts,
        candidate=describe_candidate(answer),
        judge=judge,
    )


def build_subject(step: WalkStep, answer: CandidateAnswer, result: TurnResult) -> Subject:
    """Build the subject of the assertions. `result`: from `build_result`."""
    recorded = step.recorded
    return Subject(
        candidate=AnswerContent(blocks=answer.blocks, stop_reason=answer.stop_reason),
        recorded=None if recorded is None else AnswerContent(blocks=recorded.blocks, stop_reason=recorded.stop_reason),
        similarity=result.similarity,
        facts=result.candidate or describe_candidate(answer),
    )


def is_comparable(recorded: ModelResponseTurn | None) -> bool:
    """Return whether there is a complete recorded answer."""
    return recorded is not None and recorded.state is TurnState.COMPLETE


def _compare(recorded: ModelResponseTurn | None, answer: CandidateAnswer) -> Comparison | None:
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
