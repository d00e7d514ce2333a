"""From two answers to a result: what became of one step of a replay."""

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
"""The note where a free-running candidate is where nobody was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateAnswer:
    """What the candidate said to one step, with all calls that were made for it."""

    blocks: tuple[Block, ...]
    stop_reason: StopReason | None
    error_code: str | None
    """None where it is whole."""
    call: Call
    """The one that gave it."""
    usage: Usage
    """Of all calls that were made for it."""
    cost_usd: Decimal | None


def describe_candidate(answer: CandidateAnswer) -> AnswerFacts:
    """What it took: tokens and money of all attempts, times of the one that counts."""
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
    """The result without its assertions, which are checked elsewhere: see `build_subject`.

    `answer`: None where the candidate was not asked. `note` of whoever walks; what was not compared says why.
    """
    recorded = step.recorded
    facts = None if recorded is None else describe_recorded(recorded, recorded_call)
    if answer is None:
        return TurnResult(
            place=step.place,
            source_seq=None if recorded is None else recorded.seq,
            replay_seq=2 * step.place,
            attempt=None,
            outcome=Outcome.NOT_COMPARED,
            note=_why_not(recorded),
            recorded=facts,
        )
    comparison = _compare(recorded, answer)
    candidate = describe_candidate(answer)
    return TurnResult(
        place=step.place,
        source_seq=None if recorded is None else recorded.seq,
        replay_seq=2 * step.place,
        attempt=answer.call.start.attempt,
        outcome=_outcome(comparison, answer),
        kinds=(DivergenceKind.ERROR,) if answer.error_code else () if comparison is None else comparison.kinds,
        similarity=None if comparison is None else comparison.similarity,
        severity=1.0 if answer.error_code else 0.0 if comparison is None else comparison.severity,
        note=note or (None if comparison or answer.error_code else _why_not(recorded)),
        recorded=facts,
        candidate=candidate,
        judge=judge,
    )


def build_subject(step: WalkStep, answer: CandidateAnswer, result: TurnResult) -> Subject:
    """The answer, for its assertions. `result`: what `build_result` gave for it."""
    recorded = step.recorded
    return Subject(
        candidate=AnswerContent(blocks=answer.blocks, stop_reason=answer.stop_reason),
        recorded=None if recorded is None else AnswerContent(blocks=recorded.blocks, stop_reason=recorded.stop_reason),
        similarity=result.similarity,
        facts=result.candidate or describe_candidate(answer),
    )


def is_comparable(recorded: ModelResponseTurn | None) -> bool:
    """Whether there is a whole answer to compare with."""
    return recorded is not None and recorded.state is TurnState.COMPLETE


def _compare(recorded: ModelResponseTurn | None, answer: CandidateAnswer) -> Comparison | None:
    if recorded is None or not is_comparable(recorded) or answer.error_code is not None:
        return None
    return compare_answers(
        AnswerContent(blocks=recorded.blocks, stop_reason=recorded.stop_reason),
        AnswerContent(blocks=answer.blocks, stop_reason=answer.stop_reason),
    )


def _outcome(comparison: Comparison | None, answer: CandidateAnswer) -> Outcome:
    if answer.error_code is not None:
        return Outcome.FAILED
    return Outcome.NOT_COMPARED if comparison is None else comparison.outcome


def _why_not(recorded: ModelResponseTurn | None) -> str:
    if recorded is None:
        return BEYOND_RECORDING
    if recorded.state is TurnState.COMPLETE:
        raise Internal("A whole answer can be compared.")
    return f"recorded_{recorded.state.value}"
