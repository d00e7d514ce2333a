"""The steps through a recorded conversation: the next input of the candidate, and the answer to compare with.

A walk depends only on the recording and on the candidate's answers so far. A process that takes over an item repeats
the walk over the stored answers and arrives at the same step.
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
"""If a candidate takes this number of steps more for an exchange than were recorded, the walk ends."""


class WalkEnd(StrEnum):
    """Why a walk ended before its recording; also the note of the last result."""

    NO_RECORDED_RESULT = "no_recorded_result"
    """The candidate made a tool call without a recorded result, and the replay stops at such calls."""
    TOO_MANY_STEPS = "too_many_steps"
    CANDIDATE_FAILED = "candidate_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkStep:
    """One input with the recorded answer."""

    position: int
    """1, 2, 3, in the order of the steps."""
    is_task: bool
    """Whether the input is a user task; otherwise it is a tool response."""
    input: UserTaskTurn | ToolResponseTurn
    """As it is sent to the candidate. `seq` is 0 for the tool responses of a free-running replay."""
    recorded: ModelResponseTurn | None
    """None if a free-running candidate takes a step that was not recorded."""
    is_called: bool = True
    """Whether the candidate is called. False if the recorded answer is incomplete: it only becomes history."""

    @property
    def answer_seq(self) -> int:
        """The turn of the replay conversation with the answer. The input is the turn before."""
        return 2 * self.position


@dataclass(frozen=True, slots=True, kw_only=True)
class NextStep:
    """The step after an answer."""

    step: WalkStep | None
    """None if the walk has ended."""
    end: WalkEnd | None = None
    """Why the walk ended before its recording; else None."""
    missing_ids: tuple[str, ...] = ()
    """The ids of the answer's tool calls without a recorded result."""


class Walk(Protocol):
    """The steps through a conversation."""

    def begin(self) -> NextStep:
        """Return the first step."""
        ...

    def advance(self, blocks: Sequence[Block], *, complete: bool) -> NextStep:
        """Return the step after the candidate's answer to the last one."""
        ...


def open_walk(mode: ReplayMode, turns: Sequence[Turn], on_missing: OnMissingResult) -> Walk:
    """Open the walk through the turns of a conversation."""
    if mode is ReplayMode.TEACHER_FORCED:
        return TeacherForcedWalk(turns)
    return FreeRunningWalk(turns, on_missing)


class TeacherForcedWalk:
    """The recorded inputs in order, regardless of the candidate's answers."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._pairs = _pair(turns)
        self._position = 0

    def begin(self) -> NextStep:
        return self._next()

    def advance(self, blocks: Sequence[Block], *, complete: bool) -> NextStep:  # noqa: ARG002  reason: the port's
        return self._next()

    def _next(self) -> NextStep:
        if self._position == len(self._pairs):
            return NextStep(step=None)
        input_, recorded = self._pairs[self._position]
        self._position += 1
        step = WalkStep(
            position=self._position,
            is_task=isinstance(input_, UserTaskTurn),
            input=input_,
            recorded=recorded,
            is_called=recorded.state is TurnState.COMPLETE,
        )
        return NextStep(step=step)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exchange:
    """A recorded user task, and the answers up to the next one."""

    task: UserTaskTurn
    answers: tuple[ModelResponseTurn, ...]
    was_abandoned: bool
    """Whether the last answer had tool calls without results, because the client abandoned them."""


class FreeRunningWalk:
    """The recorded tasks in order. Tool calls of the candidate get the recorded results of equal calls."""

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

    def advance(self, blocks: Sequence[Block], *, complete: bool) -> NextStep:
        if not complete:
            return NextStep(step=None, end=WalkEnd.CANDIDATE_FAILED)
        exchange = self._exchanges[self._exchange]
        self._answered += 1
        calls = [block for block in blocks if isinstance(block, ToolCallBlock)]
        if not calls or (exchange.was_abandoned and self._answered >= len(exchange.answers)):
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
    """Return each input with its answer. An input whose turn still runs is left out."""
    answers = {turn.seq: turn for turn in turns if isinstance(turn, ModelResponseTurn)}
    return [
        (turn, answers[turn.seq + 1])
        for turn in turns
        if not isinstance(turn, ModelResponseTurn) and turn.seq + 1 in answers
    ]


def _split(pairs: Sequence[_Pair]) -> list[_Exchange]:
    """Split pairs into exchanges. Pairs before the first task are left out: there is no task to repeat."""
    found: list[tuple[UserTaskTurn, list[ModelResponseTurn]]] = []
    for input_, answer in pairs:
        if isinstance(input_, UserTaskTurn):
            found.append((input_, [answer]))
        elif found:
            found[-1][1].append(answer)
    return [
        _Exchange(
            task=task,
            answers=tuple(answers),
            was_abandoned=any(isinstance(block, ToolCallBlock) for block in answers[-1].blocks),
        )
        for task, answers in found
    ]
