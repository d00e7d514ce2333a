from server.conversation.block import Block, TextBlock, ToolCallBlock
from server.conversation.turn import ToolResponseTurn, Turn, UserTaskTurn
from server.replay.rerun.replay import OnMissingResult, ReplayMode
from server.replay.rerun.walk import MAX_STEPS_BEYOND, NextStep, WalkEnd, open_walk
from tests.unit.replay.test_recorded_tool_results import NOW, answer, call, exchange

SAID: tuple[Block, ...] = (TextBlock(text="Well."),)


def free(turns: list[Turn], *answers: tuple[Block, ...], on_missing: OnMissingResult) -> list[NextStep]:
    walk = open_walk(ReplayMode.FREE_RUNNING, turns, on_missing)
    return [walk.begin(), *(walk.advance(blocks, complete=True) for blocks in answers)]


def positions(strides: list[NextStep]) -> list[tuple[int, bool, int | None] | None]:
    """Place, whether it is a task, and the recorded answer beside it."""
    return [
        None
        if next_step.step is None
        else (
            next_step.step.position,
            next_step.step.is_task,
            next_step.step.recorded.seq if next_step.step.recorded else None,
        )
        for next_step in strides
    ]


def test_a_teacher_forced_walk_takes_every_input_that_was_answered() -> None:
    turns: list[Turn] = [
        *exchange(1, (call("look"), 1)),
        UserTaskTurn(seq=5, created_at=NOW, blocks=SAID),
    ]
    walk = open_walk(ReplayMode.TEACHER_FORCED, turns, OnMissingResult.STOP)
    strides = [walk.begin(), walk.advance(SAID, complete=False), walk.advance(SAID, complete=True)]
    assert positions(strides) == [(1, True, 2), (2, False, 4), None]


def test_a_free_running_walk_goes_where_the_candidate_goes() -> None:
    turns = [*exchange(1, (call("look"), 1)), *exchange(5, (call("ring"), 2))]
    looks: tuple[ToolCallBlock, ...] = (call("look", 7),)
    rings: tuple[ToolCallBlock, ...] = (call("ring", 8),)
    strides = free(turns, looks, rings, SAID, SAID, on_missing=OnMissingResult.STOP)
    assert positions(strides) == [(1, True, 2), (2, False, 4), (3, False, None), (4, True, 6), None]
    assert isinstance(strides[2].step and strides[2].step.input, ToolResponseTurn)
    assert strides[-1].end is None


def test_calls_that_a_client_gave_up_are_given_up_again() -> None:
    task = UserTaskTurn(seq=1, created_at=NOW, blocks=SAID)
    turns: list[Turn] = [task, answer(2, call("look")), *exchange(3)]
    strides = free(turns, (call("look", 5),), SAID, on_missing=OnMissingResult.STOP)
    assert positions(strides)[:2] == [(1, True, 2), (2, True, 4)]


def test_a_candidate_that_goes_round_in_circles_is_stopped() -> None:
    walk = open_walk(ReplayMode.FREE_RUNNING, exchange(1, (call("look"), 1)), OnMissingResult.SYNTHETIC_ERROR)
    next_step, count = walk.begin(), 0
    while next_step.step is not None:
        next_step, count = walk.advance((call("sing"),), complete=True), count + 1
    assert (next_step.end, count) == (WalkEnd.TOO_MANY_STEPS, 2 + MAX_STEPS_BEYOND)


def test_a_candidate_that_fails_ends_a_free_running_walk() -> None:
    walk = open_walk(ReplayMode.FREE_RUNNING, exchange(1, (call("look"), 1)), OnMissingResult.STOP)
    walk.begin()
    assert walk.advance((), complete=False) == NextStep(step=None, end=WalkEnd.CANDIDATE_FAILED)
