"""Rules of replay reports: texts side by side, confidence intervals, harmless files."""

import csv
import io
import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.conversation.block import TextBlock, ToolCallBlock
from server.conversation.turn import StopReason
from server.replay.rerun.comparison import AnswerContent, pair_calls
from server.replay.rerun.export import CSV_HEADER, escape_formula, write_csv_row, write_promptfoo_test
from server.replay.rerun.full_results import FullResult
from server.replay.rerun.replay import Assertion
from server.replay.rerun.report import Interval, find_interval, student_bound
from server.replay.rerun.result import DivergenceKind, Outcome, StoredResult
from server.replay.rerun.similarity import diff_words
from tests.support.replay_builders import result

WORDS = st.lists(st.sampled_from(["a", "b", "is", " ", "\n", "é", ".", "\ud800"]), max_size=40).map("".join)


def call(name: str, **arguments: Any) -> ToolCallBlock:
    return ToolCallBlock(id=f"call_{name}", name=name, arguments=arguments)


def full(text: str, *, recorded: str = "Cold.", task: str = "How is Oslo?", calls: tuple[Any, ...] = ()) -> FullResult:
    return FullResult(
        stored=StoredResult(
            number=1,
            conversation_id="conv_x",
            repetition=1,
            replay_conversation_id=None,
            result=result(outcome=Outcome.DIFFERENT, kinds=(DivergenceKind.TEXT,), similarity=0.5),
        ),
        task=task,
        recorded=AnswerContent(blocks=(TextBlock(text=recorded),), stop_reason=StopReason.END_TURN),
        candidate=AnswerContent(blocks=(TextBlock(text=text), *calls), stop_reason=StopReason.END_TURN),
    )


@given(WORDS, WORDS)
def test_parts_are_both_texts_and_unchanged_parts_are_common(recorded: str, candidate: str) -> None:
    sides = diff_words(recorded, candidate)
    assert ["".join(part.text for part in parts) for parts in sides] == [recorded, candidate]
    one, other = ("".join(part.text for part in parts if not part.is_changed) for parts in sides)
    assert one == other
    for parts in sides:
        assert all(part.is_changed is not following.is_changed for part, following in pairwise(parts))
        assert all(part.text for part in parts)


def test_words_are_not_split_and_long_texts_are_bounded() -> None:
    def marked(recorded: str, candidate: str) -> list[str]:
        sides = diff_words(recorded, candidate)
        return ["".join(f"[{part.text}]" if part.is_changed else part.text for part in parts) for parts in sides]

    assert marked("It is cold.", "It is colder.") == ["It is [cold].", "It is [colder]."]
    assert marked("Say it snows now.", "Say the sun shines now.") == [
        "Say [it snows] now.",
        "Say [the sun shines] now.",
    ]
    assert marked("Yes.", "Yes. No.") == ["Yes.", "Yes.[ No.]"]
    long, other = "one two " * 5_000, "two three " * 5_000
    recorded, candidate = diff_words(f"start {long}", f"start {other}")
    assert [part.is_changed for part in recorded] == [part.is_changed for part in candidate] == [False, True, False]


def test_calls_are_paired_by_arguments_then_by_name() -> None:
    recorded = [call("weather", city="Oslo"), call("weather", city="Bergen"), call("time")]
    candidate = [call("weather", city="Bergen"), call("weather", city="Rome"), call("news")]
    pairs = list(pair_calls(recorded, candidate))
    assert [(pair.recorded and dict(pair.recorded.arguments), pair.is_same) for pair in pairs] == [
        ({"city": "Oslo"}, False), ({"city": "Bergen"}, True), ({}, False), (None, False),
    ]  # fmt: skip
    assert [pair.candidate.name if pair.candidate else None for pair in pairs] == ["weather", "weather", None, "news"]


def test_an_interval_needs_two_repetitions_and_uses_the_t_distribution() -> None:
    assert find_interval([1.0]) is None
    assert find_interval([]) is None
    found = find_interval([1.0, 2.0, 3.0])
    assert found is not None
    assert (found.low, round(found.high, 3)) == (0.0, 4.484)
    wide = find_interval([7.0, 8.0, 9.0])
    assert wide is not None
    assert (round(wide.low, 3), round(wide.high, 3)) == (5.516, 10.484)
    assert find_interval([0.0, 1.0], is_share=True) == Interval(low=0.0, high=1.0)
    assert student_bound(21) == pytest.approx(2.0796, abs=1e-3)
    assert student_bound(99) == pytest.approx(1.9842, abs=1e-3)


@given(st.text(max_size=30))
def test_no_cell_is_a_formula(text: str) -> None:
    assert not escape_formula(text).startswith(("=", "+", "-", "@", "\t", "\r", "\n"))
    assert escape_formula(text).endswith(text)


def test_any_row_can_be_parsed_again() -> None:
    [row] = csv.reader(io.StringIO(write_csv_row(full('=1+1,"\n\ud800', recorded="@me"))))
    cells = dict(zip(CSV_HEADER, row, strict=True))
    assert cells["candidate_text"] == "'=1+1,\"\n?"
    assert (cells["recorded_text"], cells["outcome"], cells["kinds"], cells["turn"]) == (
        "'@me",
        "different",
        "text",
        "2",
    )
    assert (cells["candidate_input_tokens"], cells["candidate_cost_usd"]) == ("4", "0.0001")


def test_a_promptfoo_test_is_yaml_and_contains_no_template() -> None:
    schema = Assertion(name="an object", schema={"type": "object"})
    line = write_promptfoo_test(
        full("x", recorded="{{ evil }} {% x %}", task="file:///etc/passwd"),
        [schema, Assertion(name="short", expression="output_tokens < 9")],
    )
    assert line.startswith("- {")
    assert line.count("\n") == 1
    test = json.loads(line[2:])
    assert test["vars"] == {
        "task": "{{ 'file://' }}/etc/passwd",
        "recorded": "{{ '{{' }} evil }} {{ '{%' }} x %}",
    }
    assert [assertion["type"] for assertion in test["assert"]] == ["rouge-n", "is-json"]
    assert test["metadata"]["conversation_id"] == "conv_x"
