"""Reports of replays as rules: texts side by side, intervals, files that do no harm."""

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
from server.replay.rerun.comparison import Said
from server.replay.rerun.export import CSV_HEADER, make_harmless, write_csv_row, write_promptfoo_test
from server.replay.rerun.full_results import FullResult
from server.replay.rerun.replay import Assertion
from server.replay.rerun.result import DivergenceKind, Outcome, StoredResult
from server.replay.rerun.sides import PieceKind, diff_words, pair_calls
from server.replay.rerun.statistics import Interval, find_interval, student_bound
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
        recorded=Said(blocks=(TextBlock(text=recorded),), stop_reason=StopReason.END_TURN),
        candidate=Said(blocks=(TextBlock(text=text), *calls), stop_reason=StopReason.END_TURN),
    )


@given(WORDS, WORDS)
def test_pieces_are_both_texts_and_neighbours_differ_in_kind(recorded: str, candidate: str) -> None:
    pieces = diff_words(recorded, candidate)
    assert "".join(piece.text for piece in pieces if piece.kind is not PieceKind.ADDED) == recorded
    assert "".join(piece.text for piece in pieces if piece.kind is not PieceKind.REMOVED) == candidate
    assert all(one.kind is not other.kind for one, other in pairwise(pieces))
    assert all(piece.text for piece in pieces)


def test_words_are_not_cut_and_long_texts_are_bounded() -> None:
    assert [(piece.kind.value, piece.text) for piece in diff_words("It is cold.", "It is colder.")] == [
        ("same", "It is "), ("removed", "cold"), ("added", "colder"), ("same", "."),
    ]  # fmt: skip
    assert [(piece.kind.value, piece.text) for piece in diff_words("Say it snows now.", "Say the sun shines now.")] == [
        ("same", "Say "), ("removed", "it snows"), ("added", "the sun shines"), ("same", " now."),
    ]  # fmt: skip
    long, other = "one two " * 5_000, "two three " * 5_000
    assert {piece.kind for piece in diff_words(f"start {long}", f"start {other}")} == set(PieceKind)


def test_calls_are_paired_by_arguments_then_by_name() -> None:
    recorded = [call("weather", city="Oslo"), call("weather", city="Bergen"), call("time")]
    candidate = [call("weather", city="Bergen"), call("weather", city="Rome"), call("news")]
    pairs = list(pair_calls(recorded, candidate))
    assert [(pair.recorded and dict(pair.recorded.arguments), pair.is_same) for pair in pairs] == [
        ({"city": "Oslo"}, False), ({"city": "Bergen"}, True), ({}, False), (None, False),
    ]  # fmt: skip
    assert [pair.candidate.name if pair.candidate else None for pair in pairs] == ["weather", "weather", None, "news"]


def test_an_interval_needs_two_repetitions_and_is_students() -> None:
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
    assert not make_harmless(text).startswith(("=", "+", "-", "@", "\t", "\r", "\n"))
    assert make_harmless(text).endswith(text)


def test_a_row_can_be_read_again_whatever_was_said() -> None:
    [row] = csv.reader(io.StringIO(write_csv_row(full('=1+1,"\n\ud800', recorded="@me"))))
    told = dict(zip(CSV_HEADER, row, strict=True))
    assert told["candidate_text"] == "'=1+1,\"\n?"
    assert (told["recorded_text"], told["outcome"], told["kinds"], told["turn"]) == ("'@me", "different", "text", "2")
    assert (told["candidate_input_tokens"], told["candidate_cost_usd"]) == ("4", "0.0001")


def test_a_promptfoo_test_is_yaml_and_no_template_of_its_own() -> None:
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
