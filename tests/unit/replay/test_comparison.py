import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.conversation.block import Block, TextBlock, ThinkingBlock, ToolCallBlock
from server.conversation.turn import StopReason
from server.replay.rerun.comparison import AnswerContent, compare_answers
from server.replay.rerun.result import DivergenceKind, Outcome
from server.replay.rerun.similarity import measure_similarity, measure_words

words = st.lists(st.sampled_from("abcd"), max_size=12)


def answer_of(*blocks: Block, stop_reason: StopReason = StopReason.END_TURN) -> AnswerContent:
    return AnswerContent(blocks=blocks, stop_reason=stop_reason)


def text(value: str) -> TextBlock:
    return TextBlock(text=value)


def call(name: str, number: int = 0, **arguments: object) -> ToolCallBlock:
    return ToolCallBlock(id=f"call_{number}", name=name, arguments=arguments)


class TestSimilarity:
    @given(one=words, other=words)
    def test_similarity_is_the_longest_common_subsequence(self, one: list[str], other: list[str]) -> None:
        table = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
        for row, first in enumerate(one):
            for column, second in enumerate(other):
                table[row + 1][column + 1] = (
                    table[row][column] + 1 if first == second else max(table[row][column + 1], table[row + 1][column])
                )
        total = len(one) + len(other)
        assert measure_words(one, other) == (pytest.approx(2 * table[-1][-1] / total) if total else 1.0)

    @given(one=st.text(max_size=40), other=st.text(max_size=40))
    def test_similarity_is_symmetric_and_one_for_equal_texts(self, one: str, other: str) -> None:
        assert measure_similarity(one, other) == measure_similarity(other, one)
        assert measure_similarity(one, f" {one}\n") == 1.0

    def test_very_long_texts_are_compared_by_word_counts(self) -> None:
        one = " ".join(f"w{number % 1000}" for number in range(60_000))
        other = " ".join(f"w{number % 1000}" for number in reversed(range(60_000)))
        assert measure_similarity(one, other) == 1.0


class TestComparison:
    def test_thinking_and_white_space_do_not_count(self) -> None:
        one = answer_of(ThinkingBlock(text="Hm."), text("A b."))
        assert compare_answers(one, answer_of(text("A  b.\n"))).outcome is Outcome.SAME

    def test_calls_are_compared_in_any_order_by_their_meaning(self) -> None:
        one = answer_of(call("a", 1, x=1.0, y=2), call("b", 2), stop_reason=StopReason.TOOL_USE)
        other = answer_of(call("b", 8), call("a", 9, y=2, x=1), stop_reason=StopReason.TOOL_USE)
        assert compare_answers(one, other).kinds == ()

    @pytest.mark.parametrize(
        ("candidate", "kinds"),
        [
            ([call("a", 1, x=1)], [DivergenceKind.TOOL_MISSING]),
            ([call("a", 1, x=1), call("c")], [DivergenceKind.TOOL_NAME]),
            ([call("a", 1, x=2), call("b")], [DivergenceKind.TOOL_ARGUMENTS]),
            ([call("a", 1, x=1), call("b"), call("b", 3)], [DivergenceKind.TOOL_MISSING]),
            ([call("a", 1, x=1), call("b"), text("And so on.")], [DivergenceKind.TEXT]),
        ],
    )
    def test_each_difference_has_its_name(self, candidate: list[Block], kinds: list[DivergenceKind]) -> None:
        recorded = answer_of(call("a", 1, x=1), call("b", 2), stop_reason=StopReason.TOOL_USE)
        assert list(compare_answers(recorded, answer_of(*candidate, stop_reason=StopReason.TOOL_USE)).kinds) == kinds

    def test_another_action_is_worse_than_other_words(self) -> None:
        recorded = answer_of(text("One two three four."))
        reworded = compare_answers(recorded, answer_of(text("One two three five.")))
        stopped = compare_answers(recorded, answer_of(text("One two three four."), stop_reason=StopReason.LENGTH))
        called = compare_answers(
            recorded, answer_of(text("One two three four."), call("a"), stop_reason=StopReason.TOOL_USE)
        )
        assert 0 < reworded.severity < stopped.severity < called.severity <= 1
        assert compare_answers(recorded, recorded).severity == 0
