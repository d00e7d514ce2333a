"""A repaired history breaks no rule, and a repair never changes later."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.conversation.block import Block, TextBlock, ToolCallBlock, ToolResultBlock
from server.conversation.store import BufferedTurn
from server.conversation.turn import STRATA_DIALECT, Native, TurnKind, TurnState
from server.payload.history import NO_RESULT, BrokenRule, Step, find_broken_rules, read_steps, repair
from tests.support.strategies import broken_histories


def task(seq: int) -> Step:
    return Step(kind=TurnKind.USER_TASK, seq=seq)


def answer(seq: int, *ids: str, complete: bool = True) -> Step:
    calls = tuple(ToolCallBlock(id=id_, name="f", arguments={}) for id_ in ids)
    return Step(kind=TurnKind.MODEL_RESPONSE, seq=seq, calls=calls, complete=complete)


def response(seq: int | None, *ids: str) -> Step:
    results = tuple(ToolResultBlock(tool_call_id=id_, output=seq) for id_ in ids)
    return Step(kind=TurnKind.TOOL_RESPONSE, seq=seq, results=results)


def outline(steps: Sequence[Step]) -> list[str]:
    """The steps as short texts: `u1`, `m2(a,b)`, `t3(a,-b)`; a supplied result has a dash."""
    marks = {TurnKind.USER_TASK: "u", TurnKind.MODEL_RESPONSE: "m", TurnKind.TOOL_RESPONSE: "t"}
    texts = []
    for step in steps:
        ids = [call.id for call in step.calls]
        ids += [("-" if result.output == NO_RESULT else "") + result.tool_call_id for result in step.results]
        texts.append(f"{marks[step.kind]}{step.seq or ''}" + (f"({','.join(ids)})" if ids else ""))
    return texts


GOOD = (
    task(1),
    answer(2, "a", "b"),
    response(3, "b", "a"),
    answer(4, "c"),
    response(5, "c"),
    answer(6),
    task(7),
    task(9),
    answer(10),
)


def test_a_valid_history_is_unchanged() -> None:
    ordered = replace(GOOD[2], results=tuple(reversed(GOOD[2].results)))
    repaired = repair(GOOD)
    assert find_broken_rules(GOOD) == []
    assert repaired.repairs == ()
    assert repaired.steps == (*GOOD[:2], ordered, *GOOD[3:])


@pytest.mark.parametrize(
    ("steps", "rule", "ids"),
    [
        ([task(1), answer(2, "a", "b"), response(3, "a"), answer(4)], "call_unanswered", ("b",)),
        ([task(1), answer(2, "a"), task(3)], "call_unanswered", ("a",)),
        ([task(1), answer(2, "a")], "call_unanswered", ("a",)),
        ([task(1), answer(2, "a"), response(3, "a", "x"), answer(4)], "result_orphaned", ("x",)),
        ([task(1), response(3, "x"), answer(4)], "result_orphaned", ("x",)),
        ([response(1, "x"), answer(2)], "result_orphaned", ("x",)),
        ([task(1), response(3), answer(4)], "result_orphaned", ()),
        ([task(1), answer(2, "a"), response(3, "a", "a"), answer(4)], "result_repeated", ("a",)),
        ([task(1), answer(2, "a", "a"), response(3, "a"), answer(4)], "call_repeated", ("a",)),
        ([task(1), answer(2, "a"), response(3, "a"), answer(4, "a"), response(5, "a")], "call_repeated", ("a",)),
        ([task(1), answer(2, "a"), response(3, "a"), task(5)], "result_passed_over", ()),
        ([answer(2), task(3)], "answer_unasked", ()),
        ([task(1), answer(2), answer(4)], "answer_unasked", ()),
    ],
)
def test_a_broken_rule_is_named_with_its_ids(steps: list[Step], rule: str, ids: tuple[str, ...]) -> None:
    assert [(broken.rule, broken.ids) for broken in find_broken_rules(steps)] == [(rule, ids)]
    repaired = repair(steps)
    assert repaired.repairs
    assert find_broken_rules(repaired.steps) == []


def test_a_broken_rule_has_a_position() -> None:
    steps = [task(1), answer(2, "a"), response(3, "a"), task(5)]
    assert find_broken_rules(steps) == [BrokenRule(rule="result_passed_over", seq=5)]


@pytest.mark.parametrize(
    ("steps", "expected", "repairs"),
    [
        pytest.param(
            [task(1), answer(2, "a", "b", complete=False), task(3)],
            ["u1", "m2(a,b)", "t(-a,-b)", "u3"],
            [("result_supplied", 2, ["a", "b"]), ("task_joined", 3, [])],
            id="a cancelled turn had made calls",
        ),
        pytest.param(
            [task(1), answer(2, "a"), task(3), answer(4)],
            ["u1", "m2(a)", "t(-a)", "u3", "m4"],
            [("call_abandoned", 2, ["a"]), ("task_joined", 3, [])],
            id="a client gave a call up",
        ),
        pytest.param(
            [task(1), answer(2, "a", "b"), response(3, "b"), answer(4)],
            ["u1", "m2(a,b)", "t3(-a,b)", "m4"],
            [("result_supplied", 2, ["a"])],
            id="one of two results is missing",
        ),
        pytest.param(
            [task(1), answer(2, "a"), answer(4)],
            ["u1", "m2(a)", "t(-a)", "m4"],
            [("result_supplied", 2, ["a"])],
            id="the model went on without results",
        ),
        pytest.param(
            [task(1), answer(2, "a", "b"), response(3, "a"), response(4, "b"), answer(5)],
            ["u1", "m2(a,b)", "t4(a,b)", "m5"],
            [],
            id="results came one by one",
        ),
        pytest.param(
            [task(1), answer(2, "a"), response(3, "x", "a", "y"), answer(4)],
            ["u1", "m2(a)", "t3(a)", "m4"],
            [("orphan_result_dropped", 3, ["x", "y"])],
            id="results of strangers among others",
        ),
        pytest.param(
            [task(1), response(3, "x"), answer(4)],
            ["u1", "m4"],
            [("orphan_result_dropped", 3, ["x"])],
            id="a response of strangers alone vanishes",
        ),
        pytest.param(
            [task(1), answer(2, "a"), task(3), response(5, "a"), answer(6)],
            ["u1", "m2(a)", "t(-a)", "u3", "m6"],
            [("call_abandoned", 2, ["a"]), ("task_joined", 3, []), ("orphan_result_dropped", 5, ["a"])],
            id="a result comes after the call was given up",
        ),
        pytest.param(
            [task(1), answer(2, "a"), response(3, "a", "a"), answer(4)],
            ["u1", "m2(a)", "t3(a)", "m4"],
            [("repeated_result_dropped", 3, ["a"])],
            id="the first result counts",
        ),
        pytest.param(
            [task(1), answer(2, "a"), response(3, "a"), task(5), answer(6)],
            ["u1", "m2(a)", "t3(a)", "u5", "m6"],
            [("task_joined", 5, [])],
            id="the answer to results never came",
        ),
        pytest.param(
            [answer(2, "a"), response(3, "a"), answer(4)],
            ["u", "m2(a)", "t3(a)", "m4"],
            [("task_supplied", 2, [])],
            id="it begins with an answer",
        ),
        pytest.param(
            [response(1, "x"), task(3), answer(4)],
            ["u3", "m4"],
            [("orphan_result_dropped", 1, ["x"])],
            id="it begins with results",
        ),
        pytest.param(
            [task(1), answer(2), response(3, "x"), answer(4, "a"), response(5, "a")],
            ["u1", "m2", "u", "m4(a)", "t5(a)"],
            [("orphan_result_dropped", 3, ["x"]), ("task_supplied", 4, [])],
            id="an answer follows an answer",
        ),
    ],
)
def test_a_broken_history_is_repaired(
    steps: list[Step], expected: list[str], repairs: list[tuple[str, int, list[str]]]
) -> None:
    repaired = repair(steps)
    assert outline(repaired.steps) == expected
    assert [(one["kind"], one["seq"], one["ids"]) for one in repaired.repairs] == repairs
    assert find_broken_rules(repaired.steps) == []


def test_the_first_of_several_results_is_sent() -> None:
    steps = [task(1), answer(2, "a"), response(3, "a"), response(4, "a"), answer(5)]
    (result,) = repair(steps).steps[2].results
    assert result.output == 3


def test_a_supplied_result_states_that_there_is_none() -> None:
    (result,) = repair([task(1), answer(2, "a"), task(3)]).steps[2].results
    assert result == ToolResultBlock(tool_call_id="a", output=NO_RESULT, is_error=True)


def test_a_duplicate_id_is_replaced_together_with_its_result() -> None:
    steps = [task(1), answer(2, "a"), response(3, "a"), answer(4, "a", "b", "b"), response(5, "a", "b", "b")]
    repaired = repair(steps)
    first, second = repaired.steps[1], repaired.steps[3]
    assert (first.renamed, second.renamed) == (False, True)
    assert [call.id for call in first.calls] == ["a"]
    assert [call.id for call in second.calls] == [result.tool_call_id for result in repaired.steps[4].results]
    assert second.calls[1].id == "b"
    assert {result.output for result in repaired.steps[4].results} == {5}
    (note,) = repaired.repairs
    assert (note["kind"], note["ids"]) == ("call_renamed", ["a", "b"])
    assert note["renamed"] == [second.calls[0].id, second.calls[2].id]
    assert repair(steps) == repaired


def test_turns_are_read_as_steps() -> None:
    call, result = ToolCallBlock(id="a", name="f", arguments={}), ToolResultBlock(tool_call_id="a", output=1)

    def turn(
        seq: int, kind: TurnKind, blocks: tuple[Block, ...] | None, state: TurnState = TurnState.COMPLETE
    ) -> BufferedTurn:
        return BufferedTurn(
            seq=seq,
            kind=kind,
            state=state,
            native=Native(dialect=STRATA_DIALECT, data=b"{}"),
            blocks=blocks,
            provider=None,
            model=None,
            account=None,
            prefix_hash=None,
            dynamic=None,
            language=None,
            args=None,
        )

    turns = [
        turn(1, TurnKind.USER_TASK, (TextBlock(text="Go."),)),
        turn(2, TurnKind.MODEL_RESPONSE, (TextBlock(text="I look."), call), TurnState.CANCELLED),
        turn(3, TurnKind.TOOL_RESPONSE, (result,)),
        turn(4, TurnKind.MODEL_RESPONSE, None),
    ]
    assert read_steps(turns) == (
        task(1),
        replace(answer(2, "a", complete=False), calls=(call,)),
        replace(response(3), results=(result,)),
        answer(4),
    )


@given(broken_histories)
def test_any_history_can_be_repaired(steps: tuple[Step, ...]) -> None:
    repaired = repair(steps)
    assert find_broken_rules(repaired.steps) == []
    assert bool(repaired.repairs) or [step.seq for step in repaired.steps] == [
        step.seq for place, step in enumerate(steps) if not is_gathered(steps, place)
    ]
    users = [step.seq for step in steps if step.kind is TurnKind.USER_TASK]
    assert [step.seq for step in repaired.steps if step.kind is TurnKind.USER_TASK and step.seq] == users


def is_gathered(steps: Sequence[Step], place: int) -> bool:
    """Whether the results of a step are sent together with those of the next step."""
    kinds = [step.kind for step in steps[place : place + 2]]
    return kinds == [TurnKind.TOOL_RESPONSE] * 2


@given(broken_histories)
def test_a_repaired_history_needs_no_repair(steps: tuple[Step, ...]) -> None:
    repaired = repair(steps)
    again = repair(repaired.steps)
    assert (again.steps, again.repairs) == (repaired.steps, ())


@given(broken_histories, st.data())
def test_later_turns_do_not_change_what_was_sent(steps: tuple[Step, ...], data: st.DataObject) -> None:
    length = data.draw(st.integers(0, len(steps)))
    early, late = repair(steps[:length]).steps, repair(steps).steps
    answers = [place for place, step in enumerate(early) if step.kind is TurnKind.MODEL_RESPONSE]
    ends_open = length > 0 and (steps[length - 1].calls or steps[length - 1].kind is TurnKind.TOOL_RESPONSE)
    # An input that is still open may get more results; everything up to the answer before it is fixed.
    settled = max(answers, default=-1) + 1 if ends_open else len(early)
    assert late[:settled] == early[:settled]
