"""The way through a recorded conversation: what is put to the candidate next, and what its answer is compared with.

A walk is a function of the recording and of the candidate's answers so far. So a process that goes on with a
conversation walks again over what is there, and stands where the last one stood.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from server.conversation.block import Block, ToolCallBlock
from server.conversation.turn import ModelResponseTurn, ToolResponseTurn, Turn, TurnState, UserTaskTurn
from server.replay.rerun.recorded_tool_results import collect_results, serve_results
from server.replay.rerun.replay import OnMissingResult, ReplayMode

MAX_STEPS_BEYOND: Final = 16
"""A candidate that takes so many more steps for an exchange than were recorded goes round in circles."""


class WalkEnd(StrEnum):
    """Why a walk is over before its recording is; also the note of the last result."""

    NO_RECORDED_RESULT = "no_recorded_result"
    """A tool was called that nothing was recorded for, and that is where the replay has to stop."""
    TOO_MANY_STEPS = "too_many_steps"
    CANDIDATE_FAILED = "candidate_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkStep:
    """One input, and the answer that was recorded."""

    position: int
    """1, 2, 3: its input is turn 2 * position - 1 of the replay conversation, its answer the one after."""
    is_task: bool
    """A user task; else tool responses."""
    input: UserTaskTurn | ToolResponseTurn
    """As it is put to the candidate. A free-running one's tool responses are nobody's turn: their `seq` is 0."""
    recorded: ModelResponseTurn | None
    """None where a free-running candidate is where nobody was."""
    asks: bool = True
    """Whether the candidate is asked. Not for an answer that failed when it was recorded: it is only history."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextStep:
    """What follows on an answer."""

    step: WalkStep | None
    """None: the walk is over."""
    end: WalkEnd | None = None
    """Why, where the recording is not."""
    missing_ids: tuple[str, ...] = ()
    """Calls of the answer that nothing was recorded for."""


class Walk(Protocol):
    """A way through a conversation."""

    def begin(self) -> NextStep:
        """To the first step."""
        ...

    def go_on(self, blocks: Sequence[Block], *, complete: bool) -> NextStep:
        """What follows on the candidate's answer to the step before."""
        ...


def open_walk(mode: ReplayMode, turns: Sequence[Turn], on_missing: OnMissingResult) -> Walk:
    """The walk through these turns, all of a conversation."""
    if mode is ReplayMode.TEACHER_FORCED:
        return TeacherForcedWalk(turns)
    return FreeRunningWalk(turns, on_missing)


class TeacherForcedWalk:
    """Input by input as they were recorded, whatever the candidate says."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._pairs = _pair(turns)
        self._position = 0

    def begin(self) -> NextStep:
        return self._stride()

    def go_on(self, blocks: Sequence[Block], *, complete: bool) -> NextStep:  # noqa: ARG002  reason: the port's
        return self._stride()

    def _stride(self) -> NextStep:
        if self._position == len(self._pairs):
            return NextStep(step=None)
        asked, recorded = self._pairs[self._position]
        self._position += 1
        step = WalkStep(
            position=self._position,
            is_task=isinstance(asked, UserTaskTurn),
            input=asked,
            recorded=recorded,
            asks=recorded.state is TurnState.COMPLETE,
        )
        return NextStep(step=step)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exchange:
    """A recorded user task, and the answers up to the next one."""

    task: UserTaskTurn
    answers: tuple[ModelResponseTurn, ...]
    was_left: bool
    """Its last answer had calls that nobody ever answered: a client gave them up."""


class FreeRunningWalk:
    """Task by task; within each the candidate calls tools as it likes, and gets what was recorded for such calls."""

    def __init__(self, turns: Sequence[Turn], on_missing: OnMissingResult) -> None:
        self._exchanges = _split(_pair(turns))
        self._results = collect_results(turns)
        self._on_missing = on_missing
        self._used: frozenset[int] = frozenset()
        self._position = 0
        self._exchange = -1
        self._answered = 0

    def begin(self) -> NextStep:
        return self._next_task()

    def go_on(self, blocks: Sequence[Block], *, complete: bool) -> NextStep:
        if not complete:
            return NextStep(step=None, end=WalkEnd.CANDIDATE_FAILED)
        exchange = self._exchanges[self._exchange]
        self._answered += 1
        calls = [block for block in blocks if isinstance(block, ToolCallBlock)]
        if not calls or (exchange.was_left and self._answered >= len(exchange.answers)):
            return self._next_task()
        if self._answered >= len(exchange.answers) + MAX_STEPS_BEYOND:
            return NextStep(step=None, end=WalkEnd.TOO_MANY_STEPS)
        return self._serve(exchange, calls)

    def _serve(self, exchange: _Exchange, calls: Sequence[ToolCallBlock]) -> NextStep:
        served = serve_results(
            self._results, calls, used=self._used, exchange=self._exchange, on_missing=self._on_missing
        )
        if not served.blocks:
            return NextStep(step=None, end=WalkEnd.NO_RECORDED_RESULT, missing_ids=served.missing_ids)
        self._used = served.used
        self._position += 1
        step = WalkStep(
            position=self._position,
            is_task=False,
            input=ToolResponseTurn(seq=0, created_at=exchange.task.created_at, blocks=served.blocks),
            recorded=exchange.answers[self._answered] if self._answered < len(exchange.answers) else None,
        )
        return NextStep(step=step, missing_ids=served.missing_ids)

    def _next_task(self) -> NextStep:
        self._exchange += 1
        self._answered = 0
        if self._exchange == len(self._exchanges):
            return NextStep(step=None)
        self._position += 1
        exchange = self._exchanges[self._exchange]
        return NextStep(
            step=WalkStep(position=self._position, is_task=True, input=exchange.task, recorded=exchange.answers[0])
        )


_Pair = tuple[UserTaskTurn | ToolResponseTurn, ModelResponseTurn]


def _pair(turns: Sequence[Turn]) -> list[_Pair]:
    """Each input with its answer. An input that is still being answered is not there yet."""
    answers = {turn.seq: turn for turn in turns if isinstance(turn, ModelResponseTurn)}
    return [
        (turn, answers[turn.seq + 1])
        for turn in turns
        if not isinstance(turn, ModelResponseTurn) and turn.seq + 1 in answers
    ]


def _split(pairs: Sequence[_Pair]) -> list[_Exchange]:
    """What stands before the first task belongs to nothing that could be asked again."""
    found: list[tuple[UserTaskTurn, list[ModelResponseTurn]]] = []
    for asked, answer in pairs:
        if isinstance(asked, UserTaskTurn):
            found.append((asked, [answer]))
        elif found:
            found[-1][1].append(answer)
    return [
        _Exchange(
            task=task,
            answers=tuple(answers),
            was_left=any(isinstance(block, ToolCallBlock) for block in answers[-1].blocks),
        )
        for task, answers in found
    ]
